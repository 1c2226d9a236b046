// When to look again at once, and when to sleep.
//
// Waking a thread on an idle core costs some 25 us, looking again a few nanoseconds. So whoever
// waits for a peer that has lately answered quickly looks for a while before it sleeps. How long
// waits lately were decides, so nobody spins for a slow peer. Who spins offers its core to others
// every microsecond or two. Where several workers share a core, that hands it round among those who
// wait until one has something to do, for less than sleeping and waking costs; somebody who takes
// the core for long to compute makes the spinning thread sleep.
//
// Two that talk to each other may find themselves on one core while another is idle: a Unix socket
// wakes its reader with the hint that the writer is about to sleep, and the scheduler puts the reader
// on the writer's core. Each step costs a switch then, and the scheduler leaves threads that never
// sleep where they are for long. So a caller that seems to share its core with somebody moves to
// another one, less and less often if that does not help.
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
  static constexpr Nanoseconds kShared = 2 * kMicrosecond;  // nobody takes what is offered: 0.4 us
  static constexpr int kSharedYields = 16;  // in a row, or so many waits that end with one:
  static constexpr int kSharedWaits = 4;
  static constexpr Nanoseconds kMinMovePeriod = 2 * kMillisecond;
  static constexpr Nanoseconds kMaxMovePeriod = 500 * kMillisecond;

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
      before = now();
      if (who_ == Who::kCaller && mind_sharing(before, before - time, look)) return true;
    }
    return false;
  }

  // Moves to another core if others took this one each time that it was offered lately. That the
  // wait is over then says that it is the peer who shares this core. True: it is over.
  template <class Look>
  bool mind_sharing(Nanoseconds time, Nanoseconds away, Look& look) {
    if (away <= kShared) {
      shared_yields_ = 0;
      if (time > move_at_) move_period_ = kMinMovePeriod;
      return false;
    }
    const bool is_over = look();
    shared_yields_ += is_over ? kSharedYields / kSharedWaits : 1;
    if (shared_yields_ >= kSharedYields && time > move_at_) {
      shared_yields_ = 0;
      move_at_ = time + move_period_;
      move_period_ = std::min(2 * move_period_, kMaxMovePeriod);
      move_to_another_core();
    }
    return is_over;
  }

  // Any other one that this thread may use; afterwards it may use all of them as before.
  static void move_to_another_core() {
    cpu_set_t allowed;
    const int core = sched_getcpu();
    if (core < 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    cpu_set_t others = allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
  }

  SpinBudget& budget_;
  const Who who_;
  int shared_yields_ = 0;
  Nanoseconds move_at_ = 0;
  Nanoseconds move_period_ = kMinMovePeriod;
  Nanoseconds average_ = 0;
};

}  // namespace farcall
