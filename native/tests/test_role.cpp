// Role, futexes, Bell, Rundown, SpinBudget, Spinner, CoreKeeper, deadlines.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "check.hpp"
#include "core/bell.hpp"
#include "core/futex.hpp"
#include "core/rundown.hpp"
#include "core/spin.hpp"
#include "signals.hpp"

namespace farcall::test_role {

namespace {

// Time as a test has it: others on this machine would decide how long a real wait or computation takes.
// It passes where this thread looks at a clock, or computes.
struct ScriptedTime {
  static constexpr Nanoseconds kLook = 100;

  void pass(Nanoseconds time) {
    monotonic += time;
    own += time;
    if (others_compute) others += time;
  }

  Nanoseconds monotonic = 100 * kSecond;
  Nanoseconds own = 0;     // processor time of this thread,
  Nanoseconds others = 0;  // and of the other threads
  bool others_compute = false;
};

thread_local ScriptedTime* scripted = nullptr;  // not for the other threads and tests of this program

std::atomic<bool> replaces_offers{false};
std::atomic<int> offers{0};
std::atomic<Nanoseconds> offer_takes{0};

}  // namespace

// Both in the place of the system's.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (scripted == nullptr) return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  scripted->pass(ScriptedTime::kLook);
  const Nanoseconds of_process = scripted->own + scripted->others;
  *time = timespec_of(clock == CLOCK_MONOTONIC            ? scripted->monotonic
                      : clock == CLOCK_PROCESS_CPUTIME_ID ? of_process
                                                          : scripted->own);
  return 0;
}

extern "C" int sched_yield() noexcept {
  if (!replaces_offers) return static_cast<int>(syscall(SYS_sched_yield));
  ++offers;
  const Nanoseconds end = now() + offer_takes;
  while (now() < end) {
  }
  return 0;
}

namespace {

// Time is scripted for this thread as long as this lives.
struct Scripted : ScriptedTime {
  Scripted() { scripted = this; }
  ~Scripted() { scripted = nullptr; }
};

void test_deadlines() {
  CHECK(deadline_from_seconds(INFINITY) == kNever);
  CHECK(deadline_from_seconds(NAN) == kNever);
  CHECK(deadline_from_seconds(-1) == 0);
  CHECK(deadline_from_seconds(1.5) == 1'500'000'000);
  Role role;
  CHECK(role.take(0, no_interrupt));  // free: nothing to wait for
  CHECK(!role.try_take());
  CHECK(!role.take(0, no_interrupt));
  const Nanoseconds start = now();
  CHECK(!role.take(start + 20 * kMillisecond, no_interrupt));
  CHECK(now() >= start + 20 * kMillisecond);
  role.give_back();
  CHECK(role.try_take());
}

void test_hand_over_by_another_thread() {
  Role role;
  CHECK(role.try_take());
  std::thread([&] { role.give_back(); }).join();
  CHECK(role.take(kNever, no_interrupt));
  std::thread waiting([&] {
    CHECK(role.take(kNever, no_interrupt));
    role.give_back();
  });
  role.give_back();
  waiting.join();
  CHECK(role.try_take());
}

void test_interrupt() {
  Role role;
  CHECK(role.try_take());
  interrupt_until_thrown([&] { role.take(kNever, stop); });
  role.give_back();
  CHECK(role.take(kNever, no_interrupt));
}

// No thread is left asleep, though some give up.
void test_many_threads() {
  Role role;
  long counter = 0;  // guarded by the role
  std::atomic<long> taken{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 500; ++round) {
        const bool patient = (round + i) % 3 != 0;
        if (!role.take(patient ? kNever : now() + 20 * kMicrosecond, no_interrupt)) continue;
        ++counter;
        ++taken;
        if (round % 10 == 0) std::this_thread::yield();
        role.give_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counter == taken && role.try_take());
}

void test_rundown() {
  Rundown rundown;
  CHECK(rundown.enter() && rundown.enter());
  CHECK(!rundown.leave());
  CHECK(!rundown.end());
  CHECK(rundown.leave());  // the last one
  CHECK(!rundown.enter());
}

void test_bell() {
  Bell silent;
  CHECK(!silent.has_rung() && !silent.wait(now() + kMillisecond, no_interrupt));
  interrupt_until_thrown([&] { silent.wait(kNever, stop); });
  silent.ring();  // an interrupt has broken nothing
  silent.ring();
  CHECK(silent.has_rung() && silent.wait(kNever, no_interrupt));
  Bell bell;
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 3; ++i) {
    sleepers.emplace_back([&] { CHECK(bell.wait(kNever, no_interrupt)); });
  }
  bell.ring();
  for (std::thread& sleeper : sleepers) sleeper.join();
}

void test_spin_budget() {
  SpinBudget budget(2);
  CHECK(budget.take() && budget.take() && !budget.take());
  budget.give_back();
  CHECK(budget.take() && !budget.take());
  SpinBudget none(0);
  CHECK(!none.take());
}

void test_spinner() {
  SpinBudget budget(1);
  Spinner spinner(budget, Who::kCaller);
  int looks = 0;
  CHECK(spinner.spin(now(), [&] { return ++looks == 10; }));
  CHECK(looks == 10);
  CHECK(!spinner.spin(now(), [] { return false; }));  // gives up
  CHECK(budget.take());  // and has given back what it took
  CHECK(!spinner.spin(now(), [] { return true; }));  // too many spin already
  budget.give_back();
  for (int i = 0; i < 100; ++i) spinner.remember(now() - kSecond);
  CHECK(!spinner.spin(now(), [] { return true; }));  // waits were long
  for (int i = 0; i < 100; ++i) spinner.remember(now());
  CHECK(spinner.spin(now(), [] { return true; }));
  // The endpoint's thread makes room for callers.
  Spinner other(budget, Who::kEndpoint);
  CHECK(other.spin(now(), [] { return true; }));
  CHECK(!other.spin(now(), [&] {
    CHECK(spinner.spin(now(), [&] { return !other.spin(now(), [] { return true; }); }));
    return false;
  }));
  CHECK(budget.take());
  CHECK(!other.spin(now(), [] { return true; }));
}

// The endpoint's thread takes nothing of the budget, and leaves the core to callers.
void test_callers_come_first() {
  SpinBudget budget(1);
  Spinner endpoint(budget, Who::kEndpoint);
  CHECK(endpoint.spin(now(), [&] { return budget.take(); }));  // a caller comes, and is let in
  int looks = 0;
  CHECK(!endpoint.spin(now(), [&] { return ++looks > 0; }));
  CHECK(looks == 0);
  budget.give_back();
  CHECK(endpoint.spin(now(), [&] { return ++looks > 0; }));
}

// A thread whose core was taken for long offers it late in the next waits, as long as these end early.
void test_keeps_its_core() {
  const Scripted time;
  SpinBudget budget(1);
  Spinner spinner(budget, Who::kCaller);
  const auto offers_until = [&](Nanoseconds waited) {
    offers = 0;
    const Nanoseconds start = now(), end = start + waited;
    spinner.spin(start, [&] { return now() > end; });
    return offers.load();
  };
  const auto lose_core = [&] {
    offers = 0;
    offer_takes = 2 * CoreKeeper::kTaken;
    spinner.spin(now(), [&] { return offers > 0; });
    offer_takes = 0;
  };
  constexpr Nanoseconds early = CoreKeeper::kKept / 2, late = 4 * CoreKeeper::kKept;
  CHECK(offers_until(early) > 0);
  lose_core();
  CHECK(offers_until(early) == 0 && offers_until(early) == 0);
  lose_core();
  CHECK(offers_until(late) > 0 && offers_until(early) > 0);
}

void test_core_keeper() {
  CoreKeeper keeper;
  Nanoseconds time = 0;
  const auto keeps = [&] {
    keeper.begin(time);
    return !keeper.offers(time);
  };
  const auto waits_in_vain = [&] {
    keeper.begin(time);
    time += CoreKeeper::kKept;
    return keeper.offers(time);
  };
  const auto losses_until_kept = [&] {
    int losses = 0;
    for (; !keeps(); ++losses) keeper.offered(CoreKeeper::kTaken + 1);
    return losses;
  };
  CHECK(!keeps());
  keeper.offered(CoreKeeper::kTaken);
  CHECK(!keeps());
  CHECK(losses_until_kept() == 1);
  for (int i = 1; i < CoreKeeper::kWaits; ++i) CHECK(keeps());
  CHECK(!keeps());  // until the core is lost again
  CHECK(losses_until_kept() == 1);
  // In vain: after more and more losses.
  for (const int losses : {1, 3, 7, 15, 31, 63, 63}) {
    CHECK(waits_in_vain());
    CHECK(losses_until_kept() == losses);
  }
  keeper.found();
  CHECK(waits_in_vain());
  CHECK(losses_until_kept() == 1);
}

void test_busy_wait_budget() {
  Scripted time;
  BusyWaitBudget used;
  used.looked(processor_time(CLOCK_PROCESS_CPUTIME_ID) + kSecond);  // nothing was computed
  CHECK(used.left() == 0);
  BusyWaitBudget fresh;
  time.pass(10 * kMillisecond);
  CHECK(fresh.left() >= BusyWaitBudget::kPerComputed * 10 * kMillisecond);
  time.pass(BusyWaitBudget::kMost);
  CHECK(fresh.left() == BusyWaitBudget::kMost);
  fresh.looked(kSecond);  // more than is computed from here on
  fresh.spend(BusyWaitBudget::kMost / 2);
  CHECK(fresh.left() == BusyWaitBudget::kMost / 2);
  fresh.spend(kSecond);
  CHECK(fresh.left() < BusyWaitBudget::kMost / 4);  // the time computed since
}

// Where waits of tens of milliseconds are usual.
void test_stays_awake() {
  Scripted time;
  SpinBudget budget(1);
  Spinner spinner(budget, Who::kCaller);
  const auto patient = [&] {
    time.pass(BusyWaitBudget::kMost / 2);
    const Nanoseconds start = now(), end = start + 5 * Spinner::kMaxSpin;
    return spinner.spin(start, [&] { return now() > end; });
  };
  CHECK(!patient());  // nothing is known of waits
  for (int i = 0; i < 20; ++i) spinner.remember(now() - 20 * kMillisecond);
  CHECK(patient());
  time.others_compute = true;
  CHECK(!patient());
  CHECK(spinner.naps());
  spinner.remember(now() - 20 * kMillisecond);
  CHECK(!spinner.naps());
  for (int i = 0; i < 3; ++i) spinner.remember(now() - kSecond);
  CHECK(!spinner.spin(now(), [] { return true; }));  // it sleeps at once
}

void test_leaves_the_core_where_others_need_it() {
  Scripted time;
  SpinBudget budget(1, false, false);
  Spinner spinner(budget, Who::kCaller);
  for (int i = 0; i < 20; ++i) spinner.remember(now() - 20 * kMillisecond);
  time.pass(BusyWaitBudget::kMost / 2);
  CHECK(!spinner.spin(now(), [] { return true; }));
  for (int i = 0; i < 100; ++i) spinner.remember(now());
  CHECK(spinner.spin(now(), [] { return true; }));
}

const TestFile kFile("test_role", [] {
  replaces_offers = true;
  test_deadlines();
  test_hand_over_by_another_thread();
  test_interrupt();
  test_many_threads();
  test_rundown();
  test_bell();
  test_spin_budget();
  test_spinner();
  test_callers_come_first();
  test_keeps_its_core();
  test_core_keeper();
  test_busy_wait_budget();
  test_stays_awake();
  test_leaves_the_core_where_others_need_it();
});

}  // namespace

}  // namespace farcall::test_role
