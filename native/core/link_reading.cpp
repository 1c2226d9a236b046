// Reading from a link, and waiting for an outcome.
#include <poll.h>

#include <algorithm>
#include <exception>

#include "link_parts.hpp"
#include "poll.hpp"

namespace farcall {

namespace {

constexpr std::uint32_t kLooksPerAlarm = 64;  // this one takes a system call

bool has_rung(int alarm) {
  pollfd waited{alarm, POLLIN, 0};
  return ::poll(&waited, 1, 0) > 0;
}

}  // namespace

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

bool Link::start_reading(Reading& reading) {
  reading.start();
  if (!reading.has_role()) return false;
  channel_->reading.begin();
  return true;
}

void Link::stop_reading(Reading& reading) {
  channel_->reading.end();
  reading.stop();
}

void Link::give_role_back() {
  channel_->reading.end();
  reading_.store(false, std::memory_order_seq_cst);
  if (streams_ && streams_->is_within_stripes()) {
    arm_streams();
    if (channel_->may_have_input()) home_->wake_sleeper();
    return;
  }
  // Of this thread and the endpoint's one sees the other: in `on_readable` that stops watching and
  // then looks who reads, before it sleeps it says so and then looks at all links.
  if (!watched_.load(std::memory_order_seq_cst)) set_watched(true);
  if (home_->sleeps() && !channel_->arm()) home_->wake_sleeper();
}

std::optional<InFrame> Link::read_one() {
  if (is_lost()) return std::nullopt;
  try {
    std::optional<InFrame> frame = reader_.read(*channel_);
    channel_->finish_reading();
    pass_bell_on();
    if (frame) {
      for (const BlockRef& buffer : frame->buffers) note_buffer(buffer->size());
    }
    return frame;
  } catch (const std::exception& error) {  // BadFrame, LinkFailure, no memory
    fail(error.what());
    return std::nullopt;
  }
}

void Link::read_socket() {
  try {
    channel_->on_readable();
    pass_bell_on();
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

// The bell that was heard may be for the endpoint's thread, which has a residue to write.
void Link::pass_bell_on() {
  if (has_residue()) home_->wake_sleeper();
}

// Gives an outcome to the caller that waits for it. Returns false if no caller does.
bool Link::deliver(InFrame& frame) {
  if (!is_outcome(frame.kind)) return false;
  MutexLock lock(state_);
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
  MutexLock lock(state_);
  if (is_lost()) return;  // the end was reported, and nothing comes after it
  home_->push({shared_from_this(), std::move(frame), {}});
}

// Up to the end, which is near: the peer is gone, or we have closed the socket. The endpoint's
// thread reads the rest.
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
    MutexLock lock(state_);
    if (is_lost()) throw LinkFailure(loss_cause_);
    waiters_.push_back(&waiter);
  }
  struct Unregister {
    Link& link;
    Waiter& waiter;
    bool is_taken = false;
    ~Unregister() {
      MutexLock lock(link.state_);
      auto& waiters = link.waiters_;
      const auto found = std::find(waiters.begin(), waiters.end(), &waiter);
      if (found != waiters.end()) {
        *found = waiters.back();
        waiters.pop_back();
      } else if (!is_taken && waiter.state == Waiter::kDelivered && !link.is_lost()) {
        // It came just now, when the caller had given up already: the endpoint's thread gets it.
        try {
          link.home_->push({link.shared_from_this(), std::move(waiter.frame), {}});
        } catch (const std::bad_alloc&) {
        }
      }
    }
  } unregister{*this, waiter};
  Reading reading(*this);
  if (!meanwhile) {
    // Before the request goes, or the endpoint's thread races us to the reply.
    reading.start();
    send_entered(frame, reading, deadline, interrupt);
  } else {
    // Waking the endpoint's thread for a reply that comes meanwhile would cost more than it saves.
    channel_->await_outcome(frame.call_id);
    // But a caller that reads has to hear of it: this thread would wait for that one to deliver it.
    // Either it is seen here, or it takes the role later, and clears this before it sleeps.
    if (reading_.load(std::memory_order_seq_cst)) channel_->await_outcome(0);
    try {
      send_entered(frame, reading, deadline, interrupt);
      meanwhile();
    } catch (...) {
      channel_->await_outcome(0);
      home_->wake_sleeper();
      throw;
    }
    channel_->await_outcome(0);
  }
  if (start_reading(reading)) {
    wait_reading(waiter, deadline, interrupt);
    stop_reading(reading);
  }
  wait_delivered(waiter, deadline, interrupt);
  if (waiter.state.load(std::memory_order_acquire) == Waiter::kFailed) throw LinkFailure(loss_cause());
  unregister.is_taken = true;
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

// Whether the bytes that are waited for may come by a stream that is still to join. That wakes
// the endpoint's thread, and no thread that polls the others.
bool Link::waits_for_streams() const { return streams_ && streams_->may_wait_for_streams(); }

// Until the outcome is there, or the endpoint has to read: it does not keep up with what arrives for it.
void Link::wait_reading(Waiter& waiter, Nanoseconds deadline, Interrupt interrupt) {
  while (!waiter.is_set()) {
    if (std::optional<InFrame> frame = read_one()) {
      if (is_outcome(frame->kind) && frame->call_id == waiter.call_id) {
        MutexLock lock(state_);
        if (waiter.is_set()) return;  // the link was lost meanwhile
        waiter.frame = std::move(*frame);
        waiter.state.store(Waiter::kDelivered, std::memory_order_relaxed);
        return;
      }
      route(std::move(*frame));
      if (home_->is_behind()) return;
      if (now() >= deadline) throw TimedOut();
      continue;
    }
    const Nanoseconds start = now();
    const auto look = [&] {
      channel_->reading.assume();
      return waiter.is_set() || channel_->look();
    };
    if (!spinner_.spin(start, look)) {
      if (waits_for_streams()) return;
      if (!sleep_until_readable(-1, deadline, interrupt)) throw TimedOut();
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
  if (!start_reading(reading)) return std::nullopt;
  std::optional<InFrame> frame = receive_reading(kinds, alarm, deadline, interrupt);
  stop_reading(reading);
  return frame;
}

std::optional<InFrame> Link::receive_reading(std::uint64_t kinds, int alarm, Nanoseconds deadline,
                                             Interrupt interrupt) {
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
      channel_->reading.assume();
      rang = ++looks % kLooksPerAlarm == 0 && has_rung(alarm);
      return rang || is_lost() || channel_->look();
    };
    if (!spinner_.spin(start, look)) {
      if (waits_for_streams()) return std::nullopt;
      if (!sleep_until_readable(alarm, deadline, interrupt)) return std::nullopt;
      rang = has_rung(alarm);
    }
    spinner_.remember(start);
    if (rang) return std::nullopt;
  }
  return std::nullopt;
}

// May wake up spuriously. Returns false if the deadline passed.
bool Link::sleep_until_readable(int alarm, Nanoseconds deadline, Interrupt interrupt) {
  if (watched_.load(std::memory_order_relaxed)) set_watched(false);
  channel_->await_outcome(0);  // another caller's, which this thread would have to deliver
  if (!channel_->arm()) return true;
  pollfd waited[kMaxStreams + 1];
  const nfds_t count = channel_->wait_set(waited);
  waited[count] = {alarm, POLLIN, 0};
  const int ready = poll_until(waited, alarm < 0 ? count : count + 1, deadline, interrupt);
  for (nfds_t i = 0; i < count; ++i) {
    if (waited[i].revents == 0) continue;
    read_socket();
    break;
  }
  return ready > 0;
}

}  // namespace farcall
