// What a user meets first: help, versions, wrong usage, the output of verbs that load no model.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <set>

#include "cli/run_program.hpp"
#include "unit/model/gguf_builder.hpp"

namespace oscar::test {
namespace {

const std::vector<std::string>& verbs() {
  static const std::vector<std::string> names = {"calibrate", "run",     "eval", "report", "convert",
                                                 "verify",    "inspect", "size", "doctor", "version"};
  return names;
}

std::string file_content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

class UsageTest : public ProgramTest {};

TEST_F(UsageTest, HelpListsEveryVerbAndTheExitCodes) {
  const ProgramRun run = run_oscar({"--help"});
  EXPECT_EQ(run.exit_code, 0);
  for (const std::string& verb : verbs()) EXPECT_NE(run.out.find(verb), std::string::npos) << verb;
  EXPECT_NE(run.out.find("130 interrupted"), std::string::npos);
  EXPECT_EQ(run.err, "");
}

TEST_F(UsageTest, EveryFlagOfEveryVerbIsInTheDocumentation) {
  const std::string page = file_content(std::string(OSCAR_SOURCE_DIR) + "/docs/cli.md");
  const std::regex flag("--[a-z][a-z-]+");
  for (const std::string& verb : verbs()) {
    const ProgramRun run = run_oscar({verb, "--help"});
    ASSERT_EQ(run.exit_code, 0) << verb;
    ASSERT_NE(page.find("## oscar " + verb), std::string::npos) << "docs/cli.md has no section on " << verb;
    for (std::sregex_iterator it(run.out.begin(), run.out.end(), flag), end; it != end; ++it) {
      if (it->str() == "--help") continue;
      EXPECT_NE(page.find(it->str()), std::string::npos) << verb << " " << it->str();
    }
  }
}

TEST_F(UsageTest, HelpShowsDefaults) {
  const ProgramRun run = run_oscar({"calibrate", "--help"});
  EXPECT_NE(run.out.find("12288"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("1536"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("ours"), std::string::npos) << run.out;
}

TEST_F(UsageTest, WrongUsageExitsWithTwo) {
  const std::vector<std::vector<std::string>> wrong = {
      {},
      {"frobnicate"},
      {"size"},
      {"size", "-m", "m.gguf", "--format", "xml"},
      {"size", "-m", "m.gguf", "--method", "best"},
      {"run", "-m", "m.gguf", "-p", "x", "--chat", "--raw"},
      {"run", "-m", "m.gguf", "-p", "x", "-t", "0"},
      {"eval", "-m", "m.gguf"},
  };
  for (const auto& arguments : wrong) {
    const ProgramRun run = run_oscar(arguments);
    EXPECT_EQ(run.exit_code, 2) << (arguments.empty() ? "(nothing)" : arguments[0]) << ": " << run.err;
    EXPECT_FALSE(run.err.empty());
    EXPECT_EQ(run.out, "");
  }
  expect_failure(run_oscar({"calibrate", "-o", path("x")}), 2, "needs -m MODEL and -f TEXT");
}

TEST_F(UsageTest, AMisspeltVariableAndAnUnknownInstructionSetAreRefused) {
  expect_failure(run_oscar({"version"}, {.environment = {{"OSCAR_IAS", "avx2"}}}), 2, "did you mean OSCAR_ISA?");
  expect_failure(run_oscar({"version"}, {.environment = {{"OSCAR_ISA", "mmx"}}}), 2, "OSCAR_ISA=mmx");
}

TEST_F(UsageTest, VersionNamesTheProgramItsFormatsAndLlama) {
  const ProgramRun table = run_oscar({"version"});
  EXPECT_EQ(table.exit_code, 0);
  EXPECT_EQ(table.out.rfind("oscar 0.1.0\nrotation file format 1, statistics format 1, page layout 1\nllama.cpp ", 0),
            0U)
      << table.out;
  const ProgramRun json = run_oscar({"version", "--format", "json"});
  EXPECT_NE(json.out.find("\"page_layout\": 1"), std::string::npos) << json.out;
}

TEST_F(UsageTest, DoctorPassesOnAMachineThatRunsTheTests) {
  const ProgramRun run = run_oscar({"doctor"});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
  EXPECT_NE(run.out.find("instruction set"), std::string::npos);
}

TEST_F(UsageTest, DoctorExitsWithOneOnABrokenModelAndSaysWhy) {
  const std::string model = write("m.gguf", "not a model");
  const ProgramRun run = run_oscar({"doctor", "-m", model});
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(run.out.find("not a GGUF file"), std::string::npos) << run.out;
}

// Output that scripts read must not change by accident. Regenerate by hand after a wanted change.
TEST_F(UsageTest, InspectAndSizeOfATinyModelPrintAsBefore) {
  const std::string model = write("tiny.gguf", tiny_model().build());
  const std::string golden = std::string(OSCAR_SOURCE_DIR) + "/tests/cli/golden/";
  EXPECT_EQ(run_oscar({"inspect", model}).out, file_content(golden + "inspect_tiny.txt"));
  EXPECT_EQ(run_oscar({"inspect", model, "--format", "json"}).out, file_content(golden + "inspect_tiny.json"));
  EXPECT_EQ(run_oscar({"size", "-m", model, "-c", "2K,32K", "--memory", "1MiB"}).out,
            file_content(golden + "size_tiny.txt"));
}

TEST_F(UsageTest, AClosedOutputIsAnError) {
  const std::string model = write("tiny.gguf", tiny_model().build());
  const ProgramRun run = run_oscar({"inspect", model}, {.file_bytes = 16});  // stdout is a file in these tests
  EXPECT_EQ(run.exit_code, 3);
}

}  // namespace
}  // namespace oscar::test
