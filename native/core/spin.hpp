// When to look again at once, and when to sleep.
//
// Waking a thread on an idle core costs some 25 us, looking again a few nanoseconds. So whoever
// waits for a peer that has lately answered quickly looks for a while before it sleeps. How long
// waits lately were decides, so nobody spins for a slow peer. Who spins offers its core to others
// every microsecond or two. Where several workers share a core, that hands it round among those who
// wait until one has something to do, for less than sleeping and waking costs; somebody who takes
// the core for long to compute makes the spinning thread sleep.
//
// An endpoint never has more spinning threads than there are spare cores. Callers come first: the
// endpoint's own thread stops spinning for them.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>

#include "clock.hpp"

namespace farcall {

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Lets a limited number of threads spin at once.
class SpinBudget {
 public:
  explicit SpinBudget(int threads) : threads_(threads) {}

  // For a caller.
  bool take() {
    if (callers_.fetch_add(1, std::memory_order_relaxed) < threads_) return true;
    give_back();
    return false;
  }
  void give_back() { callers_.fetch_sub(1, std::memory_order_relaxed); }

  // For the endpoint's thread.
  bool has_room() const { return callers_.load(std::memory_order_relaxed) < threads_; }

 private:
  const int threads_;
  std::atomic<int> callers_{0};
};

enum class Who { kCaller, kEndpoint };

// One place where threads wait, one at a time, with its memory of how long waits were.
class Spinner {
 public:
  static constexpr Nanoseconds kMaxSpin = 2 * kMillisecond;
  static constexpr Nanoseconds kWorth = 2 * kMillisecond;  // longer waits are slept through
  // Longer than what a hypervisor takes the core for, shorter than a slice of the scheduler.
  static constexpr Nanoseconds kStall = 1 * kMillisecond;
  static constexpr int kLooksBetweenYields = 16;

  Spinner(SpinBudget& budget, Who who) : budget_(budget), who_(who) {}

  // Looks until `look` gives true (then true) or it is time to sleep.
  template <class Look>
  bool spin(Nanoseconds start, Look look) {
    if (average_ >= kWorth) return false;
    if (who_ == Who::kEndpoint) return look_until(start, look);
    if (!budget_.take()) return false;
    const bool found = look_until(start, look);
    budget_.give_back();
    return found;
  }

  // The wait that began at `start` is over.
  void remember(Nanoseconds start) {
    const Nanoseconds waited = std::min(now() - start, 10 * kWorth);
    average_ += (waited - average_) / 10;
  }

 private:
  template <class Look>
  bool look_until(Nanoseconds start, Look& look) {
    for (Nanoseconds before = start; who_ == Who::kCaller || budget_.has_room();) {
      for (int i = 0; i < kLooksBetweenYields; ++i) {
        if (look()) return true;
        pause_core();
      }
      const Nanoseconds time = now();
      if (time - start > kMaxSpin || time - before > kStall) return false;
      sched_yield();
      before = time;
    }
    return false;
  }

  SpinBudget& budget_;
  const Who who_;
  Nanoseconds average_ = 0;
};

}  // namespace farcall
