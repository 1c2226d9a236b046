// CHECK for the C++ tests: unlike assert it is there in optimized builds. The first failed CHECK says
// where and ends the program, so ctest sees it. Each file has one TestFile, which calls its functions.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed in %s\n", __FILE__, __LINE__, #condition, \
                   __func__);                                                                 \
      std::_Exit(1);                                                                          \
    }                                                                                         \
  } while (false)

#define CHECK_THROWS(expression, Exception)                                                       \
  do {                                                                                            \
    bool thrown = false;                                                                          \
    try {                                                                                         \
      static_cast<void>(expression);                                                              \
    } catch (const Exception&) {                                                                  \
      thrown = true;                                                                              \
    }                                                                                             \
    if (!thrown) {                                                                                \
      std::fprintf(stderr, "%s:%d: %s did not throw %s in %s\n", __FILE__, __LINE__, #expression, \
                   #Exception, __func__);                                                         \
      std::_Exit(1);                                                                              \
    }                                                                                             \
  } while (false)

namespace farcall {

// The tests of a file, by the file's name: main.cpp runs those of one file in a process.
struct TestFile {
  TestFile(const char* name, void (*run)()) : name(name), run(run), next(first) { first = this; }

  static inline const TestFile* first = nullptr;
  const char* const name;
  void (*const run)();
  const TestFile* const next;
};

constexpr int kSkipped = 77;  // exit status, CMakeLists.txt tells ctest

}  // namespace farcall
