// When to look again at once, and when to sleep.
//
// Waking a thread on an idle core costs some 25 us, looking again a few nanoseconds. So a
// thread that waits for a peer that has lately answered quickly looks for a while before it sleeps.
// The length of the last waits decides, so no thread spins for a slow peer, but see
// `busy_wait_budget.hpp`. A spinning thread offers its core to others every microsecond or two.
// Where several workers share a core, that hands it round among the waiting threads until one has
// something to do, for less than sleeping and waking costs; a thread that takes the core for long to
// compute makes the spinning thread sleep.
//
// Two that talk to each other may find themselves on one core while another is idle: a Unix socket
// wakes its reader with the hint that the writer is about to sleep, and the scheduler puts the reader
// on the writer's core. Each step costs a switch then, and the scheduler leaves threads that never
// sleep where they are for long. So, if the user has asked for that, a caller that seems to share its
// core with another thread moves to another one, less and less often if that does not help.
//
// A core that is offered may be gone for a whole slice of the scheduler, if a thread takes it that
// computes. So a thread that has lost its core like this keeps it in its next waits for as long as most
// answers take, see `CoreKeeper`.
//
// An endpoint never has more spinning threads than there are spare cores. Callers come first: the
// endpoint's own thread stops spinning for them.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>

#include "busy_wait_budget.hpp"
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
  // `moves_threads`: a caller that shares its core may move to another one. `keeps_awake`: a thread
  // that waits may keep its core awake.
  explicit SpinBudget(int threads, bool moves_threads = false, bool keeps_awake = true)
      : threads_(threads), moves_threads_(moves_threads), keeps_awake_(keeps_awake) {}

  // For a caller.
  bool take() {
    if (callers_.fetch_add(1, std::memory_order_relaxed) < threads_) return true;
    give_back();
    return false;
  }
  void give_back() { callers_.fetch_sub(1, std::memory_order_relaxed); }

  // For the endpoint's thread.
  bool has_room() const { return callers_.load(std::memory_order_relaxed) < threads_; }

  bool moves_threads() const { return moves_threads_; }
  bool keeps_awake() const { return keeps_awake_; }
  BusyWaitBudget& busy_wait_budget() { return busy_wait_budget_; }

 private:
  const int threads_;
  const bool moves_threads_;
  const bool keeps_awake_;
  std::atomic<int> callers_{0};
  BusyWaitBudget busy_wait_budget_;
};

// Decides how long a thread that waits keeps its core before it offers it to others.
class CoreKeeper {
 public:
  // Away for longer: it was taken by a thread that computes, and not by a peer that answers.
  static constexpr Nanoseconds kTaken = 600 * kMicrosecond;
  static constexpr Nanoseconds kKept = 30 * kMicrosecond;
  static constexpr int kWaits = 32;  // after each loss
  static constexpr int kMostIgnored = 63;

  // Of a wait that begins, or goes on, at `time`.
  void begin(Nanoseconds time) {
    keeps_ = waits_ > 0;
    if (!keeps_) return;
    --waits_;
    until_ = time + kKept;
  }

  // Whether the core is to be offered now. If it was kept in vain, the peer may be what wants it: it is
  // kept again after so many more losses, twice as many each time.
  bool offers(Nanoseconds time) {
    if (!keeps_) return true;
    if (time < until_) return false;
    keeps_ = false;
    waits_ = 0;
    ignored_ = in_vain_ = std::min(2 * in_vain_ + 1, kMostIgnored);
    return true;
  }

  // The wait is over, in time.
  void found() {
    if (keeps_) in_vain_ = 0;
  }

  // It was offered, and was away for so long.
  void offered(Nanoseconds away) {
    if (away > kTaken && (ignored_ == 0 || --ignored_ == 0)) waits_ = kWaits;
  }

 private:
  Nanoseconds until_ = 0;
  bool keeps_ = false;  // in this wait
  int waits_ = 0;  // to come in which it is kept
  int in_vain_ = 0;
  int ignored_ = 0;  // losses to come
};

enum class Who { kCaller, kEndpoint };

// One place where threads wait, one at a time, with its memory of how long waits were.
class Spinner {
 public:
  static constexpr Nanoseconds kMaxSpin = 2 * kMillisecond;
  static constexpr Nanoseconds kWorth = 2 * kMillisecond;  // longer waits are not worth to spin for,
  static constexpr Nanoseconds kWorthAwake = BusyWaitBudget::kMost;  // but to stay awake up to this
  static constexpr Nanoseconds kAfterIdle = 2 * kWorthAwake;  // four short ones make up for that
  static constexpr Nanoseconds kIdle = 1 * kSecond;  // after such a wait the average begins anew
  static constexpr Nanoseconds kNap = 2 * kMillisecond;
  static constexpr Nanoseconds kNapping = 1 * kSecond;  // from the begin of the wait
  // Longer than what a hypervisor takes the core for, shorter than a slice of the scheduler.
  static constexpr Nanoseconds kStall = 1 * kMillisecond;
  static constexpr int kLooksBetweenYields = 16;
  static constexpr int kLooksAwake = 256;
  static constexpr Nanoseconds kShared = 2 * kMicrosecond;  // no thread takes the offered core: 0.4 us
  static constexpr int kSharedYields = 16;  // in a row, or so many waits that end with one:
  static constexpr int kSharedWaits = 4;
  static constexpr Nanoseconds kMinMovePeriod = 2 * kMillisecond;
  static constexpr Nanoseconds kMaxMovePeriod = 500 * kMillisecond;

  Spinner(SpinBudget& budget, Who who) : budget_(budget), who_(who) {}

  // Looks until `look` gives true (then true) or it is time to sleep. For the wait that began at
  // `start`, or goes on after a nap.
  template <class Look>
  bool spin(Nanoseconds start, Look look) {
    const bool is_long = average_ >= kWorth;
    const bool stays_awake = is_long && budget_.keeps_awake() && long_average_ < kWorthAwake;
    if (is_long && !stays_awake) return false;
    if (who_ == Who::kCaller && !budget_.take()) return false;
    const Nanoseconds begun = naps_ ? now() : start;
    Nanoseconds time = begun;
    End end = naps_ ? End::kLate : look_until(start + kMaxSpin, time, look);
    if (end == End::kLate && stays_awake) end = stay_awake(time, look);
    naps_ = end == End::kOthers && time - start < kNapping;
    if (who_ == Who::kCaller) budget_.give_back();
    budget_.busy_wait_budget().looked(time - begun);
    return end == End::kFound;
  }

  // Whether it is not yet time to sleep for long: for a nap, and then to spin on.
  bool naps() const { return naps_; }

  // The wait that began at `start` is over.
  void remember(Nanoseconds start) {
    const Nanoseconds waited = now() - start;
    naps_ = false;
    average_ += (std::min(waited, 10 * kWorth) - average_) / 10;
    if (waited > kIdle) {
      long_average_ = kAfterIdle;
    } else if (waited > kMaxSpin) {
      long_average_ += (std::min(waited, kAfterIdle) - long_average_) / 4;
    }
  }

 private:
  enum class End { kFound, kLate, kAway, kNoRoom, kOthers };

  bool watches_sharing() const { return who_ == Who::kCaller && budget_.moves_threads(); }
  bool has_room() const { return who_ == Who::kCaller || budget_.has_room(); }

  // `time`: now, before and after (but for the last few looks).
  template <class Look>
  End look_until(Nanoseconds end, Nanoseconds& time, Look& look) {
    keeper_.begin(time);
    for (Nanoseconds before = time; has_room(); before = time) {
      for (int i = 0; i < kLooksBetweenYields; ++i) {
        if (look()) {
          keeper_.found();
          return End::kFound;
        }
        pause_core();
      }
      time = now();
      if (time - before > kStall) return End::kAway;
      if (time > end) return End::kLate;
      if (!keeper_.offers(time)) continue;
      const Nanoseconds offered = time;
      sched_yield();
      time = now();
      keeper_.offered(time - offered);
      if (watches_sharing() && mind_sharing(time, time - offered, look)) return End::kFound;
    }
    return End::kNoRoom;
  }

  // Ends as well when another process needs this core, or other threads of this process compute.
  template <class Look>
  End stay_awake(Nanoseconds& time, Look& look) {
    BusyWaitBudget& allowed = budget_.busy_wait_budget();
    const Nanoseconds begun = time;
    if (!naps_) others_.begin(time);
    const End end = look_awake(time + allowed.left(), time, look);
    allowed.spend(time - begun);
    return end;
  }

  template <class Look>
  End look_awake(Nanoseconds end, Nanoseconds& time, Look& look) {
    while (has_room()) {
      if (others_.compute(time)) return End::kOthers;
      if (time > end) return End::kLate;
      for (int i = 0; i < kLooksAwake; ++i) {
        if (look()) return End::kFound;
        pause_core();
      }
      const Nanoseconds before = time;
      sched_yield();
      time = now();
      if (time - before > kStall) return End::kAway;
    }
    return End::kNoRoom;
  }

  // Moves to another core if others took this one each time that it was offered lately. If the
  // wait is over then, it is the peer that shares this core. Returns true if it is over.
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
  CoreKeeper keeper_;
  int shared_yields_ = 0;
  Nanoseconds move_at_ = 0;
  Nanoseconds move_period_ = kMinMovePeriod;
  Nanoseconds average_ = 0;
  Nanoseconds long_average_ = kAfterIdle;  // of the waits that were longer than `kMaxSpin`
  bool naps_ = false;
  Others others_;
};

}  // namespace farcall
