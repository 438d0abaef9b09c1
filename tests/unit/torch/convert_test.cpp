// From published files to a rotation set and back: nothing changes on the way, and what does not belong together is
// told.

#include "torch/convert.hpp"

#include <gtest/gtest.h>

#include <filesystem>

#include "rotation/rotation_file.hpp"
#include "rotation/transform_check.hpp"
#include "unit/torch/published_builder.hpp"

namespace oscar::torch {
namespace {

using test::bytes_of;
using test::pickled;
using test::pickled_dict;
using test::published_root;
using test::random_rotation;
using test::square_piece;
using test::TensorPiece;
using test::torch_file;

constexpr int kWidth = 16;
constexpr int kHeads = 2;

ModelGeometry model(int num_layers = 2) {
  ModelGeometry geometry;
  geometry.architecture = "qwen2";
  geometry.name = "tiny";
  geometry.context_length = 2048;
  geometry.fingerprint = std::string(32, 'a');
  geometry.layers.assign(static_cast<std::size_t>(num_layers),
                         LayerGeometry{.num_qo_heads = 4, .num_kv_heads = kHeads, .head_dim = kWidth});
  return geometry;
}

// A shared rotation a layer, storages by layer.
struct FileParts {
  std::vector<std::string> layers, storages;
  void add(int layer, const std::vector<float>& rotation) {
    const std::string storage = std::to_string(storages.size());
    storages.push_back(bytes_of(rotation));
    layers.push_back(pickled(layer));
    layers.push_back(pickled_dict({pickled("rotation"), pickled(square_piece(storage, kWidth))}));
  }
  std::string file(const std::string& objective) const {
    return torch_file(published_root(layers, objective), storages);
  }
};

std::string shared_file(const std::string& objective, int seed, const std::vector<int>& layers = {0, 1}) {
  FileParts parts;
  for (const int layer : layers) parts.add(layer, random_rotation(kWidth, seed + layer));
  return parts.file(objective);
}

// [H, D, D] in every layer, with companions under the names given.
std::string per_head_file(const std::string& objective, float scale, const std::vector<std::string>& companions = {}) {
  std::vector<float> rotations;
  std::vector<float> inverses;
  for (int h = 0; h < kHeads; ++h) {
    for (const float value : random_rotation(kWidth, h)) {
      rotations.push_back(value * scale);
      inverses.push_back(value / scale);
    }
  }
  const TensorPiece piece{.storage = "0",
                          .num_elements = kHeads * kWidth * kWidth,
                          .shape = {kHeads, kWidth, kWidth},
                          .strides = {kWidth * kWidth, kWidth, 1}};
  std::vector<std::string> items{pickled("rotation"), pickled(piece)};
  for (const std::string& name : companions) {
    TensorPiece companion = piece;
    companion.storage = "1";
    items.insert(items.end(), {pickled(name), pickled(companion)});
  }
  const std::string layer = pickled_dict(items);
  return torch_file(published_root({pickled(0), layer, pickled(1), layer}, objective),
                    {bytes_of(rotations), bytes_of(inverses)});
}

class ConvertTest : public ::testing::Test {
 protected:
  void TearDown() override {
    std::filesystem::remove(keys_);
    std::filesystem::remove(values_);
  }
  Result<std::shared_ptr<const RotationSet>> convert(const std::string& key_bytes, const std::string& value_bytes,
                                                     const ModelGeometry& geometry = model(),
                                                     const FromPublishedOptions& options = {}) const {
    test::write_test_file(keys_, key_bytes);
    test::write_test_file(values_, value_bytes);
    OSCAR_ASSIGN(PublishedFile keys, PublishedFile::open(keys_));
    OSCAR_ASSIGN(PublishedFile values, PublishedFile::open(values_));
    return from_published(keys, values, geometry, options);
  }
  void expect_refused(const Result<std::shared_ptr<const RotationSet>>& result, ErrorCode code,
                      const std::string& part) const {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, code);
    EXPECT_NE(result.error().message.find(part), std::string::npos) << result.error().message;
  }
  std::shared_ptr<const RotationSet> there_and_back(const RotationSet& set) const {
    const auto pair = to_published(set);
    EXPECT_TRUE(pair) << pair.error().message;
    const auto back = convert(pair->key_archive, pair->value_archive, set.geometry);
    EXPECT_TRUE(back) << back.error().message;
    return back.value_or(nullptr);
  }

  std::string keys_ = ::testing::TempDir() + "oscar_convert_k_" + std::to_string(getpid()) + ".pt";
  std::string values_ = ::testing::TempDir() + "oscar_convert_v_" + std::to_string(getpid()) + ".pt";
};

TEST_F(ConvertTest, SharedRotationsBecomeThePublishedMethodWithItsClip) {
  const auto set = convert(shared_file("qqt_r_h_pbr", 1), shared_file("sst_r_h_pbr", 5));
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ((*set)->method, Method::kPublished);
  EXPECT_EQ((*set)->composition, "r_h_pbr");
  EXPECT_EQ((*set)->content_hash, rotation_hash(**set));
  ASSERT_EQ((*set)->layers.size(), 2U);
  for (const auto& [index, layer] : (*set)->layers) {
    ASSERT_EQ(layer.heads.size(), static_cast<std::size_t>(kHeads));
    for (const HeadRotation& head : layer.heads) {
      EXPECT_EQ(head.key.transform, random_rotation(kWidth, 1 + index));
      EXPECT_EQ(head.key.inverse_transposed, head.key.transform);
      EXPECT_EQ(head.value.transform, random_rotation(kWidth, 5 + index));
      EXPECT_EQ(head.key.clip_ratio, 0.96F);
      EXPECT_EQ(head.value.clip_ratio, 0.92F);
    }
  }
}

TEST_F(ConvertTest, ClipRatiosAreTheCallers) {
  const auto set =
      convert(shared_file("", 1), shared_file("", 5), model(), {.key_clip_ratio = 0.5F, .value_clip_ratio = 0});
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ((*set)->layers.at(0).heads[0].key.clip_ratio, 0.5F);
  EXPECT_EQ((*set)->layers.at(0).heads[0].value.clip_ratio, 0);
}

TEST_F(ConvertTest, OneRotationAHeadBecomesPerHeadWhateverTheOtherSideHas) {
  const auto set = convert(per_head_file("cov_eig_hadamard_perhead", 1), shared_file("sst_r_h_pbr", 5));
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ((*set)->method, Method::kPublishedPerHead);
  for (std::size_t h = 0; h < kHeads; ++h) {
    EXPECT_EQ((*set)->layers.at(1).heads[h].key.transform, random_rotation(kWidth, static_cast<int>(h)));
    EXPECT_EQ((*set)->layers.at(1).heads[h].value.transform, random_rotation(kWidth, 6));
  }
}

TEST_F(ConvertTest, AHadamardFileIsTheDataFreeMethodAndMustHoldHadamardMatrices) {
  const auto data_free = fit_rotation(model(), Method::kHadamard);
  ASSERT_TRUE(data_free);
  FileParts parts;
  for (const int layer : {0, 1}) parts.add(layer, (*data_free)->layers.at(layer).heads[0].key.transform);
  const auto set = convert(parts.file("hadamard"), parts.file("hadamard"));
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ((*set)->method, Method::kHadamard);
  EXPECT_EQ((*set)->layers.at(0).heads[1].value.transform, (*data_free)->layers.at(0).heads[1].value.transform);

  std::vector<float> identity(kWidth * kWidth, 0);
  for (int i = 0; i < kWidth; ++i) identity[static_cast<std::size_t>(i * (kWidth + 1))] = 1;
  FileParts other;
  for (const int layer : {0, 1}) other.add(layer, identity);
  expect_refused(convert(other.file("hadamard"), parts.file("hadamard")), ErrorCode::kBadInput,
                 "is no Hadamard matrix");
}

TEST_F(ConvertTest, ATransformThatIsNotOrthogonalNeedsItsInverse) {
  const auto set = convert(per_head_file("oscar2_flat", 2, {"q_rotation"}), per_head_file("v", 4, {"o_rotation"}));
  ASSERT_TRUE(set) << set.error().message;
  const HeadRotation& head = (*set)->layers.at(0).heads[1];
  EXPECT_LE(residual(head.key.transform, head.key.inverse_transposed, kWidth), kMaxResidual);
  EXPECT_LE(residual(head.value.transform, head.value.inverse_transposed, kWidth), kMaxResidual);
  EXPECT_EQ(head.key.transform[0], 2 * random_rotation(kWidth, 1)[0]);

  expect_refused(convert(per_head_file("", 2), per_head_file("", 1)), ErrorCode::kBadInput,
                 "layer 0: KV head 0: the rotation is not orthogonal: |R R^T - I| is 3.0e+00");
  expect_refused(convert(per_head_file("", 1, {"q_rotation"}), per_head_file("", 1.01F)), ErrorCode::kBadInput,
                 "not orthogonal");
}

TEST_F(ConvertTest, AKeyMeanIsRefusedUnlessItIsDropped) {
  const std::string centered = per_head_file("oscar2_center", 1, {"k_mean"});
  expect_refused(convert(centered, shared_file("", 5)), ErrorCode::kUnsupported, "--drop-key-mean");
  EXPECT_TRUE(convert(centered, shared_file("", 5), model(), {.drop_key_mean = true}));
}

TEST_F(ConvertTest, FilesOfAnotherModelAreRefusedWithTheFirstDifference) {
  const std::string keys = shared_file("qqt_x", 1);
  const std::string values = shared_file("sst_x", 5);
  const auto refused = [&](const ModelGeometry& geometry, const std::string& part) {
    expect_refused(convert(keys, values, geometry), ErrorCode::kMismatch, part);
  };
  refused(model(1), "holds layer 1, the model has 1 layers");
  refused(model(3), "has no layer 2, which the model reads in full");
  ModelGeometry wide = model();
  wide.layers[1].head_dim = 32;
  refused(wide, "layer 1: rotation is [16, 16], the model has head_dim 32 and 2 KV heads");
  ModelGeometry hybrid = model();
  hybrid.layers[0].kind = LayerKind::kNoCache;
  refused(hybrid, "holds layer 0, in which the model keeps no cache");
  ModelGeometry sliding = model(3);
  sliding.layers[2].kind = LayerKind::kSlidingWindow;
  EXPECT_TRUE(convert(keys, values, sliding)) << "a sliding-window layer may keep its 16-bit cache";
  ModelGeometry more_heads = model();
  more_heads.layers[0].num_kv_heads = 4;
  expect_refused(convert(per_head_file("", 1), values, more_heads), ErrorCode::kMismatch,
                 "rotation is [2, 16, 16], the model has head_dim 16 and 4 KV heads");
}

TEST_F(ConvertTest, SwappedFilesAndFilesOfDifferentLayersAreRefused) {
  expect_refused(convert(shared_file("sst_r_h_pbr", 1), shared_file("qqt_r_h_pbr", 5)), ErrorCode::kMismatch,
                 "name the keys' file first");
  expect_refused(convert(shared_file("qqt_x", 1), shared_file("sst_x", 5, {0})), ErrorCode::kMismatch,
                 "has no layer 1, which");
}

TEST_F(ConvertTest, ThereAndBackChangesNothing) {
  const auto shared = convert(shared_file("qqt_r_h_pbr", 1), shared_file("sst_r_h_pbr", 5));
  const auto per_head = convert(per_head_file("cov", 1), shared_file("sst_x", 5));
  const auto inverse = convert(per_head_file("oscar2_flat", 2, {"q_rotation"}), per_head_file("v", 1));
  for (const auto& set : {shared, per_head, inverse}) {
    ASSERT_TRUE(set) << set.error().message;
    const auto back = there_and_back(**set);
    ASSERT_NE(back, nullptr);
    EXPECT_EQ(back->content_hash, (*set)->content_hash);
  }
  const auto hadamard = fit_rotation(model(), Method::kHadamard);
  const auto back = there_and_back(**hadamard);
  ASSERT_NE(back, nullptr);
  EXPECT_EQ(back->method, Method::kHadamard);
  EXPECT_EQ(back->layers.at(1).heads[1].key.transform, (*hadamard)->layers.at(1).heads[1].key.transform);
}

TEST_F(ConvertTest, ASetOfOneHeadStaysPerHead) {
  ModelGeometry geometry = model();
  for (LayerGeometry& layer : geometry.layers) layer.num_kv_heads = 1;
  RotationSet set = **convert(shared_file("qqt_x", 1), shared_file("sst_x", 5), geometry);
  set.method = Method::kPublishedPerHead;
  EXPECT_EQ(there_and_back(set)->method, Method::kPublishedPerHead);
}

TEST_F(ConvertTest, MethodsWithoutAPublishedFormAreRefusedWithTheReason) {
  RotationSet set = **convert(shared_file("", 1), shared_file("", 5));
  for (const Method method : {Method::kOurs, Method::kOursFast, Method::kNaive}) {
    set.method = method;
    const auto pair = to_published(set);
    ASSERT_FALSE(pair);
    EXPECT_EQ(pair.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(pair.error().message.find("method " + std::string(method_name(method)) + " has no"), 0U)
        << pair.error().message;
  }
}

TEST_F(ConvertTest, WhatIsWrittenHasOnlyNamesThatTorchsSafeModeAllows) {
  const auto pair = to_published(**convert(shared_file("qqt_x", 1), shared_file("sst_x", 5)));
  test::write_test_file(keys_, pair->key_archive);
  const auto archive = Archive::open(keys_);
  ASSERT_TRUE(archive) << archive.error().message;
  EXPECT_EQ(archive->read("version").value(), "3\n");
  EXPECT_EQ(archive->read("byteorder").value(), "little");
  const auto pickle = Pickle::parse(archive->read("data.pkl").value());
  ASSERT_TRUE(pickle) << pickle.error().message;
  EXPECT_EQ(*pickle->root().find("format_version")->as<std::int64_t>(), 1);
  EXPECT_EQ(*pickle->root().find("objective")->as<std::string>(), "qqt_x");
  EXPECT_EQ(*pickle->root().find("source_grouping")->as<std::string>(), "layer");
  const auto* layers = pickle->root().find("layers")->as<Dict>();
  ASSERT_NE(layers, nullptr);
  EXPECT_EQ(*layers->entries[1].first->as<std::int64_t>(), 1);
  EXPECT_EQ(layers->entries[1].second->find("rotation")->as<Tensor>()->shape, (io::Shape{kWidth, kWidth}));
}

}  // namespace
}  // namespace oscar::torch
