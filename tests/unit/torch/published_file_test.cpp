// Published files as they are found: every way to write a layer gives the same numbers, everything else one error.

#include "torch/published_file.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "unit/torch/published_builder.hpp"

namespace oscar::torch {
namespace {

using test::bytes_of;
using test::pickled;
using test::pickled_dict;
using test::published_root;
using test::square_piece;
using test::TensorPiece;
using test::torch_file;

const std::vector<float> kMatrix{1, 2, 3, 4};

class PublishedFileTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }
  Result<PublishedFile> open(const std::string& bytes) const {
    test::write_test_file(path_, bytes);
    return PublishedFile::open(path_);
  }
  // Opens and reads the rotation of layer 0.
  Result<std::vector<float>> read(const std::string& bytes) const {
    OSCAR_ASSIGN(PublishedFile file, open(bytes));
    return file.read(file.layers().begin()->second.rotation);
  }
  void expect_refused(const std::string& bytes, const std::string& part) const {
    const auto values = read(bytes);
    ASSERT_FALSE(values);
    EXPECT_NE(values.error().message.find(part), std::string::npos) << values.error().message;
    EXPECT_EQ(values.error().message.find(path_), 0U) << values.error().message;
  }
  void expect_matrix(const std::string& bytes) const {
    const auto values = read(bytes);
    ASSERT_TRUE(values) << values.error().message;
    EXPECT_EQ(*values, kMatrix);
  }

  std::string path_ = ::testing::TempDir() + "oscar_published_" + std::to_string(getpid()) + ".pt";
};

std::string layer(const std::string& rotation) { return pickled_dict({pickled("rotation"), rotation}); }
std::string one_layer(const TensorPiece& rotation) { return published_root({pickled(0), layer(pickled(rotation))}); }

TEST_F(PublishedFileTest, EveryFieldThatIsThereIsRead) {
  const std::string full =
      pickled_dict({pickled("layer_id"), pickled(3), pickled("rotation"), pickled(square_piece("0", 2)),
                    pickled("eigenvalues"), pickled(square_piece("0", 2)), pickled("q_rotation"),
                    pickled(square_piece("1", 2)), pickled("k_mean"), pickled(square_piece("1", 2))});
  const std::string root =
      pickled_dict({pickled("format_version"), pickled("identity-v1"), pickled("objective"), pickled("qqt_r_h_pbr"),
                    pickled("calibration"),
                    pickled_dict({pickled("tokens"), pickled(150000), pickled("prompt_sha256"), pickled("ab")}),
                    pickled("layers"), pickled_dict({pickled(3), full})});
  auto file = open(torch_file(root, {bytes_of(kMatrix), bytes_of(kMatrix)}, {{"byteorder", "little"}}));
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->objective(), "qqt_r_h_pbr");
  EXPECT_EQ(file->num_tokens(), 150000);
  EXPECT_EQ(file->corpus_hash(), "ab");
  ASSERT_TRUE(file->layers().contains(3));
  const PublishedLayer& found = file->layers().at(3);
  EXPECT_EQ(found.rotation.storage.key, "0");
  ASSERT_TRUE(found.inverse_transposed && found.key_mean);
  EXPECT_EQ(found.inverse_transposed->storage.key, "1");
}

TEST_F(PublishedFileTest, LayersMayHaveTextKeysAndShareOneStorageWithOffsetsAndStrides) {
  const TensorPiece shared{.storage = "0", .num_elements = 6, .shape = {2, 2}, .strides = {1, 2}, .offset = 2};
  const std::string root = published_root({pickled("7"), layer(pickled(shared)), pickled("8"), layer(pickled(shared))});
  auto file = open(torch_file(root, {bytes_of<float>({9, 9, 1, 3, 2, 4})}));
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->objective(), "");
  ASSERT_EQ(file->layers().size(), 2U);
  for (const int index : {7, 8}) EXPECT_EQ(file->read(file->layers().at(index).rotation).value(), kMatrix);
}

TEST_F(PublishedFileTest, HalfAndDoublePrecisionBecomeFloat32) {
  TensorPiece piece = square_piece("0", 2);
  piece.type = "DoubleStorage";
  expect_matrix(torch_file(one_layer(piece), {bytes_of<double>({1, 2, 3, 4})}));
  piece.type = "HalfStorage";
  expect_matrix(torch_file(one_layer(piece), {bytes_of<std::uint16_t>({0x3C00, 0x4000, 0x4200, 0x4400})}));
  const auto small = read(torch_file(one_layer(piece), {bytes_of<std::uint16_t>({0x0001, 0x8000, 0xB800, 0x7BFF})}));
  EXPECT_EQ(small.value(), (std::vector<float>{0x1p-24F, -0.0F, -0.5F, 65504}));
  piece.type = "BFloat16Storage";
  expect_matrix(torch_file(one_layer(piece), {bytes_of<std::uint16_t>({0x3F80, 0x4000, 0x4040, 0x4080})}));
}

TEST_F(PublishedFileTest, ValuesThatAreNotFiniteAreRefusedWithTheirPlace) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  expect_refused(torch_file(one_layer(square_piece("0", 2)), {bytes_of<float>({1, 2, kNan, 4})}), "at element 2");
}

TEST_F(PublishedFileTest, AStorageOfAnotherSizeOrNameIsRefused) {
  const TensorPiece piece = square_piece("0", 2);
  expect_refused(torch_file(one_layer(piece), {bytes_of<float>({1, 2, 3})}), "has 12 bytes, expected 16");
  expect_refused(torch_file(one_layer(piece), {}), "'data/0' is missing");
  expect_refused(torch_file(one_layer(square_piece("../../../etc/passwd", 2)), {}), "expected a number");
  expect_refused(torch_file(one_layer(square_piece("", 2)), {}), "expected a number");
}

TEST_F(PublishedFileTest, AnotherStructureIsToldInWords) {
  const std::string matrix = bytes_of(kMatrix);
  const std::string rotation = pickled(square_piece("0", 2));
  expect_refused(torch_file(rotation, {matrix}), "holds a tensor [2, 2] without 'layers'");
  expect_refused(torch_file(pickled_dict({pickled("layers"), rotation}), {matrix}), "its 'layers' is a tensor");
  expect_refused(torch_file(published_root({}), {}), "without entries");
  expect_refused(torch_file(published_root({pickled(0), layer(pickled(4))}), {}), "layer 0 has no tensor 'rotation'");
  expect_refused(torch_file(published_root({pickled(-1), layer(rotation)}), {matrix}), "the number -1 as its key");
  expect_refused(torch_file(published_root({pickled("3x"), layer(rotation)}), {matrix}), "the text '3x' as its key");
  expect_refused(torch_file(published_root({pickled(1), layer(rotation), pickled("1"), layer(rotation)}), {matrix}),
                 "layer 1 is there twice");
  const std::string other = pickled_dict({pickled("layer_id"), pickled(5), pickled("rotation"), rotation});
  expect_refused(torch_file(published_root({pickled(4), other}), {matrix}), "layer 4 says that it is the number 5");
  expect_refused(torch_file(one_layer(square_piece("0", 2)), {matrix}, {{"byteorder", "big"}}), "byte order 'big'");
}

TEST_F(PublishedFileTest, APickleThatWouldRunCodeIsRefusedByName) {
  expect_refused(torch_file("cposix\nsystem\n" + pickled("true") + "\x85R", {}), "'posix.system'");
}

}  // namespace
}  // namespace oscar::torch
