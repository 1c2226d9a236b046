// Writing on a link, and the fate of a frame that is written in part.
#include <exception>

#include "link_parts.hpp"

namespace farcall {

// The role.

bool Link::wait_to_write(Nanoseconds deadline, Interrupt interrupt) {
  if (!writing_.take(deadline, interrupt)) return false;
  channel_->writing.begin();
  return true;
}

void Link::offer_residue() {
  channel_->writing.end();  // before another thread takes it
  residue_waits_.store(true, std::memory_order_seq_cst);
  if (is_lost() && take_residue()) end_residue();
}

void Link::end_residue() {
  residue_ = Composed{};
  if (has_residue_.exchange(false)) update_interest();
  stop_writing();
}

// Sending.

bool Link::may_send(const OutFrame& frame) const { return frame.is_within(home_->sending()); }

void Link::send(const OutFrame& frame, Nanoseconds deadline, Interrupt interrupt) {
  Use use(*this);
  Reading reading(*this);
  send_entered(frame, reading, deadline, interrupt);
}

bool Link::send_at_once(const OutFrame& frame) {
  if (!enter()) return false;
  const bool sent = write_at_once(frame);
  leave();
  return sent;
}

bool Link::write_at_once(const OutFrame& frame) {
  if (!try_to_write()) return false;
  bool written = false;
  try {
    written = !is_lost() && channel_->write_at_once(frame);
  } catch (const std::exception&) {
    // The caller's next attempt, by `send`, meets the error again.
  }
  stop_writing();
  return written;
}

// A thread that has the role of reading gives it back before it waits for the peer, which may wait
// for us to read.
void Link::send_entered(const OutFrame& frame, Reading& reading, Nanoseconds deadline,
                        Interrupt interrupt) {
  if (is_lost()) throw LinkFailure(loss_cause());
  if (write_at_once(frame)) return;
  for (const Part& buffer : frame.buffers) note_buffer(buffer.size);
  Composed composed;
  try {
    channel_->compose(frame, composed);
    if (!try_to_write()) {
      reading.stop();
      if (!wait_to_write(deadline, interrupt)) throw NotSent();
    }
  } catch (...) {
    channel_->discard(composed);
    throw;
  }
  write(frame, composed, reading, deadline, interrupt);
}

// Gives the role of writing back, or leaves it with a residue.
void Link::write(const OutFrame& frame, Composed& composed, Reading& reading, Nanoseconds deadline,
                 Interrupt interrupt) {
  bool any = false;
  try {
    if (is_lost()) throw LinkFailure(loss_cause());
    if (!channel_->wait_for_room(frame, composed, 0, interrupt)) {
      reading.stop();
      if (!channel_->wait_for_room(frame, composed, deadline, interrupt)) throw NotSent();
    }
    while (!composed.is_written()) {
      if (channel_->write_some(composed)) {
        any = true;
        continue;
      }
      if (is_lost()) throw LinkFailure(loss_cause());
      reading.stop();
      if (!channel_->wait_for_space(deadline, interrupt)) {
        if (!any) throw NotSent();
        throw TimedOut();
      }
    }
    channel_->sent(composed);
  } catch (const LinkFailure& error) {
    stop_writing();
    throw broken(error);
  } catch (...) {
    if (any) {
      leave_residue(composed);
    } else {
      channel_->discard(composed);
      stop_writing();
    }
    throw;
  }
  stop_writing();
}

// The peer gets the rest of the frame from the endpoint's thread.
void Link::leave_residue(Composed& composed) {
  channel_->sent(composed);
  try {
    composed.own();
  } catch (const std::bad_alloc&) {
    fail("no memory for the rest of a frame");
    end_residue();
    return;
  }
  residue_ = std::move(composed);
  has_residue_.store(true, std::memory_order_seq_cst);
  offer_residue();
  update_interest();
  home_->wake_sleeper();
}

void Link::write_residue() {
  if (!enter()) return;
  if (take_residue()) {
    const bool first_was_blocked = streams_ && streams_->is_blocked(0);
    bool is_over = true;
    try {
      while (!residue_.is_written() && !is_lost() && channel_->write_some(residue_)) {
      }
      is_over = residue_.is_written();
    } catch (const LinkFailure& error) {
      broken(error);
    }
    if (is_over) {
      end_residue();
    } else {
      const bool changed = streams_ && streams_->is_blocked(0) != first_was_blocked;
      offer_residue();
      if (changed) update_interest();
    }
  }
  leave();
}

// Writing failed. Frames that the peer sent before it went, a goodbye maybe, still count.
LinkFailure Link::broken(const LinkFailure& error) {
  cut_ = true;
  channel_->shut_down();  // so that the reading thread finds the end
  read_all();
  return is_lost() ? LinkFailure(loss_cause()) : error;
}

}  // namespace farcall
