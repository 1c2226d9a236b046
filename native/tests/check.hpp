// CHECK for the C++ tests: unlike assert it is there in optimized builds. A test is a main() that
// calls functions; the first failed CHECK says where and ends the program, so ctest sees it.
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
