// One agent's links: which of them have input, and which threads wait for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "link.hpp"
#include "memory.hpp"
#include "memory_budget.hpp"
#include "rundown.hpp"
#include "spin.hpp"
#include "thread_safety.hpp"

namespace farcall {

struct RingBounds;

class Endpoint : public std::enable_shared_from_this<Endpoint> {
 public:
  // `spin_threads`: how many threads may spin at once. `shared_memory`: how many bytes of it all links
  // together may create. `move_threads`, `keep_awake`: see `SpinBudget`. `sending`: what every receiver
  // takes.
  explicit Endpoint(int spin_threads, std::size_t shared_memory = kUnlimited, bool move_threads = false,
                    bool keep_awake = true, const Limits& sending = kNoLimits);
  Endpoint(const Endpoint&) = delete;

  // A link over a socket, which it takes over. Nothing is read before `start`. `keys`: of its records;
  // null: there are none. Throws LinkFailure: there are keys and no crypto.
  std::shared_ptr<Link> open_stream(Descriptor socket, const Limits& limits,
                                    const Striping& striping = {}, const Keys* keys = nullptr);
  // See RingChannel. Falls back to the stream.
  std::shared_ptr<Link> open_rings(Descriptor socket, const Limits& limits, int side,
                                   const RingBounds& bounds, Nanoseconds deadline);

  // The next event, or nullopt: when the deadline passed, when `wake` was called, or spuriously.
  // For one thread at a time. A deadline of 0 is not waited for at all.
  std::optional<Event> next(Nanoseconds deadline, Interrupt interrupt) EXCLUDES(next_mutex_);
  // The next event if it is there without blocking, and no thread is inside `next`.
  std::optional<Event> poll();
  // Makes a running or the next `next` return. Takes no lock.
  void wake();
  // How many bytes of shared memory the links have created and have not given back.
  std::size_t shared_memory() const { return memory_.budget->used(); }
  // Ends all links without reporting them, and waits until no thread is inside `next`, which returns
  // at once from now on.
  void close() EXCLUDES(links_mutex_, queue_mutex_, next_mutex_);
  // In a forked child: closes its copies of the descriptors but those of links.
  void close_after_fork();

  // For links.

  // Throws LinkFailure if the endpoint is closed.
  void start(const std::shared_ptr<Link>& link) EXCLUDES(links_mutex_);
  EndpointMemory& memory() { return memory_; }
  HeapPool& pool() { return *memory_.pool; }
  SpinBudget& spin_budget() { return budget_; }
  const Limits& sending() const { return sending_; }
  void push(Event event) EXCLUDES(queue_mutex_);
  bool has_queued() const { return queued_.load(std::memory_order_seq_cst) > 0; }
  // Whether so much waits for `next` that no thread should read more for it.
  bool is_behind() const { return queued_.load(std::memory_order_relaxed) >= kMaxQueued; }
  // Whether the endpoint's thread sleeps, or is about to look at the links once more before.
  bool sleeps() const { return sleeps_.load(std::memory_order_seq_cst); }
  void wake_sleeper();
  void watch(const Link& link, std::uint32_t events);
  // For a further stream of a link. epoll tells of it once, and of nothing at first.
  void add_stream(const Link& link, unsigned stream);
  void watch_stream(const Link& link, unsigned stream, std::uint32_t events);
  void removed(const Link& link) EXCLUDES(links_mutex_);

 private:
  static constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
  static constexpr Nanoseconds kTrimPeriod = 5 * kSecond;
  static constexpr std::size_t kMaxQueued = 256;  // frames

  std::shared_ptr<Link> make(std::unique_ptr<Channel> channel, const Limits& limits);
  std::optional<Event> pop() EXCLUDES(queue_mutex_);
  void refresh() REQUIRES(next_mutex_) EXCLUDES(links_mutex_);
  std::optional<Event> scan() REQUIRES(next_mutex_, endpoint_thread);
  bool look() REQUIRES(next_mutex_, endpoint_thread);
  void sleep(Nanoseconds deadline, Interrupt interrupt) REQUIRES(next_mutex_, endpoint_thread);
  void ask_epoll(int timeout_ms, Interrupt interrupt) REQUIRES(next_mutex_, endpoint_thread)
      EXCLUDES(links_mutex_);
  void ask_in_time() REQUIRES(next_mutex_, endpoint_thread);
  bool prepare_sleep() REQUIRES(next_mutex_, endpoint_thread);
  bool trim() REQUIRES(next_mutex_, endpoint_thread);

  void leave();
  void want_trim();

  EndpointMemory memory_;
  const Limits sending_;
  SpinBudget budget_;
  Spinner spinner_ GUARDED_BY(next_mutex_);
  Rundown users_;  // of the two descriptors
  Descriptor epoll_;
  Descriptor bell_;

  std::atomic<std::uint64_t> links_made_{0};
  std::atomic<bool> woken_{false};
  std::atomic<bool> sleeps_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> active_{false};  // since it was last decided when to trim

  Mutex queue_mutex_;
  std::deque<Event> queue_ GUARDED_BY(queue_mutex_);
  std::atomic<std::size_t> queued_{0};

  Mutex links_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Link>> links_ GUARDED_BY(links_mutex_);
  std::atomic<std::uint64_t> version_{0};  // of `links_`

  Mutex next_mutex_;  // of the thread inside `next` or `poll`
  std::vector<std::shared_ptr<Link>> seen_ GUARDED_BY(next_mutex_);
  std::uint64_t seen_version_ GUARDED_BY(next_mutex_) = 0;
  std::size_t cursor_ GUARDED_BY(next_mutex_) = 0;
  bool any_stream_ GUARDED_BY(next_mutex_) = false;
  std::uint32_t looks_ GUARDED_BY(next_mutex_) = 0;
  std::uint32_t events_ GUARDED_BY(next_mutex_) = 0;  // that were asked for
  Nanoseconds trim_at_ GUARDED_BY(next_mutex_) = kNever;
};

}  // namespace farcall
