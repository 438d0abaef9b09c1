#include "cli/run_program.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace oscar::test {
namespace {

std::string content_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// In the child: never returns.
[[noreturn]] void become_oscar(std::vector<std::string> arguments, const RunLimits& limits, const std::string& out,
                               const std::string& err) {
  arguments.insert(arguments.begin(), OSCAR_PROGRAM_PATH);
  const auto redirect = [](const std::string& file, int to) {
    dup2(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), to);
  };
  redirect(out, STDOUT_FILENO);
  redirect(err, STDERR_FILENO);
  if (limits.file_bytes > 0) {
    const rlimit limit{static_cast<rlim_t>(limits.file_bytes), static_cast<rlim_t>(limits.file_bytes)};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  for (const auto& [name, value] : limits.environment) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  _exit(127);
}

}  // namespace

ProgramRun run_oscar(const std::vector<std::string>& arguments, const RunLimits& limits) {
  const std::string base = ::testing::TempDir() + "oscar_run_" + std::to_string(getpid());
  const std::string out = base + ".out";
  const std::string err = base + ".err";
  const pid_t child = fork();
  if (child == 0) become_oscar(arguments, limits, out, err);
  if (limits.interrupt_after > 0) {
    usleep(static_cast<useconds_t>(limits.interrupt_after * 1e6));
    kill(child, SIGINT);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ProgramRun run;
  run.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  run.out = content_of(out);
  run.err = content_of(err);
  std::filesystem::remove(out);
  std::filesystem::remove(err);
  return run;
}

void ProgramTest::SetUp() {
  std::string name = (std::filesystem::path(::testing::TempDir()) / "oscar_cli_XXXXXX").string();
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  folder_ = name;
}

void ProgramTest::TearDown() { std::filesystem::remove_all(folder_); }

std::string ProgramTest::write(const std::string& name, const std::string& content) const {
  std::ofstream(path(name), std::ios::binary) << content;
  return path(name);
}

std::string ProgramTest::read(const std::string& file) const { return content_of(file); }

std::vector<std::string> ProgramTest::files() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

void ProgramTest::expect_failure(const ProgramRun& run, int exit_code, const std::string& part) const {
  EXPECT_EQ(run.exit_code, exit_code) << run.err;
  EXPECT_NE(run.err.find(part), std::string::npos) << "expected '" << part << "' in: " << run.err;
  EXPECT_EQ(run.err.rfind("oscar: ", 0), 0U) << run.err;
  EXPECT_EQ(std::ranges::count(run.err, '\n'), 1) << run.err;
  EXPECT_EQ(run.out, "");
}

std::string model_path(const std::string& file) {
  const char* folder = std::getenv("OSCAR_MODELS");
  const std::string path = std::string(folder != nullptr ? folder : "") + "/" + file;
  if (std::filesystem::exists(path)) return path;
  ADD_FAILURE() << path << " is missing: run scripts/models, or set OSCAR_MODELS";
  return "";
}

}  // namespace oscar::test
