// Sleeping on a word of memory, and a role that one thread has at a time.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "clock.hpp"

namespace farcall {

// Called when a signal interrupts a sleep; throws to end the wait. Python runs its signal handlers
// in it. A signal that comes just before a sleep does not interrupt it. So a
// thread that has to notice signals sleeps in short pieces, and calls it after each.
using Interrupt = void (*)();

inline void no_interrupt() {}

// How long to sleep at most, if it is `left` until the deadline.
inline Nanoseconds piece_of(Nanoseconds left, Interrupt interrupt) {
  constexpr Nanoseconds kPiece = 200 * kMillisecond;
  return interrupt == no_interrupt ? left : std::min(left, kPiece);
}

enum class Woken { kChanged, kTimedOut };

static_assert(sizeof(std::atomic<std::uint32_t>) == 4);

// Sleep while *word is `value`, until the deadline. May also return for no reason.
// `shared`: the word lies in memory that other processes have mapped, too.
inline Woken futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, Nanoseconds deadline,
                        Interrupt interrupt, bool shared = false) {
  const Nanoseconds time = interrupt == no_interrupt ? 0 : now();
  const Nanoseconds end = time + piece_of(deadline - time, interrupt);
  const timespec until = timespec_of(end);
  const int operation = FUTEX_WAIT_BITSET | (shared ? 0 : FUTEX_PRIVATE_FLAG);
  const long result = syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value,
                              end == kNever ? nullptr : &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  if (result == 0 || errno == EAGAIN) return Woken::kChanged;
  const bool timed_out = errno == ETIMEDOUT && end == deadline;
  interrupt();
  return timed_out ? Woken::kTimedOut : Woken::kChanged;
}

inline void futex_wake(std::atomic<std::uint32_t>& word, int count, bool shared = false) {
  const int operation = FUTEX_WAKE | (shared ? 0 : FUTEX_PRIVATE_FLAG);
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, count, nullptr, nullptr, 0);
}

// A lock that may be waited for until a deadline and be given back by another thread than took it.
// The states are those of Drepper, "Futexes are tricky", 2011.
class Role {
 public:
  bool try_take() {
    std::uint32_t free = kFree;
    return state_.compare_exchange_strong(free, kTaken, std::memory_order_acquire);
  }

  // Returns whether it was taken before the deadline.
  bool take(Nanoseconds deadline, Interrupt interrupt) {
    if (try_take()) return true;
    while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
      if (futex_wait(state_, kContended, deadline, interrupt) == Woken::kTimedOut) return try_take();
    }
    return true;
  }

  void give_back() {
    if (state_.exchange(kFree, std::memory_order_release) == kContended) futex_wake(state_, 1);
  }

 private:
  static constexpr std::uint32_t kFree = 0, kTaken = 1, kContended = 2;
  std::atomic<std::uint32_t> state_{kFree};
};

}  // namespace farcall
