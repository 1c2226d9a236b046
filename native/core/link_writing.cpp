// Who writes on a link, and what becomes of a frame that is written in part.
#include <exception>

#include "link_parts.hpp"

namespace farcall {

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
  if (!writing_.try_take()) return false;
  bool written = false;
  try {
    written = !is_lost() && channel_->write_at_once(frame);
  } catch (const std::exception&) {
    // Who writes the other way finds out.
  }
  writing_.give_back();
  return written;
}

// Who has the role of reading gives it back before it waits for the peer, which may wait for us to
// read.
void Link::send_entered(const OutFrame& frame, Reading& reading, Nanoseconds deadline,
                        Interrupt interrupt) {
  if (is_lost()) throw LinkFailure(cause());
  if (write_at_once(frame)) return;
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
  write(frame, composed, reading, deadline, interrupt);
}

// With the role of writing, which is given back or left with a residue.
void Link::write(const OutFrame& frame, Composed& composed, Reading& reading, Nanoseconds deadline,
                 Interrupt interrupt) {
  bool any = false;
  try {
    if (is_lost()) throw LinkFailure(cause());
    if (!channel_->wait_for_room(frame, composed, 0, interrupt)) {
      reading.stop();
      if (!channel_->wait_for_room(frame, composed, deadline, interrupt)) throw NotSent();
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

}  // namespace farcall
