// Which of its streams a link is told about, and by whom; and how further streams join.
//
// epoll watches the first stream for as long as the endpoint's thread is to read or write there.
// Of the others it tells once and has to be asked again, for their end, for what a residue waits for,
// and for input where it is wanted and no thread has the role of reading. Within stripes, a thread
// that gives that role back asks (`give_role_back`), and the endpoint's thread does before it sleeps.
// So there is always a reader, or epoll was asked, or it has told: then the endpoint's thread marks
// the stream (`on_stream`), and looks at its links before it sleeps.
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
  if (streams_ && paused_.load(std::memory_order_seq_cst)) events &= ~EPOLLIN;
  if (streams_ && has_residue() && streams_->is_blocked(0)) events |= EPOLLOUT;
  home_->watch(*this, events);
}

// Without the role of reading, which others may take and give back meanwhile. A thread that wants
// input on the first stream says so, gives the role back, and then looks at `watched_`; this
// changes `watched_` and then looks which input is wanted. Of the others, the last one inside the lock
// has seen all earlier wishes.
void Link::arm_streams() {
  const bool is_free = !reading_.load(std::memory_order_seq_cst);
  if (is_free && watched_.load(std::memory_order_seq_cst) != streams_->wants(0)) {
    set_watched(streams_->wants(0));
    if (streams_->wants(0) && !watched_.load(std::memory_order_seq_cst)) set_watched(true);
  }
  const unsigned count = streams_->further_streams();
  if (count == 0) return;
  MutexLock lock(interest_);
  if (is_lost()) return;
  const bool reads = !reading_.load(std::memory_order_seq_cst) &&
                     !paused_.load(std::memory_order_seq_cst);
  for (unsigned stream = 1; stream <= count; ++stream) {
    std::uint32_t events = 0;
    if (!streams_->is_ending(stream)) events |= EPOLLRDHUP;
    if (reads && streams_->wants(stream)) events |= EPOLLIN;
    if (has_residue() && streams_->is_blocked(stream)) events |= EPOLLOUT;
    if (asked_[stream] == events) continue;
    asked_[stream] = events;
    home_->watch_stream(*this, stream, events);
  }
}

// The rest of a buffer is not waited for; the part that has arrived counts.
void Link::on_hang_up() {
  if (!streams_ || streams_->wants(0) || !enter()) return;
  broken(LinkFailure(streams_->why_closed()));
  leave();
}

void Link::on_stream(unsigned stream, std::uint32_t events) {
  if (!enter()) return;
  {
    MutexLock lock(interest_);
    asked_[stream] = 0;
  }
  if (events & EPOLLOUT) write_residue();
  streams_->mark_ready(stream);
  if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR) && !streams_->is_ending(stream)) {
    on_stream_end(stream);
  }
  leave();
}

// If the peer has closed the first stream, too, what it sent before is read to the end. Else the
// link is lost now, after what has arrived.
void Link::on_stream_end(unsigned stream) {
  streams_->mark_ending(stream);
  if (streams_->has_first_ended()) return;
  streams_->blame_further();
  broken(LinkFailure(kStreamClosed));
}

void Link::join(Descriptor socket, const Keys* keys) {
  if (!streams_) throw LinkFailure("the link can have no further streams");
  Use use(*this);
  {
    MutexLock lock(interest_);
    if (is_lost()) throw LinkFailure(loss_cause());
    streams_->join(std::move(socket), keys);
    home_->add_stream(*this, streams_->further_streams());
  }
  home_->wake_sleeper();  // it may wait for what comes by this one
}

void Link::ask_for_streams(std::size_t size) {
  if (size < streams_->striping().threshold) return;
  MutexLock lock(state_);
  if (is_lost() || !asks_for_streams_.exchange(false)) return;
  home_->push({shared_from_this(), std::nullopt, {}, true});
}

}  // namespace farcall
