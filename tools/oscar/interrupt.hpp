#pragma once
// Ctrl-C: the first one asks the verb to stop, the second one ends the program at once.

#include <oscar/result.hpp>

namespace oscar::tool {

// Handles SIGINT and SIGTERM from here on. A write beyond a file size limit becomes an ordinary error of the write.
void install_interrupt_handler();
bool interrupted();
// The error that a stopped verb returns (exit code 130).
Error interrupted_error();

}  // namespace oscar::tool
