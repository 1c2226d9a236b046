// One agent's links: which of them have input, and which threads wait for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "link.hpp"
#include "memory.hpp"
#include "memory_budget.hpp"
#include "rundown.hpp"
#include "spin.hpp"

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
  std::optional<Event> next(Nanoseconds deadline, Interrupt interrupt);
  // The next event if it can be had in no time, and nobody is inside `next`.
  std::optional<Event> poll();
  // Makes a running or the next `next` return. Takes no lock.
  void wake();
  // How many bytes of shared memory the links have created and have not given back.
  std::size_t shared_memory() const { return memory_.budget->used(); }
  // Ends all links without reporting them, and waits until nobody is inside `next`, which returns
  // at once from now on.
  void close();
  // In a forked child: closes its copies of the descriptors but those of links.
  void forget();

  // For links.

  // Throws LinkFailure if the endpoint is closed.
  void start(const std::shared_ptr<Link>& link);
  EndpointMemory& memory() { return memory_; }
  HeapPool& pool() { return *memory_.pool; }
  SpinBudget& spin_budget() { return budget_; }
  const Limits& sending() const { return sending_; }
  void push(Event event);
  bool has_queued() const { return queued_.load(std::memory_order_seq_cst) > 0; }
  // Whether so much waits for `next` that nobody should read more for it.
  bool is_behind() const { return queued_.load(std::memory_order_relaxed) >= kMaxQueued; }
  // Whether the endpoint's thread sleeps, or is about to look at the links once more before.
  bool sleeps() const { return sleeps_.load(std::memory_order_seq_cst); }
  void wake_sleeper();
  void watch(const Link& link, std::uint32_t events);
  // One of the connections beside the first; told of once, of nothing at first.
  void add_side(const Link& link, unsigned lane);
  void watch_side(const Link& link, unsigned lane, std::uint32_t events);
  void removed(const Link& link);

 private:
  static constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
  static constexpr Nanoseconds kTrimPeriod = 5 * kSecond;
  static constexpr std::size_t kMaxQueued = 256;  // frames

  std::shared_ptr<Link> make(std::unique_ptr<Channel> channel, const Limits& limits);
  std::optional<Event> pop();
  void refresh();
  std::optional<Event> scan();
  bool look();
  void sleep(Nanoseconds deadline, Interrupt interrupt);
  void ask_epoll(int timeout_ms, Interrupt interrupt);
  void ask_in_time();
  bool prepare_sleep();
  bool trim();
  void leave();

  void want_trim();

  EndpointMemory memory_;
  const Limits sending_;
  SpinBudget budget_;
  Spinner spinner_;
  Rundown users_;  // of the two descriptors
  Descriptor epoll_;
  Descriptor bell_;

  std::atomic<std::uint64_t> links_made_{0};
  std::atomic<bool> woken_{false};
  std::atomic<bool> sleeps_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> active_{false};  // since it was last decided when to trim

  std::mutex queue_mutex_;
  std::deque<Event> queue_;
  std::atomic<std::size_t> queued_{0};

  std::mutex links_mutex_;  // guards what follows, up to `version_`
  std::unordered_map<std::uint64_t, std::shared_ptr<Link>> links_;
  std::atomic<std::uint64_t> version_{0};  // of `links_`

  std::mutex next_mutex_;  // guards what follows: the thread inside `next` has it
  std::vector<std::shared_ptr<Link>> seen_;
  std::uint64_t seen_version_ = 0;
  std::size_t cursor_ = 0;
  bool any_stream_ = false;
  std::uint32_t looks_ = 0;
  std::uint32_t events_ = 0;  // that were asked for
  Nanoseconds trim_at_ = kNever;
};

}  // namespace farcall
