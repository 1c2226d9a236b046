// Something is used by many threads until it ends, and torn down by the last of them.
//
// After Windows' "run-down protection" (ExAcquireRundownProtection).
#pragma once

#include <atomic>
#include <cstdint>

namespace farcall {

class Rundown {
 public:
  // Returns true if the object is there until `leave`, false if it has ended.
  bool enter() {
    std::uint32_t users = users_.load(std::memory_order_relaxed);
    while (users != 0) {
      if (users_.compare_exchange_weak(users, users + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  // Returns true if the caller has to tear it down.
  [[nodiscard]] bool leave() { return users_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

  // Called once. `enter` returns false from the time on when all have left. The result is that of
  // `leave`.
  [[nodiscard]] bool end() { return leave(); }

 private:
  std::atomic<std::uint32_t> users_{1};  // threads inside, and one until the end
};

}  // namespace farcall
