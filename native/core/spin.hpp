// When to look again at once, and when to sleep.
//
// Waking a thread on an idle core costs some 25 us, looking again a few nanoseconds. So whoever
// waits for a peer that has lately answered quickly looks for a while before it sleeps. How long
// waits lately were decides, so nobody spins for a slow peer. Who spins offers its core to others
// every microsecond or two, and sleeps as soon as somebody took it: with more busy processes than
// cores that is at once. An endpoint never has more spinning threads than there are spare cores.
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
  explicit SpinBudget(int threads) : left_(threads) {}

  bool take() {
    int left = left_.load(std::memory_order_relaxed);
    while (left > 0) {
      if (left_.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) return true;
    }
    return false;
  }

  void give_back() { left_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<int> left_;
};

// One place where threads wait, one at a time, with its memory of how long waits were.
class Spinner {
 public:
  static constexpr Nanoseconds kMaxSpin = 2 * kMillisecond;
  static constexpr Nanoseconds kWorth = 2 * kMillisecond;  // longer waits are slept through
  static constexpr Nanoseconds kStall = 50 * kMicrosecond;
  static constexpr int kLooksBetweenYields = 16;

  explicit Spinner(SpinBudget& budget) : budget_(budget) {}

  // Looks until `look` gives true (then true) or it is time to sleep.
  template <class Look>
  bool spin(Nanoseconds start, Look look) {
    if (average_ >= kWorth || !budget_.take()) return false;
    struct GiveBack {
      SpinBudget& budget;
      ~GiveBack() { budget.give_back(); }
    } give_back{budget_};
    Nanoseconds before = start;
    while (true) {
      for (int i = 0; i < kLooksBetweenYields; ++i) {
        if (look()) return true;
        pause_core();
      }
      const Nanoseconds time = now();
      if (time - start > kMaxSpin || time - before > kStall) return false;
      sched_yield();
      before = time;
    }
  }

  // The wait that began at `start` is over.
  void remember(Nanoseconds start) {
    const Nanoseconds waited = std::min(now() - start, 10 * kWorth);
    average_ += (waited - average_) / 10;
  }

 private:
  SpinBudget& budget_;
  Nanoseconds average_ = 0;
};

}  // namespace farcall
