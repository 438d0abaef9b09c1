#pragma once
// For programs that link allocation_count.cpp: how often operator new has run so far, on any thread.

namespace oscar::test {

long num_allocations();

}  // namespace oscar::test
