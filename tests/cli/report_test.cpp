// `oscar report` from outside: the page is whole and self-contained, and bad rows are told.

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/run_program.hpp"

namespace oscar::test {
namespace {

nlohmann::json row(const std::string& text, const std::string& method, double bits, double kl, int prefix) {
  return {
      {"model", "m<1>"},
      {"text", text},
      {"method", method},
      {"mode", "prefix"},
      {"prefix", prefix},
      {"sink", 64},
      {"recent", 256},
      {"bits_per_element", bits},
      {"bits_at_length", bits},
      {"bits_at_8k", bits},
      {"bits_at_32k", bits},
      {"bits_at_128k", bits},
      {"kl", kl},
      {"kl_error", kl / 10},
      {"kl_p99", 2 * kl},
      {"top1", 0.5},
      {"perplexity", 12.5},
      {"baseline_perplexity", 12.0},
      {"ratio", 1.04},
      {"ratio_error", 0.01},
      {"tokens", 255},
      {"seconds", 1.0},
      {"keys", 0},
      {"questions", 0},
      {"exact", 0},
      {"baseline_exact", 0},
      {"answer_log_p", 0.0},
      {"baseline_answer_log_p", 0.0},
      {"depths", nlohmann::json::array()},
      {"positions",
       {{{"first", prefix}, {"kl", kl}, {"tokens", 64}}, {{"first", prefix + 64}, {"kl", 2 * kl}, {"tokens", 64}}}}};
}

nlohmann::json retrieval_row(const std::string& method, int prefix, int exact) {
  nlohmann::json result = row("prose", method, 2.25, 0.02, prefix);
  result["keys"] = 8;
  result["questions"] = 16;
  result["exact"] = exact;
  result["baseline_exact"] = 15;
  result["answer_log_p"] = -0.75;
  for (int i = 0; i < 4; ++i) {
    result["depths"].push_back({{"from", i / 4.0}, {"questions", 4}, {"exact", exact / 4}, {"baseline_exact", 4}});
  }
  return result;
}

class ReportTest : public ProgramTest {};

TEST_F(ReportTest, RetrievalIsOneMapOverAllContextLengths) {
  const nlohmann::json rows = {{"rows",
                                {retrieval_row("ours", 2048, 13), retrieval_row("ours", 4096, 11),
                                 retrieval_row("kivi", 4096, 2), row("prose", "ours", 2.25, 0.02, 2048)}}};
  const std::string page = path("page.html");
  const ProgramRun run = run_oscar({"report", write("rows.json", rows.dump()), "-o", page});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.err.find("4 rows in 2 sections"), std::string::npos) << run.err;
  const std::string html = read(page);
  for (const char* part : {": retrieval</h2>", "8 pass keys", ">13/16<", ">11/16<", ">2/16<", ">15/16<", "-0.750"})
    EXPECT_NE(html.find(part), std::string::npos) << part;
}

TEST_F(ReportTest, OnePageHoldsEverySectionAndLoadsNothing) {
  const nlohmann::json rows = {{"rows",
                                {row("prose", "f16", 16, 0.001, 1536), row("prose", "ours", 2.25, 0.02, 1536),
                                 row("prose", "q4_0", 4.5, 0.3, 1536), row("code", "ours", 2.25, 0, 1536),
                                 row("prose", "ours", 2.25, 0.03, 8192)}}};
  const std::string page = path("page.html");
  const ProgramRun run = run_oscar({"report", write("rows.json", rows.dump()), "-o", page, "--csv", path("rows.csv"),
                                    "--figure", path("figure.svg"), "--title", "A & B"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const std::string html = read(page);
  EXPECT_NE(html.find("<h1>A &amp; B</h1>"), std::string::npos);
  EXPECT_NE(html.find("<h2>m&lt;1&gt;, prose</h2>"), std::string::npos);
  EXPECT_NE(html.find("8192 tokens of prefix"), std::string::npos);
  EXPECT_EQ(html.find("m<1>"), std::string::npos);
  EXPECT_EQ(html.find("nan"), std::string::npos);
  EXPECT_EQ(html.find("inf"), std::string::npos);
  for (const char* outside : {"src=", "href=", "@import", "url("})
    EXPECT_EQ(html.find(outside), std::string::npos) << outside;
  EXPECT_TRUE(html.ends_with("</html>\n"));
  EXPECT_EQ(read(path("rows.csv")).find("model,text,method"), 0U);
  EXPECT_TRUE(read(path("figure.svg")).ends_with("</svg>\n"));
}

TEST_F(ReportTest, BadRowsAreToldAndLeaveNoPage) {
  const std::string page = path("page.html");
  const std::vector<std::pair<std::string, std::string>> bad = {{"", "has no rows"},
                                                                {"{\"rows\": []}", "has no rows"},
                                                                {"{\"rows\": [{\"model\": 1}]}", "row 1"},
                                                                {"[1]", "has no rows"}};
  for (const auto& [content, message] : bad) {
    const ProgramRun run = run_oscar({"report", write("rows.json", content), "-o", page});
    expect_failure(run, 3, message);
    EXPECT_FALSE(std::filesystem::exists(page));
  }
  EXPECT_EQ(run_oscar({"report", path("none.json")}).exit_code, 3);
  EXPECT_EQ(run_oscar({"report"}).exit_code, 2);
}

}  // namespace
}  // namespace oscar::test
