#include "link.hpp"

#include <utility>

#include "link_parts.hpp"

namespace farcall {

Link::Link(std::shared_ptr<Endpoint> home, std::uint64_t id, std::unique_ptr<Channel> channel,
           const Limits& limits)
    : home_(std::move(home)),
      id_(id),
      channel_(std::move(channel)),
      streams_(dynamic_cast<StreamChannel*>(channel_.get())),
      asks_for_streams_(streams_ && streams_->striping().dialled && streams_->has_stripes()),
      reader_(limits, home_->pool()),
      spinner_(home_->spin_budget(), Who::kCaller) {}

Link::~Link() = default;

std::string Link::loss_cause() {
  MutexLock lock(state_);
  return loss_cause_;
}

// Threads inside a link keep its socket open; the last to leave a lost link closes it.

void Link::leave() {
  if (users_.leave()) channel_->close();
}

// For the endpoint's thread.

std::optional<Event> Link::take_event() {
  std::optional<Event> event;
  if (!enter()) return event;
  if (take_role()) {
    // Frames that another thread has queued from this link come first.
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
    drop_role();
  }
  leave();
}

bool Link::prepare_sleep() {
  if (!enter()) return true;
  bool ready = reading_.load(std::memory_order_seq_cst) || paused_.load(std::memory_order_seq_cst) ||
               channel_->arm();
  if (!channel_->is_stream() && take_residue()) {
    try {
      if (channel_->ask_for_space()) ready = false;
    } catch (const LinkFailure&) {
      ready = false;  // writing finds out
    }
    offer_residue();
  }
  if (streams_ && streams_->has_stripes()) arm_streams();
  leave();
  return ready;
}

bool Link::trim() {
  if (!enter()) return false;
  bool more = channel_->trim();
  if (!try_to_write()) {
    more = true;
  } else {
    try {
      more = channel_->trim_writing() || more;
    } catch (const LinkFailure&) {
      // Writing finds out.
    }
    stop_writing();
  }
  leave();
  return more;
}

void Link::start() {
  Use use(*this);
  {
    MutexLock lock(state_);
    if (is_lost()) throw LinkFailure(loss_cause_);
    started_ = true;
  }
  try {
    home_->start(shared_from_this());
  } catch (const LinkFailure&) {
    MutexLock lock(state_);
    if (is_lost()) return;  // an event tells of that
    started_ = false;
    throw;
  }
  update_interest();  // something may have been sent already
}

void Link::set_reading(bool is_on) {
  if (paused_.exchange(!is_on, std::memory_order_seq_cst) != is_on || !enter()) return;
  update_interest();
  leave();
  if (is_on) home_->wake_sleeper();
}

// Ending.

void Link::fail(const std::string& cause) {
  bool started = false;
  {
    MutexLock lock(state_);
    if (is_lost()) return;
    started = started_;
    loss_cause_ = cause;
    lost_.store(true, std::memory_order_seq_cst);
    for (Waiter* waiter : waiters_) {
      if (waiter->is_set()) continue;  // it has read its outcome by itself
      waiter->state.store(Waiter::kFailed, std::memory_order_release);
      futex_wake(waiter->state, 1);
    }
    waiters_.clear();
  }
  {
    MutexLock lock(interest_);  // no thread asks epoll for the socket any more
    home_->removed(*this);
  }
  channel_->shut_down();
  channel_->wake_writer();
  if (take_residue()) end_residue();
  if (started) home_->push({shared_from_this(), std::nullopt, cause});
  if (users_.end()) channel_->close();
}

void Link::close_after_fork() {
  lost_ = true;
  channel_->close();
}

}  // namespace farcall
