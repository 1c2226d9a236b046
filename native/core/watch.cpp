#include "watch.hpp"

#include <algorithm>

#include "futex.hpp"

namespace farcall {

void Watch::begin() {
  if (busy_since_.load(std::memory_order_relaxed) != 0) return;
  // Of this and `sleep_until_needed` one sees the other.
  busy_since_.store(now(), std::memory_order_seq_cst);
  wake();
}

void Watch::end() {
  busy_since_.store(0, std::memory_order_relaxed);
  ended_.fetch_add(1, std::memory_order_relaxed);
}

bool Watch::is_overdue() const {
  const Nanoseconds since = busy_since_.load(std::memory_order_relaxed);
  return since != 0 && now() - since > kPatience;
}

void Watch::set_queue(bool is_there) {
  has_queue_.store(is_there, std::memory_order_seq_cst);
  if (is_there) wake();
}

void Watch::wake() {
  if (sleeps_.load(std::memory_order_seq_cst) != 0 && sleeps_.exchange(0) != 0) {
    futex_wake(sleeps_, 1);
  }
}

Notice Watch::wait() {
  while (!stopped_) {
    const std::uint32_t word = pause_word_.load();
    if (!stopped_) futex_wait(pause_word_, word, now() + pause_, no_interrupt);
    pause_ = std::min(2 * pause_, kLongPause);
    const bool overdue = is_overdue();
    const bool has_queue = has_queue_.load(std::memory_order_relaxed);
    if (overdue || has_queue) pause_ = kShortPause;
    const std::uint32_t ended = ended_.load(std::memory_order_relaxed);
    quiet_ = ended == seen_ended_ ? quiet_ + 1 : 0;
    seen_ended_ = ended;
    if (overdue) return Notice::kOverdue;
    if (has_queue && quiet_ % kStarvingLooks == kStarvingLooks - 1) return Notice::kStarving;
    if (quiet_ >= kQuietLooks) {
      sleep_until_needed();
      quiet_ = 0;
      pause_ = kShortPause;
    }
  }
  return Notice::kStopped;
}

void Watch::sleep_until_needed() {
  sleeps_.store(1, std::memory_order_seq_cst);
  if (busy_since_.load(std::memory_order_seq_cst) == 0 && !has_queue_ && !stopped_) {
    futex_wait(sleeps_, 1, kNever, no_interrupt);
  }
  sleeps_.store(0, std::memory_order_relaxed);
}

void Watch::stop() {
  stopped_ = true;
  pause_word_.fetch_add(1);
  futex_wake(pause_word_, 1);
  wake();
}

}  // namespace farcall
