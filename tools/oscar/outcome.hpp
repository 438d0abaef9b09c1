#pragma once
// Exit codes of the program, the same for every verb.

#include <oscar/result.hpp>

namespace oscar::tool {

enum ExitCode : int {
  kExitDone = 0,
  kExitCheckFailed = 1,
  kExitUsage = 2,
  kExitBadInput = 3,
  kExitMachine = 4,
  kExitInterrupted = 130,
};

int exit_code_of(const Error& error);

}  // namespace oscar::tool
