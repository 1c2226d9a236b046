// How many descriptors this process has.
#pragma once

#include <dirent.h>

#include "check.hpp"

namespace farcall {

inline std::size_t count_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  CHECK(folder != nullptr);
  std::size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

}  // namespace farcall
