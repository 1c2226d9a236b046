// CHECK for the C++ tests: unlike assert it is there in optimized builds. A test is a main() that
// calls functions; the first failed CHECK says where and ends the program, so ctest sees it.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed in %s\n", __FILE__, __LINE__,         \
                         #condition, __func__);                                                 \
            std::exit(1);                                                                       \
        }                                                                                       \
    } while (false)
