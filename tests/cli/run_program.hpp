#pragma once
// Runs the `oscar` program as a user does, and keeps what it said.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace oscar::test {

struct ProgramRun {
  int exit_code = -1;  // 128 + the signal's number when a signal ended it
  std::string out, err;
};

struct RunLimits {
  long file_bytes = 0;                                  // > 0: no file may grow beyond this, as on a full disk
  double interrupt_after = 0;                           // > 0: Ctrl-C after so many seconds
  std::map<std::string, std::string> environment = {};  // added to this process's own
};

ProgramRun run_oscar(const std::vector<std::string>& arguments, const RunLimits& limits = {});

// A folder of its own for each test, removed afterwards.
class ProgramTest : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& content) const;  // returns the path
  std::string read(const std::string& file) const;
  // Names of the files in the folder, sorted.
  std::vector<std::string> files() const;
  // One clear message: exit code, `part` of the text, a single line on stderr, nothing on stdout.
  void expect_failure(const ProgramRun& run, int exit_code, const std::string& part) const;

  std::filesystem::path folder_;
};

// Path of a test model, or an empty string after a failed expectation.
std::string model_path(const std::string& file);

}  // namespace oscar::test
