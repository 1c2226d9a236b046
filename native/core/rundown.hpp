// Something is used by many threads until it ends, and torn down by the last of them.
//
// After Windows' "run-down protection" (ExAcquireRundownProtection).
#pragma once

#include <atomic>
#include <cstdint>

namespace farcall {

class Rundown {
 public:
  // False: it has ended. True: it is there until `leave`.
  bool enter() {
    std::uint32_t users = users_.load(std::memory_order_relaxed);
    while (users != 0) {
      if (users_.compare_exchange_weak(users, users + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  // True: the caller has to tear it down.
  [[nodiscard]] bool leave() { return users_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

  // Called once. Nobody enters any more when all have left. True: as for `leave`.
  [[nodiscard]] bool end() { return leave(); }

 private:
  std::atomic<std::uint32_t> users_{1};  // threads inside, and one until the end
};

}  // namespace farcall
