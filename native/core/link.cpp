#include "link.hpp"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "endpoint.hpp"
#include "poll.hpp"

namespace farcall {

namespace {

constexpr std::uint32_t kLooksPerAlarm = 64;  // this one takes a system call

bool has_rung(int alarm) {
  pollfd waited{alarm, POLLIN, 0};
  return ::poll(&waited, 1, 0) > 0;
}

}  // namespace

// One caller waits for one outcome.
struct Link::Waiter {
  static constexpr std::uint32_t kWaiting = 0, kDelivered = 1, kFailed = 2;

  explicit Waiter(std::uint64_t call_id) : call_id(call_id) {}

  const std::uint64_t call_id;
  InFrame frame;
  std::atomic<std::uint32_t> state{kWaiting};

  bool is_set() const { return state.load(std::memory_order_acquire) != kWaiting; }
};

Link::Link(std::shared_ptr<Endpoint> home, std::uint64_t id, std::unique_ptr<Channel> channel,
           const Limits& limits)
    : home_(std::move(home)),
      id_(id),
      channel_(std::move(channel)),
      reader_(limits, home_->pool()),
      spinner_(home_->spin_budget(), Who::kCaller) {}

Link::~Link() = default;

std::string Link::cause() {
  std::lock_guard lock(state_);
  return cause_;
}

// Threads inside a link keep its socket open; the last to leave a lost link closes it.

void Link::leave() {
  if (users_.leave()) channel_->close();
}

class Link::Use {
 public:
  explicit Use(Link& link) : link_(link) {
    if (!link.enter()) throw LinkFailure(link.cause());
  }
  ~Use() { link_.leave(); }
  Use(const Use&) = delete;

 private:
  Link& link_;
};

class Link::Reading {
 public:
  explicit Reading(Link& link) : link_(link) {}
  ~Reading() { stop(); }
  Reading(const Reading&) = delete;

  void start() {
    if (!has_role_) has_role_ = link_.start_reading();
  }
  void stop() {
    if (std::exchange(has_role_, false)) link_.stop_reading();
  }
  bool has_role() const { return has_role_; }

 private:
  Link& link_;
  bool has_role_ = false;
};

// Writing.

void Link::send(const OutFrame& frame, Nanoseconds deadline, Interrupt interrupt) {
  Use use(*this);
  Reading reading(*this);
  send_entered(frame, reading, deadline, interrupt);
}

bool Link::send_at_once(const OutFrame& frame) {
  if (!enter()) return false;
  bool sent = false;
  if (writing_.try_take()) {
    try {
      sent = !is_lost() && channel_->write_at_once(frame);
    } catch (const std::exception&) {
      // `send` finds out.
    }
    writing_.give_back();
  }
  leave();
  return sent;
}

// Who has the role of reading gives it back before it waits for the peer, which may wait for us to
// read.
void Link::send_entered(const OutFrame& frame, Reading& reading, Nanoseconds deadline,
                        Interrupt interrupt) {
  if (is_lost()) throw LinkFailure(cause());
  Composed composed;
  try {
    channel_->compose(frame, composed);
    if (!writing_.try_take()) {
      reading.stop();
      if (!writing_.take(deadline, interrupt)) throw NotSent();
    }
  } catch (...) {
    channel_->discard(composed);
    throw;
  }
  write(composed, reading, deadline, interrupt);
}

// With the role of writing, which is given back or left with a residue.
void Link::write(Composed& composed, Reading& reading, Nanoseconds deadline, Interrupt interrupt) {
  bool any = false;
  try {
    if (is_lost()) throw LinkFailure(cause());
    if (!channel_->wait_for_room(composed, 0, interrupt)) {
      reading.stop();
      if (!channel_->wait_for_room(composed, deadline, interrupt)) throw NotSent();
    }
    auto part = composed.parts.begin();
    while (true) {
      std::size_t written =
          channel_->write(&*part, static_cast<std::size_t>(composed.parts.end() - part));
      any = any || written > 0;
      const bool stuck = written == 0;
      while (part != composed.parts.end() && written >= part->size) written -= part++->size;
      if (part == composed.parts.end()) break;
      part->data += written;
      part->size -= written;
      composed.parts.erase(composed.parts.begin(), part);
      part = composed.parts.begin();
      if (!stuck) continue;
      if (is_lost()) throw LinkFailure(cause());
      reading.stop();
      if (!channel_->wait_for_space(deadline, interrupt)) {
        if (!any) throw NotSent();
        throw TimedOut();
      }
    }
    channel_->sent(composed);
  } catch (const LinkFailure& error) {
    writing_.give_back();
    throw broken(error);
  } catch (...) {
    if (any) {
      leave_residue(composed);
    } else {
      channel_->discard(composed);
      writing_.give_back();
    }
    throw;
  }
  writing_.give_back();
}

// The peer gets the rest of the frame from the endpoint's thread.
void Link::leave_residue(const Composed& composed) {
  channel_->sent(composed);
  try {
    residue_.clear();
    for (const Part& part : composed.parts) {
      residue_.insert(residue_.end(), part.data, part.data + part.size);
    }
  } catch (const std::bad_alloc&) {
    lose("no memory for the rest of a frame");
    end_residue();
    return;
  }
  residue_written_ = 0;
  has_residue_.store(true, std::memory_order_seq_cst);
  offer_residue();
  update_interest();
  home_->wake_sleeper();
}

// Whoever takes the flag away has the role of writing.
void Link::offer_residue() {
  residue_waits_.store(true, std::memory_order_seq_cst);
  if (is_lost() && residue_waits_.exchange(false)) end_residue();
}

void Link::end_residue() {
  std::vector<std::uint8_t>().swap(residue_);
  if (has_residue_.exchange(false)) update_interest();
  writing_.give_back();
}

void Link::write_residue() {
  if (!enter()) return;
  if (residue_waits_.exchange(false)) {
    try {
      while (residue_written_ < residue_.size() && !is_lost()) {
        const Part rest{residue_.data() + residue_written_, residue_.size() - residue_written_};
        const std::size_t written = channel_->write(&rest, 1);
        if (written == 0) break;
        residue_written_ += written;
      }
    } catch (const LinkFailure& error) {
      residue_written_ = residue_.size();
      broken(error);
    }
    if (residue_written_ < residue_.size()) {
      offer_residue();
    } else {
      end_residue();
    }
  }
  leave();
}

// Writing failed. What the peer sent before it went, a goodbye maybe, still counts.
LinkFailure Link::broken(const LinkFailure& error) {
  cut_ = true;
  channel_->shut_down();  // so that whoever reads finds the end
  read_all();
  return is_lost() ? LinkFailure(cause()) : error;
}

// Reading.

// A caller reads, and not the endpoint's thread.
bool Link::start_reading() {
  if (!take_role()) return false;
  channel_->disarm();
  if (channel_->is_stream()) set_watched(false);
  return true;
}

void Link::stop_reading() {
  give_role_back();
  if (cut_) read_all();
}

void Link::give_role_back() {
  reading_.store(false, std::memory_order_seq_cst);
  // Of this thread and the endpoint's one sees the other: in `on_readable` that stops watching and
  // then looks who reads, before it sleeps it says so and then looks at all links.
  if (!watched_.load(std::memory_order_seq_cst)) set_watched(true);
  if (home_->sleeps() && !channel_->arm()) home_->wake_sleeper();
}

// With the role of reading, as everything down to `read_all`.
std::optional<InFrame> Link::read_one() {
  if (is_lost()) return std::nullopt;
  try {
    std::optional<InFrame> frame = reader_.read(*channel_);
    channel_->finish_reading();
    pass_bell_on();
    return frame;
  } catch (const std::exception& error) {  // BadFrame, LinkFailure, no memory
    lose(error.what());
    return std::nullopt;
  }
}

void Link::read_socket() {
  try {
    channel_->on_readable();
    pass_bell_on();
  } catch (const std::exception& error) {
    lose(error.what());
  }
}

// The bell that was heard may be for the endpoint's thread, which has a residue to write.
void Link::pass_bell_on() {
  if (has_residue()) home_->wake_sleeper();
}

// To the caller that waits for it. False: nobody does.
bool Link::deliver(InFrame& frame) {
  if (!is_outcome(frame.kind)) return false;
  std::lock_guard lock(state_);
  for (Waiter*& waiter : waiters_) {
    if (waiter->call_id != frame.call_id) continue;
    Waiter* found = waiter;
    waiter = waiters_.back();
    waiters_.pop_back();
    found->frame = std::move(frame);
    // Under the lock: a waiter that has seen this takes the lock before it is gone.
    found->state.store(Waiter::kDelivered, std::memory_order_release);
    futex_wake(found->state, 1);
    return true;
  }
  return false;
}

void Link::route(InFrame frame) {
  if (deliver(frame)) return;
  std::lock_guard lock(state_);
  if (is_lost()) return;  // the end was reported, and nothing comes after it
  home_->push({shared_from_this(), std::move(frame), {}});
}

// Up to the end, which is near: the peer is gone, or we have closed the socket. The endpoint's
// thread reads what is more.
void Link::read_all() {
  if (!enter()) return;
  if (take_role()) {
    read_socket();
    while (!home_->is_behind()) {
      std::optional<InFrame> frame = read_one();
      if (!frame) break;
      route(std::move(*frame));
    }
    give_role_back();
  }
  leave();
}

InFrame Link::exchange(const OutFrame& frame, Nanoseconds deadline, Interrupt interrupt,
                       const std::function<void()>& meanwhile) {
  Use use(*this);
  Waiter waiter(frame.call_id);
  {
    std::lock_guard lock(state_);
    if (is_lost()) throw LinkFailure(cause_);
    waiters_.push_back(&waiter);
  }
  struct Unregister {
    Link& link;
    Waiter& waiter;
    ~Unregister() {
      std::lock_guard lock(link.state_);
      auto& waiters = link.waiters_;
      const auto found = std::find(waiters.begin(), waiters.end(), &waiter);
      if (found != waiters.end()) {
        *found = waiters.back();
        waiters.pop_back();
      }
    }
  } unregister{*this, waiter};
  Reading reading(*this);
  if (!meanwhile) {
    // Before the request goes, or the endpoint's thread races us to the reply.
    reading.start();
    send_entered(frame, reading, deadline, interrupt);
  } else {
    send_entered(frame, reading, deadline, interrupt);
    meanwhile();
  }
  reading.start();
  if (reading.has_role()) wait_reading(waiter, reading, deadline, interrupt);
  wait_delivered(waiter, deadline, interrupt);
  if (waiter.state.load(std::memory_order_acquire) == Waiter::kFailed) throw LinkFailure(cause());
  return std::move(waiter.frame);
}

void Link::wait_delivered(Waiter& waiter, Nanoseconds deadline, Interrupt interrupt) {
  while (!waiter.is_set()) {
    if (futex_wait(waiter.state, Waiter::kWaiting, deadline, interrupt) == Woken::kTimedOut &&
        !waiter.is_set()) {
      throw TimedOut();
    }
  }
}

// Gives up reading if the endpoint does not keep up with what arrives for it.
void Link::wait_reading(Waiter& waiter, Reading& reading, Nanoseconds deadline,
                        Interrupt interrupt) {
  while (!waiter.is_set()) {
    if (std::optional<InFrame> frame = read_one()) {
      if (is_outcome(frame->kind) && frame->call_id == waiter.call_id) {
        std::lock_guard lock(state_);
        if (waiter.is_set()) return;  // the link was lost meanwhile
        waiter.frame = std::move(*frame);
        waiter.state.store(Waiter::kDelivered, std::memory_order_relaxed);
        return;
      }
      route(std::move(*frame));
      if (home_->is_behind()) return reading.stop();
      if (now() >= deadline) throw TimedOut();
      continue;
    }
    const Nanoseconds start = now();
    const auto look = [&] { return waiter.is_set() || channel_->look(); };
    if (!spinner_.spin(start, look) && !sleep_until_readable(-1, deadline, interrupt)) {
      throw TimedOut();
    }
    spinner_.remember(start);
  }
}

std::optional<InFrame> Link::receive(std::uint64_t kinds, int alarm, Nanoseconds deadline,
                                     Interrupt interrupt) {
  if (!enter()) return std::nullopt;
  struct Leave {
    Link& link;
    ~Leave() { link.leave(); }
  } leave_at_end{*this};
  Reading reading(*this);
  reading.start();
  if (!reading.has_role()) return std::nullopt;
  while (!is_lost()) {
    if (std::optional<InFrame> frame = read_one()) {
      if (kinds >> frame->kind & 1) return frame;
      route(std::move(*frame));
      if (home_->is_behind() || now() >= deadline || has_rung(alarm)) return std::nullopt;
      continue;
    }
    const Nanoseconds start = now();
    std::uint32_t looks = 0;
    bool rang = false;
    const auto look = [&] {
      rang = ++looks % kLooksPerAlarm == 0 && has_rung(alarm);
      return rang || is_lost() || channel_->look();
    };
    if (!spinner_.spin(start, look)) {
      if (!sleep_until_readable(alarm, deadline, interrupt)) return std::nullopt;
      rang = has_rung(alarm);
    }
    spinner_.remember(start);
    if (rang) return std::nullopt;
  }
  return std::nullopt;
}

// Also returns for no reason. False: the deadline passed.
bool Link::sleep_until_readable(int alarm, Nanoseconds deadline, Interrupt interrupt) {
  if (watched_.load(std::memory_order_relaxed)) set_watched(false);
  if (!channel_->arm()) return true;
  pollfd waited[2] = {{channel_->fd(), POLLIN, 0}, {alarm, POLLIN, 0}};
  const int ready = poll_until(waited, alarm < 0 ? 1 : 2, deadline, interrupt);
  if (waited[0].revents != 0) read_socket();
  return ready > 0;
}

// For the endpoint's thread.

std::optional<Event> Link::take_event() {
  std::optional<Event> event;
  if (!enter()) return event;
  if (take_role()) {
    // What another thread has queued from this link comes first.
    while (!home_->has_queued()) {
      std::optional<InFrame> frame = read_one();
      if (!frame) break;
      if (deliver(*frame)) continue;
      event = Event{shared_from_this(), std::move(frame), {}};
      break;
    }
    give_role_back();
  }
  leave();
  return event;
}

void Link::on_readable() {
  if (reading_.load(std::memory_order_relaxed)) {
    // A caller reads. It sees this, too; the endpoint's thread must not be told again and again.
    set_watched(false);
    channel_->wake_writer();  // it may be the end
    if (reading_.load(std::memory_order_seq_cst)) return;
    set_watched(true);
  }
  if (!enter()) return;
  if (take_role()) {
    read_socket();
    // Not `give_role_back`: this is the endpoint's thread, and it looks at all links next.
    reading_.store(false, std::memory_order_seq_cst);
  }
  leave();
}

bool Link::prepare_sleep() {
  if (!enter()) return true;
  bool ready = reading_.load(std::memory_order_seq_cst) || channel_->arm();
  if (!channel_->is_stream() && residue_waits_.exchange(false)) {
    try {
      if (channel_->ask_for_space()) ready = false;
    } catch (const LinkFailure&) {
      ready = false;  // writing finds out
    }
    offer_residue();
  }
  leave();
  return ready;
}

bool Link::trim() {
  if (!enter()) return false;
  const bool more = channel_->trim();
  leave();
  return more;
}

void Link::set_watched(bool watched) {
  watched_.store(watched, std::memory_order_seq_cst);
  update_interest();
}

void Link::update_interest() {
  std::lock_guard lock(interest_);
  if (is_lost()) return;
  std::uint32_t events = watched_ ? EPOLLIN | EPOLLRDHUP : 0;
  if (channel_->is_stream() && has_residue()) events |= EPOLLOUT;
  home_->watch(*this, events);
}

void Link::start() {
  Use use(*this);
  {
    std::lock_guard lock(state_);
    if (is_lost()) throw LinkFailure(cause_);
    started_ = true;
  }
  home_->start(shared_from_this());
  update_interest();  // something may have been sent already
}

// Ending.

void Link::lose(const std::string& cause) {
  bool started = false;
  {
    std::lock_guard lock(state_);
    if (is_lost()) return;
    started = started_;
    cause_ = cause;
    lost_.store(true, std::memory_order_seq_cst);
    for (Waiter* waiter : waiters_) {
      waiter->state.store(Waiter::kFailed, std::memory_order_release);
      futex_wake(waiter->state, 1);
    }
    waiters_.clear();
  }
  {
    std::lock_guard lock(interest_);  // nobody asks epoll for the socket any more
    home_->removed(*this);
  }
  channel_->shut_down();
  channel_->wake_writer();
  if (residue_waits_.exchange(false)) end_residue();
  if (started) home_->push({shared_from_this(), std::nullopt, cause});
  if (users_.end()) channel_->close();
}

void Link::forget() {
  lost_ = true;
  channel_->close();
}

}  // namespace farcall
