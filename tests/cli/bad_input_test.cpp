// Every kind of bad input: one clear message, exit code 3, and no file left behind.

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <oscar/rotation.hpp>
#include <random>

#include "cli/run_program.hpp"
#include "unit/model/gguf_builder.hpp"

namespace oscar::test {
namespace {

class BadInputTest : public ProgramTest {
 protected:
  std::string tiny() const { return write("tiny.gguf", tiny_model().build()); }
  // A rotation file for `model`, data-free.
  std::string rotation_for(const std::string& model, const std::string& name) const {
    const auto geometry = read_gguf_geometry(model);
    EXPECT_TRUE(geometry) << geometry.error().message;
    const auto set = fit_rotation(*geometry, Method::kHadamard);
    EXPECT_TRUE(set) << set.error().message;
    const Status saved = save_rotation(**set, path(name));
    EXPECT_TRUE(saved) << saved.error().message;
    return path(name);
  }
  void expect_model_refused(const std::string& model, const std::string& part) const {
    const std::string text = write("text.txt", "some text\n");
    const auto before = files();
    expect_failure(run_oscar({"calibrate", "-m", model, "-f", text, "-o", path("out.safetensors")}), 3, part);
    expect_failure(run_oscar({"run", "-m", model, "-p", "hello"}), 3, part);
    expect_failure(run_oscar({"eval", "-m", model, "-f", text}), 3, part);
    expect_failure(run_oscar({"size", "-m", model}), 3, part);
    EXPECT_EQ(files(), before);
  }
};

TEST_F(BadInputTest, ModelsThatCannotBeReadAreNamed) {
  const std::string whole = tiny_model().build();
  expect_model_refused(path("missing.gguf"), "no such file");
  expect_model_refused(write("empty.gguf", ""), "the file is empty");
  expect_model_refused(write("text.gguf", "hello"), "not a GGUF file");
  expect_model_refused(write("short.gguf", whole.substr(0, whole.size() / 2)), "the download is incomplete");
  std::string corrupt = whole;
  corrupt[24 + 8 + 20] = static_cast<char>(99);  // value type of the first key (20 characters)
  expect_model_refused(write("corrupt.gguf", corrupt), "corrupt GGUF header");
}

TEST_F(BadInputTest, ModelsThatHaveNoSuchCacheAreNamed) {
  expect_model_refused(write("mla.gguf", tiny_model("deepseek2").build()), "MLA");
  const auto wide = tiny_model().u32("qwen2.attention.key_length", 40).u32("qwen2.attention.value_length", 40);
  expect_model_refused(write("wide.gguf", wide.build()), "head_dim is 40");
}

TEST_F(BadInputTest, TextsThatCannotBeReadAreNamed) {
  const std::string model = tiny();
  const std::string out = path("out.safetensors");
  const auto calibrate = [&](const std::string& text) {
    return run_oscar({"calibrate", "-m", model, "-f", text, "-o", out});
  };
  expect_failure(calibrate(path("missing.txt")), 3, "missing.txt: no such file");
  expect_failure(calibrate(write("empty.txt", "")), 3, "empty.txt: the text is empty");
  expect_failure(calibrate(write("latin1.txt", "caf\xE9\n")), 3, "not UTF-8");
  expect_failure(calibrate(folder_.string()), 3, "is a folder");
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST_F(BadInputTest, WithoutARotationFileNothingRunsInSixteenBits) {
  expect_failure(run_oscar({"run", "-m", tiny(), "-p", "hello"}), 3, "oscar calibrate -m");
}

TEST_F(BadInputTest, DamagedRotationFilesAreRefused) {
  const std::string model = tiny();
  const std::string whole = read(rotation_for(model, "good.safetensors"));
  const auto refused = [&](const std::string& bytes, const std::string& part) {
    const std::string file = write("bad.safetensors", bytes);
    expect_failure(run_oscar({"run", "-m", model, "-p", "hello", "-r", file}), 3, part);
    expect_failure(run_oscar({"inspect", file}), 3, part);
  };
  refused("", "bad.safetensors");
  refused("hello, this is no rotation file", "bad.safetensors");
  refused(whole.substr(0, whole.size() / 2), "bad.safetensors");
  std::string flipped = whole;
  flipped[flipped.size() - 5] = static_cast<char>(flipped[flipped.size() - 5] ^ 4);
  refused(flipped, "hash");
  std::string nan = whole;
  const float not_a_number = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(nan.data() + nan.size() - 64, &not_a_number, sizeof(float));
  refused(nan, "bad.safetensors");
  std::string newer = whole;
  const std::string field = "\"format_version\":\"";
  const auto at = newer.find(field);
  ASSERT_NE(at, std::string::npos);
  newer[at + field.size()] = '9';
  refused(newer, "version");
}

TEST_F(BadInputTest, ARotationFileOfAnotherModelIsRefused) {
  const std::string other = write("other.gguf", tiny_model("llama").build());
  const std::string file = rotation_for(other, "other.safetensors");
  const std::string model = tiny();
  expect_failure(run_oscar({"run", "-m", model, "-p", "hello", "-r", file}), 3, "other.safetensors");
  const ProgramRun doctor = run_oscar({"doctor", "-m", model, "-r", file});
  EXPECT_EQ(doctor.exit_code, 1) << doctor.out;
}

TEST_F(BadInputTest, OutputsThatCannotBeWrittenAreNamedBeforeTheWork) {
  const std::string model = tiny();
  const std::string text = write("text.txt", "some text\n");
  const auto calibrate = [&](const std::string& out) {
    return run_oscar({"calibrate", "-m", model, "-f", text, "-o", out});
  };
  expect_failure(calibrate(text + "/out.safetensors"), 3, "is not a folder");
  expect_failure(calibrate(path("nowhere") + "/out.safetensors"), 3, "is not a folder");
  expect_failure(calibrate(folder_.string()), 3, "is a folder");
}

constexpr int kTokens = 512;  // of a made-up run

// Statistics of random rows, enough to fit a small model's rotation.
std::string random_statistics(const std::string& model, const std::string& file) {
  ModelStatistics statistics;
  statistics.geometry = read_gguf_geometry(model).value();
  const LayerGeometry& layer = statistics.geometry.layers[0];
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto rows = [&](int heads) {
    std::vector<float> values(static_cast<std::size_t>(kTokens) * heads * layer.head_dim);
    for (float& value : values) value = normal(random);
    return values;
  };
  RopeSpec rope{.order = RopeOrder::kHalves, .rotary_dim = layer.head_dim, .inv_freq = {}};
  for (int p = 0; p < layer.head_dim / 2; ++p) rope.inv_freq.push_back(std::pow(10000.0, -2.0 * p / layer.head_dim));
  for (int index = 0; index < static_cast<int>(statistics.geometry.layers.size()); ++index) {
    const auto q = rows(layer.num_qo_heads);
    const auto k = rows(layer.num_kv_heads);
    const auto v = rows(layer.num_kv_heads);
    const SampleBlock block{.layer = index,
                            .first_position = 0,
                            .num_tokens = kTokens,
                            .num_qo_heads = layer.num_qo_heads,
                            .num_kv_heads = layer.num_kv_heads,
                            .head_dim = layer.head_dim,
                            .q = q.data(),
                            .k = k.data(),
                            .v = v.data(),
                            .rope = &rope};
    const Status added = accumulate(statistics.layers[index], block);
    EXPECT_TRUE(added) << added.error().message;
    for (HeadStatistics& head : statistics.layers[index].heads) {
      head.output_gram.assign(static_cast<std::size_t>(layer.head_dim) * layer.head_dim, 0.0);
      for (int c = 0; c < layer.head_dim; ++c) head.output_gram[static_cast<std::size_t>(c) * (layer.head_dim + 1)] = 1;
    }
  }
  statistics.num_tokens = kTokens;
  statistics.corpus_hash = "00";
  const Status saved = save_statistics(statistics, file);
  EXPECT_TRUE(saved) << saved.error().message;
  return file;
}

TEST_F(BadInputTest, AFullDiskLeavesNoFileAndKeepsAnOldOne) {
  const std::string model = tiny();
  const std::string statistics = random_statistics(model, path("statistics.safetensors"));
  const std::vector<std::string> arguments = {"calibrate", "--from-statistics", statistics, "-o",
                                              path("out.safetensors")};
  const auto before = files();
  expect_failure(run_oscar(arguments, {.file_bytes = 2048}), 3, "out.safetensors");
  EXPECT_EQ(files(), before);

  const ProgramRun good = run_oscar(arguments);
  ASSERT_EQ(good.exit_code, 0) << good.err;
  const std::string old = read(path("out.safetensors"));
  EXPECT_EQ(run_oscar(arguments, {.file_bytes = 2048}).exit_code, 3);
  EXPECT_EQ(read(path("out.safetensors")), old);
}

TEST_F(BadInputTest, StatisticsOfAnotherModelAreRefused) {
  const std::string statistics = random_statistics(tiny(), path("statistics.safetensors"));
  const std::string other = write("other.gguf", tiny_model("llama").build());
  const auto before = files();
  expect_failure(run_oscar({"calibrate", "-m", other, "--from-statistics", statistics, "-o", path("out.safetensors")}),
                 3, "another model");
  EXPECT_EQ(files(), before);
}

TEST_F(BadInputTest, SeveralRunsAreAddedUpAndRunsOfDifferentModelsRefused) {
  const std::string statistics = random_statistics(tiny(), path("statistics.safetensors"));
  const ProgramRun run = run_oscar(
      {"calibrate", "--from-statistics", statistics, statistics, "--format", "json", "-o", path("out.safetensors")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("\"tokens\": " + std::to_string(2 * kTokens)), std::string::npos) << run.out;

  const std::string other = write("other.gguf", tiny_model("llama").build());
  const std::string foreign = random_statistics(other, path("foreign.safetensors"));
  const auto before = files();
  expect_failure(run_oscar({"calibrate", "--from-statistics", statistics, foreign, "-o", path("bad.safetensors")}), 3,
                 "cannot be added to");
  EXPECT_EQ(files(), before);
}

}  // namespace
}  // namespace oscar::test
