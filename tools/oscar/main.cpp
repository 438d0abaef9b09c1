// The `oscar` program: reads the command line, runs one verb, turns its error into a message and an exit code.

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <oscar/isa.hpp>
#include <oscar/version.hpp>

#include "environment.hpp"
#include "interrupt.hpp"
#include "options.hpp"
#include "outcome.hpp"

namespace oscar::tool {
namespace {

int fail(const Error& error) {
  note("oscar: " + error.message);
  return exit_code_of(error);
}

int run_program(int argc, char** argv) {
  install_interrupt_handler();
  CLI::App app{"KV caches of language models in 2 bits: calibrate a model once, then run it with the small cache.",
               "oscar"};
  app.option_defaults()->always_capture_default();
  app.require_subcommand(1);
  app.fallthrough();
  app.set_version_flag("--version", "oscar " OSCAR_VERSION_STRING);
  app.footer(
      "Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 bad input, 4 this machine cannot, 130 interrupted.\n"
      "'oscar VERB --help' explains a verb.");
  Globals globals;
  app.add_flag("-v,--verbose", globals.verbose, "Show llama.cpp's log on stderr");

  const std::vector<Verb> verbs = {add_calibrate(app, globals),
                                   add_run(app, globals),
                                   add_eval(app, globals),
                                   add_report(app),
                                   add_convert(app),
                                   add_verify(app),
                                   add_inspect(app),
                                   add_size(app),
                                   add_doctor(app),
                                   add_version(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitDone : kExitUsage;
  }
  if (const Status environment = check_environment(environ); !environment) return fail(environment.error());
  if (const Result<Isa> isa = select_isa(); !isa) {
    note("oscar: " + isa.error().message);
    return isa.error().code == ErrorCode::kUnsupported ? kExitMachine : exit_code_of(isa.error());
  }
  for (const Verb& verb : verbs) {
    if (!verb.app->parsed()) continue;
    const Result<int> outcome = verb.action();
    if (!outcome) return fail(outcome.error());
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      return fail({ErrorCode::kIo, "standard output cannot be written (disk full?)"});
    }
    return *outcome;
  }
  return kExitUsage;
}

}  // namespace
}  // namespace oscar::tool

int main(int argc, char** argv) { return oscar::tool::run_program(argc, argv); }
