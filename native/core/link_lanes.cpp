// Which of its connections a link is told about, and by whom; those beside the first.
//
// epoll watches the first connection for as long as the endpoint's thread is to read or write there.
// Of the others it tells once and has to be asked again, for their end, for what a residue waits for,
// and for input where it is wanted and no thread has the role of reading. Within stripes, a thread
// that gives that role back asks (`give_role_back`), and the endpoint's thread does before it sleeps.
// So there is always a reader, or epoll was asked, or it has told: then the endpoint's thread marks
// the connection (`on_side`), and looks at its links before it sleeps.
#include <sys/epoll.h>

#include <utility>

#include "link_parts.hpp"

namespace farcall {

void Link::set_watched(bool watched) {
  watched_.store(watched, std::memory_order_seq_cst);
  update_interest();
}

void Link::update_interest() {
  MutexLock lock(interest_);
  if (is_lost()) return;
  std::uint32_t events = watched_ ? EPOLLIN | EPOLLRDHUP : 0;
  // Beside rings the socket tells of the end, too, and of segments: it never holds much.
  if (stream_ && paused_.load(std::memory_order_seq_cst)) events &= ~EPOLLIN;
  if (stream_ && has_residue() && stream_->is_blocked(0)) events |= EPOLLOUT;
  home_->watch(*this, events);
}

// Without the role of reading, which others may take and give back meanwhile. A thread that wants
// input on the first connection says so, gives the role back, and then looks at `watched_`; this
// changes `watched_` and then looks which input is wanted. Of the others, the last one inside the lock
// has seen all earlier wishes.
void Link::arm_lanes() {
  const bool is_free = !reading_.load(std::memory_order_seq_cst);
  if (is_free && watched_.load(std::memory_order_seq_cst) != stream_->wants(0)) {
    set_watched(stream_->wants(0));
    if (stream_->wants(0) && !watched_.load(std::memory_order_seq_cst)) set_watched(true);
  }
  const unsigned sides = stream_->sides();
  if (sides == 0) return;
  MutexLock lock(interest_);
  if (is_lost()) return;
  const bool reads = !reading_.load(std::memory_order_seq_cst) &&
                     !paused_.load(std::memory_order_seq_cst);
  for (unsigned lane = 1; lane <= sides; ++lane) {
    std::uint32_t events = 0;
    if (!stream_->is_ending(lane)) events |= EPOLLRDHUP;
    if (reads && stream_->wants(lane)) events |= EPOLLIN;
    if (has_residue() && stream_->is_blocked(lane)) events |= EPOLLOUT;
    if (asked_[lane] == events) continue;
    asked_[lane] = events;
    home_->watch_side(*this, lane, events);
  }
}

// The rest of a buffer is not waited for; the part that has arrived counts.
void Link::on_hang_up() {
  if (!stream_ || stream_->wants(0) || !enter()) return;
  broken(LinkFailure(stream_->why_closed()));
  leave();
}

void Link::on_side(unsigned lane, std::uint32_t events) {
  if (!enter()) return;
  {
    MutexLock lock(interest_);
    asked_[lane] = 0;
  }
  if (events & EPOLLOUT) write_residue();
  stream_->mark_ready(lane);
  if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR) && !stream_->is_ending(lane)) on_side_end(lane);
  leave();
}

// If the peer has closed the first connection, too, what it sent before is read to the end. Else the
// link is lost now, after what has arrived.
void Link::on_side_end(unsigned lane) {
  stream_->mark_ending(lane);
  if (stream_->has_first_ended()) return;
  stream_->blame_side();
  broken(LinkFailure(kSideClosed));
}

void Link::join(Descriptor socket, const Keys* keys) {
  if (!stream_) throw LinkFailure("the link is no stream");
  Use use(*this);
  {
    MutexLock lock(interest_);
    if (is_lost()) throw LinkFailure(cause());
    stream_->join(std::move(socket), keys);
    home_->add_side(*this, stream_->sides());
  }
  home_->wake_sleeper();  // it may wait for what comes by this one
}

void Link::ask_for_sides(std::size_t size) {
  if (size < stream_->striping().threshold) return;
  MutexLock lock(state_);
  if (is_lost() || !asks_for_sides_.exchange(false)) return;
  home_->push({shared_from_this(), std::nullopt, {}, true});
}

}  // namespace farcall
