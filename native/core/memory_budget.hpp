// How much shared memory one endpoint may create, and the descriptor that it keeps for bad times.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include "memory.hpp"
#include "shared_memory.hpp"
#include "thread_safety.hpp"

namespace farcall {

// Counts the bytes of shared memory that one endpoint has created, for all of its links. Each byte
// is counted by one process, the one that asked the system for it. Thread-safe.
class MemoryBudget {
 public:
  // `on_taken` is called after each success of `take`; it must not throw.
  explicit MemoryBudget(std::size_t limit = std::numeric_limits<std::size_t>::max(),
                        std::function<void()> on_taken = {})
      : limit_(limit), on_taken_(std::move(on_taken)) {}
  MemoryBudget(const MemoryBudget&) = delete;

  // Returns false, and counts nothing, if that would be over the limit.
  bool take(std::size_t size) {
    std::size_t used = used_.load(std::memory_order_relaxed);
    do {
      if (size > limit_ || used > limit_ - size) return false;
    } while (!used_.compare_exchange_weak(used, used + size, std::memory_order_relaxed));
    if (on_taken_) on_taken_();
    return true;
  }
  void give_back(std::size_t size) { used_.fetch_sub(size, std::memory_order_relaxed); }

  bool has(std::size_t size) const { return size <= limit_ && used() <= limit_ - size; }
  std::size_t used() const { return used_.load(std::memory_order_relaxed); }

 private:
  const std::size_t limit_;
  const std::function<void()> on_taken_;
  std::atomic<std::size_t> used_{0};
};

// A file descriptor that is kept open for nothing: in a process that has as many as it may have, a
// thread closes it to receive another one in its place. Thread-safe.
class SpareDescriptor {
 public:
  SpareDescriptor() { restore(); }
  SpareDescriptor(const SpareDescriptor&) = delete;

  // Close it, so that there is a free number.
  void give() EXCLUDES(mutex_);
  // Open it again, if that is possible now.
  void restore() EXCLUDES(mutex_);
  // Close it for good.
  void end() EXCLUDES(mutex_);
  // The same in a forked child: another thread of the parent may have had the lock, and here is one only.
  void close_after_fork() {
    mutex_.assume();
    descriptor_.reset();
  }

 private:
  Mutex mutex_;
  Descriptor descriptor_ GUARDED_BY(mutex_);
  bool has_ended_ GUARDED_BY(mutex_) = false;
};

// The budget that all links of one endpoint share.
struct EndpointMemory {
  explicit EndpointMemory(std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>())
      : budget(std::move(budget)) {}

  const std::shared_ptr<HeapPool> pool = std::make_shared<HeapPool>();
  const std::shared_ptr<MemoryBudget> budget;
  SpareDescriptor spare;
};

}  // namespace farcall
