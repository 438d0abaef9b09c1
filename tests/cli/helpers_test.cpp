// The parts of the program that need no model.

#include <ggml.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "environment.hpp"
#include "eval_rows.hpp"
#include "metrics.hpp"
#include "model/gguf.hpp"
#include "options.hpp"
#include "outcome.hpp"
#include "progress.hpp"
#include "table.hpp"
#include "text.hpp"

namespace oscar::tool {
namespace {

TEST(TextTest, WindowsStartAfterALineBreakAtTheirShareOfTheCharacters) {
  std::string text;
  for (int line = 0; line < 100; ++line) text += "0123456\n";  // 800 characters
  EXPECT_EQ(window_start(text, 0, 1, 0.05), 48U);              // character 40 begins a line; its break is character 47
  EXPECT_EQ(window_start(text, 1, 2, 0.05), 400U + 8U);
}

TEST(TextTest, SharesCountCharactersAndNotBytes) {
  // 10 two-byte characters a line: 20 bytes and the break.
  std::string text;
  for (int line = 0; line < 10; ++line) text += "ääääääääää\n";
  EXPECT_EQ(window_start(text, 0, 1, 0.5), 6U * 21U);  // character 55 is the first of line 5
}

TEST(TextTest, ATextWithoutLineBreaksStartsAtTheShareItself) {
  EXPECT_EQ(window_start(std::string(100, 'x'), 0, 1, 0.05), 5U);
}

TEST(TextTest, TellsUtf8FromOtherBytes) {
  for (const char* good : {"", "plain", "\xC3\xA4", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xED\x9F\xBF"})
    EXPECT_TRUE(is_utf8(good)) << good;
  for (const char* bad :
       {"\x80", "\xC3", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF"}) {
    EXPECT_FALSE(is_utf8(bad));
  }
}

TEST(MetricsTest, LogSoftmaxIsNormalisedAndShiftInvariant) {
  const std::array<float, 3> logits = {1000.0F, 1001.0F, 999.0F};
  std::array<float, 3> log_p{};
  log_softmax(logits, log_p);
  constexpr double kFloatError = 1e-6;  // one float32 rounding of a log-probability near 1
  double sum = 0;
  for (const float l : log_p) sum += std::exp(static_cast<double>(l));
  EXPECT_NEAR(sum, 1, kFloatError);
  EXPECT_NEAR(log_p[1] - log_p[0], 1, kFloatError);
}

TEST(MetricsTest, DivergenceOfKnownDistributions) {
  const std::array<float, 2> p = {std::log(0.5F), std::log(0.5F)};
  const std::array<float, 2> q = {std::log(0.9F), std::log(0.1F)};
  EXPECT_NEAR(kl_divergence(p, q), 0.5 * std::log(0.5 / 0.9) + 0.5 * std::log(0.5 / 0.1), 1e-6);
  EXPECT_EQ(kl_divergence(p, p), 0);
}

TEST(MetricsTest, SummaryHasUnbiasedErrorsAndInterpolatedPercentiles) {
  TokenScores scores;
  scores.kl = {0, 1, 2, 3};
  scores.same_top = {true, true, true, false};
  scores.nll = {1, 1, 2, 2};
  scores.baseline_nll = {1, 1, 1, 1};
  const ScoreSummary s = summarise(scores);
  constexpr double kRounding = 1e-12;
  EXPECT_NEAR(s.kl, 1.5, kRounding);
  EXPECT_NEAR(s.kl_error, std::sqrt(5.0 / 3.0 / 4.0), kRounding);
  EXPECT_NEAR(s.kl_p99, 2.97, kRounding);
  EXPECT_NEAR(s.top1, 0.75, kRounding);
  EXPECT_NEAR(s.perplexity, std::exp(1.5), kRounding);
  EXPECT_NEAR(s.ratio, std::exp(0.5), kRounding);
  EXPECT_NEAR(s.ratio_error, std::sqrt(1.0 / 3.0 / 4.0) * std::exp(0.5), kRounding);
  EXPECT_EQ(s.num_tokens, 4U);
}

TEST(OptionsTest, SizesAndTokenCountsAreReadWithTheirUnits) {
  EXPECT_EQ(parse_bytes("8GiB").value(), 8LL << 30);
  EXPECT_EQ(parse_bytes("1.5G").value(), 3LL << 29);
  EXPECT_EQ(parse_bytes("500MB").value(), 500000000);
  EXPECT_EQ(parse_bytes("4096").value(), 4096);
  for (const char* bad : {"", "GiB", "8 GiB", "-1", "8XB", "nan", "1e300"}) EXPECT_FALSE(parse_bytes(bad)) << bad;
  EXPECT_EQ(parse_tokens("32K").value(), 32768);
  EXPECT_EQ(parse_tokens("100").value(), 100);
  for (const char* bad : {"", "0", "-5", "1.5", "32KiB", "99999999999"}) EXPECT_FALSE(parse_tokens(bad)) << bad;
}

TEST(OptionsTest, TheRotationFileLiesBesideTheModel) {
  EXPECT_EQ(default_rotation_path("models/m.gguf"), "models/m.oscar.safetensors");
  EXPECT_EQ(default_rotation_path("m"), "m.oscar.safetensors");
}

TEST(EnvironmentTest, AMisspeltVariableIsAnErrorWithTheNearestName) {
  const std::array<const char*, 3> good = {"PATH=/bin", "OSCAR_ISA=avx2", nullptr};
  EXPECT_TRUE(check_environment(good.data()));
  const std::array<const char*, 2> bad = {"OSCAR_IAS=avx2", nullptr};
  const Status status = check_environment(bad.data());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().message, "environment variable OSCAR_IAS is unknown; did you mean OSCAR_ISA?");
  EXPECT_EQ(exit_code_of(status.error()), kExitUsage);
}

TEST(TableTest, ColumnsAlignByCharactersNotBytes) {
  Table table({"name", "KL"}, 1);
  table.add({"a", "0.1 ± 0.2"});
  table.add({"long name", "1"});
  EXPECT_EQ(table.text(), "name              KL\na          0.1 ± 0.2\nlong name          1\n");
}

TEST(TableTest, BytesShowThreeDigits) {
  EXPECT_EQ(bytes_text(512), "512 B");
  EXPECT_EQ(bytes_text(1536), "1.50 KiB");
  EXPECT_EQ(bytes_text(12.34 * 1024 * 1024), "12.3 MiB");
  EXPECT_EQ(bytes_text(300.0 * 1024 * 1024 * 1024), "300 GiB");
}

TEST(GgufTypesTest, SizesOfTensorTypesAreThoseOfGgml) {
  for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
    const gguf::TypeSize size = gguf::type_size(static_cast<std::uint32_t>(type));
    EXPECT_EQ(size.block_elements, ggml_blck_size(static_cast<ggml_type>(type)))
        << ggml_type_name(static_cast<ggml_type>(type));
    EXPECT_EQ(size.block_bytes, ggml_type_size(static_cast<ggml_type>(type)))
        << ggml_type_name(static_cast<ggml_type>(type));
  }
}

TEST(ProgressTest, ClocksReadAsPeopleWriteThem) {
  EXPECT_EQ(clock_text(5), "0:05");
  EXPECT_EQ(clock_text(65), "1:05");
  EXPECT_EQ(clock_text(7200), "2:00:00");
  EXPECT_EQ(clock_text(-1), "0:00");
}

TEST(RowFileTest, FinishedRowsComeBackAndForeignFilesAreRefused) {
  const std::string path = ::testing::TempDir() + "rows_" + std::to_string(::getpid()) + ".json";
  EvalRow row;
  row.model = "m";
  row.text = "prose";
  row.method = "ours";
  row.summary.kl = 0.125;
  row.summary.num_tokens = 255;
  row.mode = "prefix";
  row.positions = {{1536, 0.25, 64}, {1600, 0.5, 63}};
  row.retrieval = {8, 16, 12, 15, -0.75, -0.5, {{0.25, 4, 3, 4}}};
  {
    auto file = RowFile::open(path);
    ASSERT_TRUE(file);
    EXPECT_EQ(file->find("key"), nullptr);
    ASSERT_TRUE(file->add("key", row));
  }
  const auto file = RowFile::open(path);
  ASSERT_TRUE(file) << file.error().message;
  const EvalRow* found = file->find("key");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->summary.kl, 0.125);
  EXPECT_EQ(found->summary.num_tokens, 255U);
  ASSERT_EQ(found->retrieval.depths.size(), 1U);
  EXPECT_EQ(found->retrieval.depths[0].exact, 3);
  EXPECT_EQ(row_json(*found), row_json(row));
  std::filesystem::resize_file(path, 20);
  const auto broken = RowFile::open(path);
  ASSERT_FALSE(broken);
  EXPECT_EQ(broken.error().code, ErrorCode::kBadInput);
  std::filesystem::remove(path);
}

TEST(RowFileTest, RowsOfAnOlderProgramAreMeasuredAgainAndThoseOfANewerOneRefused) {
  const std::string path = ::testing::TempDir() + "old_rows_" + std::to_string(::getpid()) + ".json";
  std::ofstream(path) << R"({"format": "oscar-eval-rows", "version": 1, "rows": {"key": {}}})";
  const auto old = RowFile::open(path);
  ASSERT_TRUE(old) << old.error().message;
  EXPECT_EQ(old->find("key"), nullptr);
  std::ofstream(path) << R"({"format": "oscar-eval-rows", "version": 99, "rows": {}})";
  EXPECT_FALSE(RowFile::open(path));
  std::filesystem::remove(path);
}

TEST(RowFileTest, CsvHasAHeadingAndQuotesText) {
  EvalRow row;
  row.model = "a \"b\", c";
  row.text = "prose";
  row.method = "ours";
  row.mode = "full";
  const std::string csv = rows_csv({row, row});
  EXPECT_TRUE(csv.starts_with("model,text,method,mode,prefix,")) << csv;
  EXPECT_NE(csv.find("\n\"a \"\"b\"\", c\",\"prose\",\"ours\",\"full\",0,"), std::string::npos) << csv;
  EXPECT_EQ(std::ranges::count(csv, '\n'), 3);
}

TEST(MetricsTest, PositionsAreGroupedInOrder) {
  TokenScores scores;
  scores.position = {130, 64, 127, 1000};
  scores.kl = {4, 1, 3, 7};
  const auto buckets = by_position(scores, 64);
  ASSERT_EQ(buckets.size(), 3U);
  EXPECT_EQ(buckets[0].first, 64);
  EXPECT_EQ(buckets[0].kl, 2);
  EXPECT_EQ(buckets[0].num_tokens, 2U);
  EXPECT_EQ(buckets[1].first, 128);
  EXPECT_EQ(buckets[2].first, 960);
  EXPECT_EQ(buckets[2].kl, 7);
}

}  // namespace
}  // namespace oscar::tool
