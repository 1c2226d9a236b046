// How long threads that wait may busy-wait, so that their core does not sleep.
//
// A core that sleeps while another worker computes is slow when it goes on: on a virtual machine it
// loses its place, its caches and its clock rate meanwhile. A model that two workers compute in turn,
// tens of milliseconds each, takes a tenth longer for it (docs/performance.md). So where waits of that
// length are usual, a waiting thread goes on busy-waiting. The time that the process computes limits
// this: for each second of it, waiting threads may spend `kPerComputed` more. A process that computes
// nothing sleeps. Where torch computes on more than half of the cores, the other worker needs this one,
// too, and no thread keeps it awake.
#pragma once

#include <algorithm>
#include <atomic>

#include "clock.hpp"
#include "thread_safety.hpp"

namespace farcall {

inline Nanoseconds processor_time(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

// The time that the threads of an endpoint may spend, all together. All methods: from any thread.
class BusyWaitBudget {
 public:
  static constexpr Nanoseconds kMost = 100 * kMillisecond;
  static constexpr int kPerComputed = 2;

  // Accounts `time` as spent busy-waiting: processor time in which nothing was computed.
  void looked(Nanoseconds time) { looked_.fetch_add(time, std::memory_order_relaxed); }

  // Returns how long a thread may busy-wait now. Takes a system call.
  Nanoseconds left() {
    MutexLock lock(mutex_);
    const Nanoseconds computed = processor_time(CLOCK_PROCESS_CPUTIME_ID) -
                                 looked_.load(std::memory_order_relaxed);
    // Less than before where busy-waiting threads had to share a core.
    left_ = std::min(left_ + kPerComputed * std::max<Nanoseconds>(computed - seen_computed_, 0), kMost);
    seen_computed_ = computed;
    return left_;
  }

  void spend(Nanoseconds time) {
    MutexLock lock(mutex_);
    left_ = std::max<Nanoseconds>(left_ - time, 0);
  }

 private:
  std::atomic<Nanoseconds> looked_{0};
  Mutex mutex_;
  Nanoseconds seen_computed_ GUARDED_BY(mutex_) = 0;
  Nanoseconds left_ GUARDED_BY(mutex_) = 0;
};

// Whether other threads of this process compute while one waits. For that one.
class Others {
 public:
  static constexpr Nanoseconds kPeriod = 1 * kMillisecond;

  void begin(Nanoseconds time) {
    since_ = time;
    theirs_ = processor_time(CLOCK_PROCESS_CPUTIME_ID) - processor_time(CLOCK_THREAD_CPUTIME_ID);
  }

  // Whether they did for half of the time since `begin`, or since this gave an answer last. False
  // as well if that is too short to tell.
  bool compute(Nanoseconds time) {
    const Nanoseconds period = time - since_, before = theirs_;
    if (period < kPeriod) return false;
    begin(time);
    return theirs_ - before > period / 2;
  }

 private:
  Nanoseconds since_ = 0;
  Nanoseconds theirs_ = 0;
};

}  // namespace farcall
