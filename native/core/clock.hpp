// Time as Python's time.monotonic() has it, in whole nanoseconds.
#pragma once

#include <time.h>

#include <cstdint>
#include <limits>

namespace farcall {

using Nanoseconds = std::int64_t;

constexpr Nanoseconds kMicrosecond = 1'000;
constexpr Nanoseconds kMillisecond = 1'000'000;
constexpr Nanoseconds kSecond = 1'000'000'000;
constexpr Nanoseconds kNever = std::numeric_limits<Nanoseconds>::max();

inline Nanoseconds now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

// A deadline in seconds, infinite for none, in nanoseconds.
inline Nanoseconds deadline_from_seconds(double seconds) {
  if (!(seconds < 9e9)) return kNever;
  return seconds <= 0 ? 0 : static_cast<Nanoseconds>(seconds * 1e9);
}

inline timespec timespec_of(Nanoseconds time) { return {time / kSecond, time % kSecond}; }

}  // namespace farcall
