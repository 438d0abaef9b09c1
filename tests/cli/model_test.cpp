// The program on a real model, end to end and small.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/run_program.hpp"

namespace oscar::test {
namespace {

class ModelProgramTest : public ProgramTest {
 protected:
  void SetUp() override {
    ProgramTest::SetUp();
    model_ = model_path("smollm2.gguf");
    if (model_.empty()) GTEST_SKIP();
    std::string text;
    for (int line = 0; line < 400; ++line)
      text += "Line " + std::to_string(line) + " of a plain text, about nothing in particular.\n";
    text_ = write("plain.txt", text);
  }
  ProgramRun calibrate_small() const {
    return run_oscar({"calibrate", "-m", model_, "-f", text_, "-o", path("r.safetensors"), "--tokens", "512",
                      "--window", "512", "--statistics", path("s.safetensors"), "--per-layer", "--format", "json"});
  }
  std::string model_, text_;
};

TEST_F(ModelProgramTest, ATextShorterThanOneWindowIsRefused) {
  const std::string text = write("short.txt", "A short text.\n");
  const auto before = files();
  const ProgramRun run = run_oscar({"calibrate", "-m", model_, "-f", text, "-o", path("r.safetensors")});
  expect_failure(run, 3, "short.txt: text shorter than one window: window 1 of 8 needs 1536 tokens");
  EXPECT_NE(run.err.find("--window"), std::string::npos);
  EXPECT_EQ(files(), before);
}

TEST_F(ModelProgramTest, CtrlCStopsACalibrationWithoutAFile) {
  std::string text;
  for (int line = 0; line < 20000; ++line) text += "Line " + std::to_string(line) + " of a long text, about nothing.\n";
  const std::string file = write("long.txt", text);
  const auto before = files();
  const ProgramRun run =
      run_oscar({"calibrate", "-m", model_, "-f", file, "-o", path("r.safetensors"), "--tokens", "60000"},
                {.interrupt_after = 3});
  expect_failure(run, 130, "interrupted");
  EXPECT_EQ(files(), before);
}

TEST_F(ModelProgramTest, CalibratesThenRunsThenScores) {
  const ProgramRun calibrated = calibrate_small();
  ASSERT_EQ(calibrated.exit_code, 0) << calibrated.err;
  // 512 tokens are few: the check of positions may warn, in one line; nothing else is said
  const auto lines = std::ranges::count(calibrated.err, '\n');
  EXPECT_TRUE(lines == 0 || (lines == 1 && calibrated.err.starts_with("warning: the squared error of a logit")))
      << calibrated.err;
  const auto summary = nlohmann::json::parse(calibrated.out);
  EXPECT_EQ(summary["method"], "ours");
  EXPECT_EQ(summary["tokens"], 512);
  EXPECT_EQ(summary["layers"], 30);
  EXPECT_EQ(summary["per_layer"].size(), 30U);
  EXPECT_DOUBLE_EQ(summary["bits_per_element"].get<double>(), 2.25);

  const ProgramRun answered =
      run_oscar({"run", "-m", model_, "-r", path("r.safetensors"), "-p", "What is the capital of France?", "-n", "16"});
  ASSERT_EQ(answered.exit_code, 0) << answered.err;
  EXPECT_NE(answered.out.find("Paris"), std::string::npos) << answered.out;
  EXPECT_NE(answered.err.find("ratio"), std::string::npos) << answered.err;

  const std::vector<std::string> eval = {"eval",
                                         "-m",
                                         model_,
                                         "-f",
                                         text_,
                                         "-r",
                                         path("r.safetensors"),
                                         "--statistics",
                                         path("s.safetensors"),
                                         "--method",
                                         "f16,naive,ours,ours-k4,kivi",
                                         "--prefix",
                                         "512",
                                         "--score",
                                         "64",
                                         "--cache-file",
                                         path("rows.json"),
                                         "--format",
                                         "json"};
  const ProgramRun scored = run_oscar(eval);
  ASSERT_EQ(scored.exit_code, 0) << scored.err;
  const auto rows = nlohmann::json::parse(scored.out)["rows"];
  ASSERT_EQ(rows.size(), 5U);
  constexpr double kNoiseFloor = 0.002;  // other summation orders in attention; 0.0007 on long texts
  EXPECT_LT(rows[0]["kl"].get<double>(), kNoiseFloor);
  EXPECT_GT(rows[1]["kl"].get<double>(), rows[2]["kl"].get<double>());
  EXPECT_EQ(rows[2]["tokens"], 63);
  EXPECT_LT(rows[3]["kl"].get<double>(), rows[2]["kl"].get<double>()) << "4-bit keys leave less";
  EXPECT_LT(rows[4]["kl"].get<double>(), rows[1]["kl"].get<double>()) << "KIVI beats min/max of a whole row";
  EXPECT_DOUBLE_EQ(rows[3]["bits_per_element"].get<double>(), 3.25);
  EXPECT_DOUBLE_EQ(rows[4]["bits_per_element"].get<double>(), 3);
  EXPECT_EQ(run_oscar(eval).out, scored.out) << "finished rows are reused to the letter";

  const ProgramRun asked =
      run_oscar({"eval", "-m", model_, "-f", text_, "-r", path("r.safetensors"), "--method", "f16,ours", "--retrieval",
                 "2", "--prefix", "512,576", "--window-list", "64+256,4+64", "--format", "json"});
  ASSERT_EQ(asked.exit_code, 0) << asked.err;
  const auto answers = nlohmann::json::parse(asked.out)["rows"];
  ASSERT_EQ(answers.size(), 8U);  // 2 lengths, 2 windows, 2 methods
  for (const auto& row : answers) {
    EXPECT_EQ(row["questions"], 2);
    EXPECT_EQ(row["keys"], 2);
    EXPECT_LT(row["baseline_answer_log_p"].get<double>(), 0);
  }
  // What the noise of our path may do to an answer of some five tokens.
  constexpr double kLogNoise = 0.5;
  EXPECT_NEAR(answers[0]["answer_log_p"].get<double>(), answers[0]["baseline_answer_log_p"].get<double>(), kLogNoise);
  EXPECT_EQ(answers[2]["recent"], 64);
  EXPECT_EQ(answers[0]["kl"], answers[2]["kl"]) << "f16 has no windows";
  EXPECT_LT(answers[1]["kl"].get<double>(), answers[3]["kl"].get<double>()) << "smaller windows cost accuracy";
}

}  // namespace
}  // namespace oscar::test
