#include "endpoint.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "ring_channel.hpp"
#include "stream_channel.hpp"

namespace farcall {

namespace {

constexpr std::uint64_t kBellId = 0;  // links count from 1
constexpr int kStreamShift = 56;  // above it, which stream of the link
constexpr int kMaxReady = 64;
constexpr Nanoseconds kMaxSleep = 3600 * kSecond;
constexpr std::uint32_t kLooksPerPoll = 8;  // with rings among the links, which cost no system call
constexpr std::uint32_t kEventsPerPoll = 16;

}  // namespace

Endpoint::Endpoint(int spin_threads, std::size_t shared_memory, bool move_threads, bool keep_awake,
                   const Limits& sending)
    : memory_(std::make_shared<MemoryBudget>(shared_memory, [this] { want_trim(); })),
      sending_(sending),
      budget_(spin_threads, move_threads, keep_awake),
      spinner_(budget_, Who::kEndpoint),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      bell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!epoll_ || !bell_) throw std::system_error(errno, std::generic_category());
  epoll_event event{};
  // Each write is an edge, so no thread has to read it.
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kBellId;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &event);
}

// Links.

std::shared_ptr<Link> Endpoint::open_stream(Descriptor socket, const Limits& limits,
                                            const Striping& striping, const Keys* keys) {
  return make(std::make_unique<StreamChannel>(std::move(socket), striping, keys), limits);
}

std::shared_ptr<Link> Endpoint::open_rings(Descriptor socket, const Limits& limits, int side,
                                           const RingBounds& bounds, Nanoseconds deadline) {
  auto memory = RingChannel::set_up(socket, side, memory_.budget, deadline);
  if (!memory) return open_stream(std::move(socket), limits);
  return make(
      std::make_unique<RingChannel>(std::move(socket), std::move(memory), side, memory_, bounds),
      limits);
}

std::shared_ptr<Link> Endpoint::make(std::unique_ptr<Channel> channel, const Limits& limits) {
  return std::make_shared<Link>(shared_from_this(), links_made_.fetch_add(1) + 1, std::move(channel),
                                limits);
}

void Endpoint::start(const std::shared_ptr<Link>& link) {
  {
    MutexLock lock(links_mutex_);
    if (closed_) throw LinkFailure("this worker has shut down");
    links_[link->id()] = link;
    version_.fetch_add(1);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = link->id();
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link->fd(), &event) != 0) {
      links_.erase(link->id());
      throw LinkFailure("the connection can't be watched: " + std::generic_category().message(errno));
    }
  }
  if (link->is_lost()) removed(*link);  // it may have been lost before it was here
  wake_sleeper();
}

void Endpoint::watch(const Link& link, std::uint32_t events) {
  if (!users_.enter()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = link.id();
  // Fails before the link is started; that asks for the right events then.
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.fd(), &event);
  leave();
}

void Endpoint::add_stream(const Link& link, unsigned stream) {
  if (!users_.enter()) return;
  epoll_event event{};
  event.events = EPOLLONESHOT;
  event.data.u64 = link.id() | std::uint64_t{stream} << kStreamShift;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link.stream_fd(stream), &event);
  leave();
}

void Endpoint::watch_stream(const Link& link, unsigned stream, std::uint32_t events) {
  if (!users_.enter()) return;
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.u64 = link.id() | std::uint64_t{stream} << kStreamShift;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.stream_fd(stream), &event);
  leave();
}

void Endpoint::removed(const Link& link) {
  if (users_.enter()) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.fd(), nullptr);
    for (unsigned stream = 1; stream < link.streams(); ++stream) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.stream_fd(stream), nullptr);
    }
    leave();
  }
  MutexLock lock(links_mutex_);
  links_.erase(link.id());
  version_.fetch_add(1);
}

// Events.

void Endpoint::push(Event event) {
  {
    MutexLock lock(queue_mutex_);
    if (closed_) return;
    queue_.push_back(std::move(event));
    queued_.store(queue_.size(), std::memory_order_seq_cst);
  }
  wake_sleeper();
}

std::optional<Event> Endpoint::pop() {
  if (!has_queued()) return std::nullopt;
  MutexLock lock(queue_mutex_);
  if (queue_.empty()) return std::nullopt;
  Event event = std::move(queue_.front());
  queue_.pop_front();
  queued_.store(queue_.size(), std::memory_order_seq_cst);
  return event;
}

void Endpoint::wake_sleeper() {
  if (!sleeps_.load(std::memory_order_seq_cst) || !users_.enter()) return;
  eventfd_write(bell_.get(), 1);
  leave();
}

void Endpoint::leave() {
  if (!users_.leave()) return;
  epoll_.reset();
  bell_.reset();
  memory_.spare.end();
}

void Endpoint::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  wake_sleeper();
}

std::optional<Event> Endpoint::next(Nanoseconds deadline, Interrupt interrupt) {
  MutexLock lock(next_mutex_);
  const InRole role(endpoint_thread);
  // `close` waits for the thread that is inside, and no longer: later there are no descriptors.
  if (closed_) return std::nullopt;
  active_.store(true, std::memory_order_relaxed);
  ask_in_time();
  for (bool waited = false;; waited = true) {
    if (auto event = pop()) return event;
    if (woken_.exchange(false) || closed_) return std::nullopt;
    if (auto event = scan()) return event;
    if (has_queued()) continue;
    // The news may have been for callers: Python, which others of its threads use, need not know.
    if (waited && now() >= deadline) return std::nullopt;
    if (deadline == 0) {
      ask_epoll(0, interrupt);
      continue;
    }
    const Nanoseconds start = now();
    const auto look_again = [this] {
      next_mutex_.assume();
      endpoint_thread.assume();
      return look();
    };
    while (!spinner_.spin(start, look_again)) {
      const bool naps = spinner_.naps();
      const Nanoseconds until = naps ? now() + Spinner::kNap : deadline;
      sleep(std::min(deadline, until), interrupt);
      if (!naps || look() || now() >= deadline) break;
    }
    spinner_.remember(start);
  }
}

std::optional<Event> Endpoint::poll() {
  if (!next_mutex_.try_lock()) return std::nullopt;
  MutexLock lock(next_mutex_, MutexLock::Taken::kBefore);
  const InRole role(endpoint_thread);
  if (closed_ || woken_.load(std::memory_order_relaxed)) return std::nullopt;
  active_.store(true, std::memory_order_relaxed);
  ask_in_time();
  auto event = pop();
  return event ? std::move(event) : scan();
}

void Endpoint::refresh() {
  const std::uint64_t version = version_.load(std::memory_order_acquire);
  if (version == seen_version_) return;
  std::vector<std::shared_ptr<Link>> before;  // the last use of a link ends outside the lock
  MutexLock lock(links_mutex_);
  before.swap(seen_);
  seen_version_ = version_.load();
  any_stream_ = false;
  for (auto& [id, link] : links_) {
    seen_.push_back(link);
    any_stream_ = any_stream_ || link->is_stream();
  }
}

std::optional<Event> Endpoint::scan() {
  refresh();
  const std::size_t count = seen_.size();
  for (std::size_t i = 0; i < count; ++i) {
    cursor_ = cursor_ + 1 < count ? cursor_ + 1 : 0;
    Link& link = *seen_[cursor_];
    if (link.has_residue()) link.write_residue();
    if (!link.may_have_input()) continue;
    if (auto event = link.take_event()) return event;
  }
  return std::nullopt;
}

bool Endpoint::look() {
  if (has_queued() || woken_.load(std::memory_order_relaxed)) return true;
  if (version_.load(std::memory_order_relaxed) != seen_version_) return true;
  if (any_stream_ && ++looks_ % kLooksPerPoll == 0) ask_epoll(0, no_interrupt);
  for (const auto& link : seen_) {
    if (link->may_have_input()) return true;
  }
  return false;
}

bool Endpoint::prepare_sleep() {
  if (has_queued() || woken_.load(std::memory_order_seq_cst) || closed_) return false;
  if (version_.load(std::memory_order_seq_cst) != seen_version_) return false;
  for (const auto& link : seen_) {
    if (!link->prepare_sleep()) return false;
  }
  return true;
}

void Endpoint::sleep(Nanoseconds deadline, Interrupt interrupt) {
  sleeps_.store(true, std::memory_order_seq_cst);
  struct Awake {
    std::atomic<bool>& sleeps;
    ~Awake() { sleeps.store(false, std::memory_order_seq_cst); }
  } awake_at_end{sleeps_};
  if (prepare_sleep()) {
    const Nanoseconds time = now();
    if (active_.exchange(false) && trim_at_ == kNever) trim_at_ = time + kTrimPeriod;
    const Nanoseconds until = std::min(deadline, trim_at_);
    const Nanoseconds left = std::clamp<Nanoseconds>(piece_of(until - time, interrupt), 0, kMaxSleep);
    ask_epoll(static_cast<int>((left + kMillisecond - 1) / kMillisecond), interrupt);
    if (now() >= trim_at_) trim_at_ = trim() ? now() + kTrimPeriod : kNever;
  }
}

void Endpoint::ask_epoll(int timeout_ms, Interrupt interrupt) {
  epoll_event ready[kMaxReady];
  const int count = epoll_wait(epoll_.get(), ready, kMaxReady, timeout_ms);
  if (count <= 0) interrupt();
  for (int i = 0; i < count; ++i) {
    const auto stream = static_cast<unsigned>(ready[i].data.u64 >> kStreamShift);
    const std::uint64_t id = ready[i].data.u64 & ~(~std::uint64_t{0} << kStreamShift);
    if (id == kBellId) continue;
    std::shared_ptr<Link> link;
    {
      MutexLock lock(links_mutex_);
      const auto found = links_.find(id);
      if (found != links_.end()) link = found->second;
    }
    if (!link) continue;
    const std::uint32_t events = ready[i].events;
    if (stream > 0) {
      link->on_stream(stream, events);
      continue;
    }
    if (events & EPOLLOUT) link->write_residue();
    // A peer that is gone has left little, and a goodbye may be among it.
    if (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) link->set_reading(true);
    if (events & (EPOLLERR | EPOLLHUP)) link->on_hang_up();
    if (events & ~static_cast<std::uint32_t>(EPOLLOUT)) link->on_readable();
  }
}

// One link that always has a next frame must not keep the others unheard: only epoll tells of input
// on their sockets, and of their end.
void Endpoint::ask_in_time() {
  if (++events_ % kEventsPerPoll == 0) ask_epoll(0, no_interrupt);
}

// The thread inside `next` may sleep without a time to wake, while callers send and receive.
void Endpoint::want_trim() {
  if (!active_.exchange(true)) wake_sleeper();
}

bool Endpoint::trim() {
  bool more = memory_.pool->trim();
  for (const auto& link : seen_) more = link->trim() || more;
  return more;
}

// Ending.

void Endpoint::close() {
  std::vector<std::shared_ptr<Link>> links;
  {
    MutexLock lock(links_mutex_);
    MutexLock queue_lock(queue_mutex_);
    if (closed_.exchange(true)) return;
    for (auto& [id, link] : links_) links.push_back(link);
  }
  for (auto& link : links) link->fail("this worker has shut down");
  eventfd_write(bell_.get(), 1);
  // These refer to links, which refer to this endpoint.
  MutexLock next_lock(next_mutex_);
  MutexLock lock(queue_mutex_);
  seen_.clear();
  queue_.clear();
  queued_.store(0);
  leave();
}

void Endpoint::close_after_fork() {
  // No locks: their holders were not forked.
  if (closed_.exchange(true)) return;
  sleeps_.store(false);  // nor was a thread that slept
  epoll_.reset();
  bell_.reset();
  memory_.spare.close_after_fork();
}

}  // namespace farcall
