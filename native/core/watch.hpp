// A watchdog's eye: notices, without the GIL, when a watched thread is busy for too long.
//
// A thread of Python that looked a few hundred times a second would take the GIL from the others
// each time, and as each of torch's operations releases it, they would hand it to and fro.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.hpp"

namespace farcall {

// What `Watch::wait` ends with.
enum class Notice : int { kStopped = 0, kOverdue = 1, kStarving = 2 };

class Watch {
 public:
  // Looks every millisecond where a thread was overdue lately or there is a queue, else less often,
  // and not at all when nothing has happened for a while.
  static constexpr Nanoseconds kPatience = 1 * kMillisecond;
  static constexpr Nanoseconds kShortPause = 1 * kMillisecond;
  static constexpr Nanoseconds kLongPause = 4 * kMillisecond;
  static constexpr int kQuietLooks = 12;  // more than those that notice a starving queue
  static constexpr int kStarvingLooks = 10;

  // Of the watched one: what may take long begins (no effect if it has begun), and is over.
  void begin();
  void end();
  bool is_overdue() const;
  // There is something that waits for the busy threads.
  void set_queue(bool is_there);

  // For one thread, which watches: until the busy one is overdue, or there is a queue and nothing
  // has ended for a while, or `stop`.
  Notice wait();
  void stop();

 private:
  void sleep_until_needed();
  void wake();

  std::atomic<Nanoseconds> busy_since_{0};  // 0: not busy
  std::atomic<bool> has_queue_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<std::uint32_t> ended_{0};   // how often something has
  std::atomic<std::uint32_t> sleeps_{0};  // until there is something to watch

  // Of the thread that watches.
  std::atomic<std::uint32_t> pause_word_{0};  // changes when a pause is to end early
  Nanoseconds pause_ = kShortPause;
  std::uint32_t seen_ended_ = 0;
  int quiet_ = 0;
};

}  // namespace farcall
