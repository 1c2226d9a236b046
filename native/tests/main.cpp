// Runs the tests of one file: `farcall_tests test_ring`.
#include <cstdio>
#include <cstring>

#include "check.hpp"

int main(int count, char** arguments) {
  const char* const wanted = count == 2 ? arguments[1] : "";
  for (auto* file = farcall::TestFile::first; file != nullptr; file = file->next) {
    if (std::strcmp(file->name, wanted) == 0) {
      file->run();
      return 0;
    }
  }
  std::fprintf(stderr, "usage: %s TEST, which is one of:\n", arguments[0]);
  for (auto* file = farcall::TestFile::first; file != nullptr; file = file->next) {
    std::fprintf(stderr, "  %s\n", file->name);
  }
  return 2;
}
