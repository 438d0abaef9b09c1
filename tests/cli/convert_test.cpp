// `oscar convert` and `oscar verify` from outside: files that come back as they went, findings with remedies, and
// nothing partial on disk.

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <oscar/rotation.hpp>

#include "cli/run_program.hpp"
#include "io/safetensors.hpp"
#include "rotation/rotation_file.hpp"
#include "support/statistics.hpp"
#include "unit/model/gguf_builder.hpp"
#include "unit/torch/published_builder.hpp"

namespace oscar::test {
namespace {

constexpr int kWidth = 16;  // head_dim of tiny_model(), which has 2 layers and 2 KV heads

class ConvertProgramTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    model_ = write("tiny.gguf", tiny_model().build());
  }
  // A published file of one side: a shared rotation in each layer.
  std::string published(const std::string& name, const std::string& objective, int seed, float scale = 1) const {
    std::vector<std::string> layers;
    std::vector<std::string> storages;
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<float> rotation = random_rotation(kWidth, seed + layer);
      for (float& value : rotation) value *= scale;
      storages.push_back(bytes_of(rotation));
      layers.push_back(pickled(layer));
      layers.push_back(pickled_dict({pickled("rotation"), pickled(square_piece(std::to_string(layer), kWidth))}));
    }
    return write(name, torch_file(published_root(layers, objective), storages));
  }
  std::string keys() const { return published("k.pt", "qqt_r_h_pbr", 1); }
  std::string values() const { return published("v.pt", "sst_r_h_pbr", 5); }
  std::string rotation() const {
    const ProgramRun run = run_oscar({"convert", "--from-torch", keys(), values(), "-m", model_, "-o", path("r.rot")});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    return path("r.rot");
  }
  // A file with a sound hash and whatever content.
  std::string write_unchecked(const RotationSet& set, const std::string& name) const {
    const Status written = io::write_safetensors(rotation_content(set), path(name));
    EXPECT_TRUE(written) << written.error().message;
    return path(name);
  }
  // The verdict of the check `name` of a verification that ends with `exit_code`; a finding that is not ok has a
  // remedy.
  std::string verdict(const std::vector<std::string>& arguments, int exit_code, const std::string& name) const {
    std::vector<std::string> all{"verify", "--format", "json", "-r"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    const ProgramRun run = run_oscar(all);
    EXPECT_EQ(run.exit_code, exit_code) << run.out << run.err;
    const auto json = nlohmann::json::parse(run.out, nullptr, false);
    if (json.is_discarded()) return "no JSON";
    EXPECT_EQ(json["exit_code"], exit_code);
    std::string found = "missing";
    for (const auto& check : json["checks"]) {
      EXPECT_EQ(check["verdict"] == "ok", check["remedy"] == "") << check;
      if (check["check"] == name) found = check["verdict"];
    }
    return found;
  }

  std::string model_;
};

TEST_F(ConvertProgramTest, PublishedFilesBecomeARotationFileAndComeBack) {
  const std::string first = rotation();
  ASSERT_EQ(run_oscar({"convert", "--to-torch", path("k2.pt"), path("v2.pt"), "-r", first}).exit_code, 0);
  const ProgramRun back =
      run_oscar({"convert", "--from-torch", path("k2.pt"), path("v2.pt"), "-m", model_, "--format", "json"});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  EXPECT_EQ(nlohmann::json::parse(back.out)["method"], "published");
  EXPECT_EQ(read(path("tiny.oscar.safetensors")), read(first)) << "the default output lies beside the model";
}

TEST_F(ConvertProgramTest, TheClipIsToldAndChosen) {
  const ProgramRun run = run_oscar({"convert", "--from-torch", keys(), values(), "-m", model_, "--key-clip", "0.5",
                                    "--value-clip", "1", "-o", path("r.rot")});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("keys 0.50, values 1.00"), std::string::npos) << run.out;
  const ProgramRun back = run_oscar({"convert", "--to-torch", path("k2.pt"), path("v2.pt"), "-r", path("r.rot")});
  EXPECT_NE(back.err.find("0.50 for keys and 1.00 for values"), std::string::npos) << back.err;
}

TEST_F(ConvertProgramTest, BadInputLeavesNoFileAndKeepsAnOldOne) {
  const std::string out = write("out.rot", "old");
  const std::string k = keys();
  const std::string v = values();
  const std::string text = write("text.pt", "hello");
  const std::string cut = write("cut.pt", read(k).substr(0, 500));
  const std::string stretched = published("stretched.pt", "qqt_r_h_pbr", 1, 1.5F);
  const std::string wide = write(
      "wide.gguf", tiny_model().u32("qwen2.attention.key_length", 32).u32("qwen2.attention.value_length", 32).build());
  const auto before = files();
  const auto refused = [&](const std::string& first, const std::string& second, const std::string& model,
                           const std::string& part) {
    expect_failure(run_oscar({"convert", "--from-torch", first, second, "-m", model, "-o", out}), 3, part);
  };
  refused(path("none.pt"), v, model_, "none.pt");
  refused(text, v, model_, "not a zip archive");
  refused(k, cut, model_, "cut.pt: the zip archive is damaged or cut short");
  refused(stretched, v, model_, "the rotation is not orthogonal");
  refused(v, k, model_, "name the keys' file first");
  refused(k, v, wide, "head_dim 32");
  refused(k, v, text, "not a GGUF file");
  EXPECT_EQ(files(), before);
  EXPECT_EQ(read(out), "old");
}

TEST_F(ConvertProgramTest, AFullDiskLeavesNeitherOfTheTwoFiles) {
  const std::string first = rotation();
  const auto before = files();
  expect_failure(run_oscar({"convert", "--to-torch", path("k2.pt"), path("v2.pt"), "-r", first}, {.file_bytes = 1024}),
                 3, "k2.pt");
  EXPECT_EQ(files(), before);
}

TEST_F(ConvertProgramTest, OursHasNoPublishedForm) {
  RotationSet set = **load_rotation(rotation());
  set.method = Method::kOursFast;
  const std::string file = write_unchecked(set, "ours.rot");
  const auto before = files();
  expect_failure(run_oscar({"convert", "--to-torch", path("k2.pt"), path("v2.pt"), "-r", file}), 3,
                 "ours.rot: method ours-fast has no published form");
  EXPECT_EQ(files(), before);
}

TEST_F(ConvertProgramTest, WrongUsageExitsWithTwo) {
  const std::string k = keys();
  const std::string v = values();
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{},
                                             {"--from-torch", k},
                                             {"--from-torch", k, v},
                                             {"--to-torch", path("a.pt"), path("b.pt")},
                                             {"--to-torch", path("a.pt"), path("a.pt"), "-r", "r.rot"},
                                             {"--to-torch", path("a.pt"), path("b.pt"), "-m", model_},
                                             {"--from-torch", k, v, "-m", model_, "--key-clip", "1.5"},
                                             {"--from-torch", k, v, "-m", model_, "-o", k}}) {
    std::vector<std::string> all{"convert"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    EXPECT_EQ(run_oscar(all).exit_code, 2) << (arguments.empty() ? "nothing" : arguments.back());
  }
}

TEST_F(ConvertProgramTest, VerifyPassesASoundFileAndShowsEachLayer) {
  const std::string file = rotation();
  EXPECT_EQ(verdict({file, "-m", model_}, 0, "model"), "ok");
  EXPECT_EQ(verdict({file}, 0, "orthogonality"), "ok");
  const ProgramRun run = run_oscar({"verify", "-r", file});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(run.out.find("K residual"), std::string::npos) << run.out;
}

TEST_F(ConvertProgramTest, VerifyFindsEachFaultAndExitsWithOne) {
  const std::string file = rotation();
  std::string flipped = read(file);
  flipped[flipped.size() - 5] = static_cast<char>(flipped[flipped.size() - 5] ^ 4);
  EXPECT_EQ(verdict({write("flipped.rot", flipped)}, 1, "hash"), "failed");

  const RotationSet sound = **load_rotation(file);
  RotationSet set = sound;
  set.layers.at(1).heads[0].key.transform[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(verdict({write_unchecked(set, "nan.rot")}, 1, "content"), "failed");

  set = sound;
  SideRotation& stretched = set.layers.at(1).heads[1].value;
  for (float& value : stretched.transform) value *= 1.5F;
  stretched.inverse_transposed = stretched.transform;
  EXPECT_EQ(verdict({write_unchecked(set, "stretched.rot")}, 1, "orthogonality"), "failed");

  set = sound;
  for (float& value : set.layers.at(0).heads[0].key.transform) value *= 1.5F;  // the inverse stays
  const std::string wrong_inverse = write_unchecked(set, "inverse.rot");
  EXPECT_EQ(verdict({wrong_inverse}, 1, "inverse"), "failed");
  EXPECT_EQ(verdict({wrong_inverse}, 1, "condition"), "ok");

  set = sound;
  set.layers.clear();
  EXPECT_EQ(verdict({write_unchecked(set, "empty.rot")}, 1, "layers"), "failed");

  const std::string other = write("other.gguf", tiny_model("llama").build());
  EXPECT_EQ(verdict({file, "-m", other}, 1, "model"), "failed");
}

TEST_F(ConvertProgramTest, VerifyExpectsAnErrorFromStatisticsOfTheSameModelOnly) {
  const ModelStatistics statistics = statistics_of({.num_tokens = 400});
  const std::string measured = path("a.stats");
  ASSERT_TRUE(save_statistics(statistics, measured));
  const auto set = fit_rotation(statistics, {.method = Method::kOurs, .max_context = 4096});
  ASSERT_TRUE(set) << set.error().message;
  ASSERT_TRUE(save_rotation(**set, path("a.rot")));
  EXPECT_EQ(verdict({path("a.rot"), "--statistics", measured}, 0, "expected error"), "ok");
  const ProgramRun run = run_oscar({"verify", "-r", path("a.rot"), "--statistics", measured, "--format", "json"});
  for (const auto& layer : nlohmann::json::parse(run.out)["layers"]) {
    EXPECT_GT(layer["key_error"].get<double>(), 0) << layer;
    EXPECT_GT(layer["value_error"].get<double>(), 0) << layer;
  }
  EXPECT_EQ(verdict({rotation(), "--statistics", measured}, 1, "expected error"), "failed");
}

TEST_F(ConvertProgramTest, VerifyExitsWithThreeForWhatItCannotRead) {
  const std::string file = rotation();
  expect_failure(run_oscar({"verify", "-r", path("none.rot")}), 3, "none.rot");
  expect_failure(run_oscar({"verify", "-r", write("text.rot", "hello")}), 3, "text.rot");
  expect_failure(run_oscar({"verify", "-r", write("cut.rot", read(file).substr(0, 300))}), 3, "cut.rot");
  expect_failure(run_oscar({"verify", "-r", model_}), 3, "tiny.gguf");
  expect_failure(run_oscar({"verify", "-r", file, "-m", path("none.gguf")}), 3, "none.gguf");
  expect_failure(run_oscar({"verify", "-r", file, "--statistics", path("none.stats")}), 3, "none.stats");
  EXPECT_EQ(run_oscar({"verify"}).exit_code, 2);
}

}  // namespace
}  // namespace oscar::test
