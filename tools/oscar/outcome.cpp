#include "outcome.hpp"

namespace oscar::tool {

int exit_code_of(const Error& error) {
  switch (error.code) {
    case ErrorCode::kInvalidArgument: return kExitUsage;
    case ErrorCode::kBadInput:
    case ErrorCode::kUnsupported:
    case ErrorCode::kIo:
    case ErrorCode::kMismatch: return kExitBadInput;
    case ErrorCode::kInterrupted: return kExitInterrupted;
    case ErrorCode::kInternal: return kExitMachine;
  }
  return kExitMachine;
}

}  // namespace oscar::tool
