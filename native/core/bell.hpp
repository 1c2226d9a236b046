// One event that the main thread of a program sleeps for, where a signal may end the sleep.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.hpp"
#include "futex.hpp"

namespace farcall {

// Once rung, a bell stays rung.
class Bell {
 public:
  void ring() {
    state_.store(kRung, std::memory_order_release);
    futex_wake(state_, INT_MAX);
  }

  bool has_rung() const { return state_.load(std::memory_order_acquire) == kRung; }

  // Returns whether the bell has rung; false: the deadline passed first. `interrupt` may throw.
  bool wait(Nanoseconds deadline, Interrupt interrupt) {
    while (!has_rung()) {
      if (futex_wait(state_, kSilent, deadline, interrupt) == Woken::kTimedOut) return has_rung();
    }
    return true;
  }

 private:
  static constexpr std::uint32_t kSilent = 0, kRung = 1;
  std::atomic<std::uint32_t> state_{kSilent};
};

}  // namespace farcall
