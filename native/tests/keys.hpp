// Keys for both ends of a connection.
#pragma once

#include "core/records.hpp"
#include "frames.hpp"

namespace farcall {

inline Key test_key(std::uint64_t seed) {
  const Bytes bytes = pattern(kKeySize, seed);
  Key key;
  std::copy(bytes.begin(), bytes.end(), key.begin());
  return key;
}

// Of the connection of that number; the two ends have each other's.
inline Keys test_keys(bool is_left, bool encrypts = true, std::uint64_t number = 0) {
  const Key rightward = test_key(2 * number), leftward = test_key(2 * number + 1);
  return is_left ? Keys(rightward, leftward, encrypts) : Keys(leftward, rightward, encrypts);
}

}  // namespace farcall
