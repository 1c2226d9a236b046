// Signals that end a wait.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "check.hpp"

namespace farcall {

struct Stop {};

// An `Interrupt`.
inline void stop() { throw Stop(); }

// Runs `wait` in a thread and sends signals to that until `wait` has thrown Stop.
template <class Wait>
void interrupt_until_thrown(Wait wait) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  CHECK(sigaction(SIGUSR1, &action, nullptr) == 0);
  std::atomic<bool> thrown{false};
  std::thread thread([&] {
    try {
      wait();
    } catch (const Stop&) {
      thrown = true;
    }
    CHECK(thrown);
  });
  while (!thrown) {
    pthread_kill(thread.native_handle(), SIGUSR1);
    std::this_thread::yield();
  }
  thread.join();
}

}  // namespace farcall
