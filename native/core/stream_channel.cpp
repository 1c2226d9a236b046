#include "stream_channel.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "errors.hpp"
#include "poll.hpp"

namespace farcall {

namespace {

constexpr std::size_t kMaxVectors = 64;

// What a system call says that sends. Throws LinkFailure.
std::size_t sent_of(ssize_t sent) {
  if (sent >= 0) return static_cast<std::size_t>(sent);
  if (would_block(errno)) return 0;
  throw_broken(errno);
}

std::unique_ptr<Records> records_with(const Keys* keys) {
  return keys == nullptr ? nullptr : std::make_unique<Records>(*keys);
}

}  // namespace

StreamChannel::StreamChannel(Descriptor socket, const Striping& striping, const Keys* keys)
    : Channel(std::move(socket)),
      striping_(striping),
      records_(records_with(keys)),
      buffer_(keys == nullptr ? kBuffer : 0) {
  if (striping.streams > kMaxStreams) throw std::invalid_argument("too many streams for a link");
}

// The first connection.

std::size_t StreamChannel::receive(std::uint8_t* data, std::size_t size) {
  const ssize_t count = recv(socket_.get(), data, size, MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  if (count < 0 && would_block(errno)) return 0;
  const bool is_closed = count == 0 || side_closed_.load();
  failure_ = is_closed ? why_closed() : "the connection broke: " + std::string(std::strerror(errno));
  buffered_.store(true, std::memory_order_relaxed);
  return 0;
}

std::size_t StreamChannel::read(std::uint8_t* data, std::size_t size) {
  if (records_) return read_records(data, size);
  if (start_ == end_) {
    if (failure_.empty() && size >= kBuffer / 4) {
      const std::size_t count = receive(data, size);
      if (count > 0 || failure_.empty()) return count;
    }
    if (!look_first()) return 0;
    if (start_ == end_) throw LinkFailure(failure_);
  }
  const std::size_t count = std::min(size, end_ - start_);
  std::memcpy(data, buffer_.data() + start_, count);
  start_ += count;
  buffered_.store(start_ < end_, std::memory_order_relaxed);
  return count;
}

std::size_t StreamChannel::read_records(std::uint8_t* data, std::size_t size) {
  if (!look_first()) return 0;
  if (!has_bytes()) throw LinkFailure(failure_);
  const std::size_t count = records_->in.take(data, size);
  buffered_.store(has_bytes(), std::memory_order_relaxed);
  return count;
}

BlockRef StreamChannel::segment(std::uint64_t, std::size_t) {
  throw BadFrame("a stream has no shared segments");
}

// Opens no record: a caller that only looks is not ready for the exceptions of that.
bool StreamChannel::look_first() {
  if (has_bytes() || !failure_.empty()) return true;
  if (records_) {
    const RecordsIn::Room room = records_->in.room();
    records_->in.received(receive(room.data, room.size));
  } else {
    start_ = 0;
    end_ = receive(buffer_.data(), kBuffer);
  }
  if (has_bytes()) buffered_.store(true, std::memory_order_relaxed);
  return has_bytes() || !failure_.empty();
}

bool StreamChannel::has_first_ended() const {
  pollfd waited{socket_.get(), POLLRDHUP, 0};
  return ::poll(&waited, 1, 0) > 0;
}

// Reading from all of them.

bool StreamChannel::may_have_input() const {
  const bool buffered = buffered_.load(std::memory_order_relaxed);
  if (!within_stripes_.load(std::memory_order_relaxed)) return buffered;
  const std::uint32_t wanted = wanted_.load(std::memory_order_relaxed);
  if (buffered && wanted & 1) return true;
  const unsigned joined = joined_.load(std::memory_order_acquire);
  for (unsigned lane = 1; lane <= joined; ++lane) {
    if (wanted >> lane & 1 && sides_[lane - 1]->ready.load(std::memory_order_relaxed)) return true;
  }
  return false;
}

bool StreamChannel::look() {
  if (!within_stripes_.load(std::memory_order_relaxed)) return look_first();
  if (may_have_input()) return true;
  pollfd waited[kMaxStreams];
  const nfds_t count = wait_set(waited);
  if (::poll(waited, count, 0) <= 0) return false;
  const unsigned joined = sides();
  for (nfds_t i = 0; i < count; ++i) {
    if (waited[i].revents == 0) continue;
    if (waited[i].fd == socket_.get()) look_first();
    for (unsigned lane = 1; lane <= joined; ++lane) {
      if (waited[i].fd == side_fd(lane)) mark_ready(lane);
    }
  }
  return may_have_input();
}

nfds_t StreamChannel::wait_set(pollfd* waited) const {
  nfds_t count = 0;
  const unsigned joined = sides();
  for (unsigned lane = 0; lane <= joined; ++lane) {
    if (wants(lane)) waited[count++] = {fd_of(lane), POLLIN, 0};
  }
  return count;
}

void StreamChannel::begin_striped(std::uint8_t* data, std::uint64_t size, std::uint64_t chunk) {
  in_.begin(data, size, chunk);
  wanted_.store(kAll, std::memory_order_seq_cst);
  within_stripes_.store(true, std::memory_order_seq_cst);
}

bool StreamChannel::read_striped() {
  using State = StripesIn::State;
  const unsigned joined = sides();
  std::uint32_t wanted = 0;
  bool any_ended = false;
  const auto from_first = [this](std::uint8_t* data, std::size_t size) {
    reading.assume();
    return read(data, size);
  };
  for (unsigned lane = 1; lane <= joined && !in_.is_complete(); ++lane) {
    Side& side = *sides_[lane - 1];
    const auto from_side = [this, &side](std::uint8_t* data, std::size_t size) {
      reading.assume();
      return read_side(side, data, size);
    };
    const State state = side.ended ? State::kHeld : in_.advance(side.in, false, from_side);
    if (state == State::kInput && !side.ended) wanted |= 1u << lane;
    any_ended = any_ended || side.ended;
  }
  // After the others, whose end ends the first one.
  if (!in_.is_complete() && in_.advance(first_, true, from_first) == State::kInput) wanted |= 1;
  if (in_.is_complete()) return true;
  if (wanted == 0 && any_ended) throw LinkFailure(why_closed());
  if (wanted == 0 && joined + 1 == striping_.streams) {
    throw BadFrame("a striped buffer is not complete, and no connection brings the rest of it");
  }
  wanted_.store(wanted | kAll << (joined + 1), std::memory_order_seq_cst);
  return false;
}

bool StreamChannel::end_striped() {
  const auto from_first = [this](std::uint8_t* data, std::size_t size) {
    reading.assume();
    return read(data, size);
  };
  if (!in_.finish(first_, from_first)) {
    wanted_.store(1, std::memory_order_seq_cst);
    return false;
  }
  within_stripes_.store(false, std::memory_order_seq_cst);
  return true;
}

std::size_t StreamChannel::read_side(Side& side, std::uint8_t* data, std::size_t size) {
  if (!side.records) return receive_side(side, data, size);
  RecordsIn& records = side.records->in;
  if (!records.is_ready()) {
    const RecordsIn::Room room = records.room();
    records.received(receive_side(side, room.data, room.size));
    if (!records.is_ready()) {
      side.ready.store(false, std::memory_order_relaxed);
      return 0;
    }
  }
  return records.take(data, size);
}

// Both sides close the first connection before the others. So the end of one beside it is the end
// of the link: expected and no news, or the first one is still open and that is a loss. What has
// arrived by the others still counts, a goodbye maybe.
std::size_t StreamChannel::receive_side(Side& side, std::uint8_t* data, std::size_t size) {
  const ssize_t count = recv(side.socket.get(), data, size, MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  if (count < 0 && would_block(errno)) {
    side.ready.store(false, std::memory_order_relaxed);
    return 0;
  }
  side.ended = true;
  if (!side.in.is_between_chunks()) throw LinkFailure(kSideClosed);
  if (!has_first_ended()) {
    blame_side();
    Channel::shut_down();  // so that the end is found behind the input that is there
  }
  return 0;
}

void StreamChannel::join(Descriptor socket, const Keys* keys) {
  const unsigned joined = sides();
  if (joined + 1 >= striping_.streams) throw LinkFailure("the link has all its connections");
  sides_[joined] = std::make_unique<Side>(std::move(socket), records_with(keys));
  joined_.store(joined + 1, std::memory_order_seq_cst);
}

// Writing.

void StreamChannel::compose(const OutFrame& frame, Composed& composed) {
  std::vector<std::uint64_t> chunks;
  if (sides() > 0) {
    for (std::size_t i = 0; i < frame.buffers.size(); ++i) {
      const Part& buffer = frame.buffers[i];
      if (buffer.size < striping_.threshold || buffer.size / striping_.chunk >= kMaxChunks) continue;
      chunks.resize(frame.buffers.size());
      chunks[i] = striping_.chunk;
      composed.stripes.add(buffer);
    }
  }
  lay_out(frame, chunks, composed, kStriped);
}

StreamChannel::Written StreamChannel::write_to(unsigned lane, const Part* parts, std::size_t count) {
  const int fd = fd_of(lane);
  if (Records* records = records_of(lane)) return write_records(records->out, fd, parts, count);
  iovec vectors[kMaxVectors];
  std::size_t used = 0;
  for (std::size_t i = 0; i < count && used < kMaxVectors; ++i) {
    if (parts[i].size == 0) continue;
    vectors[used].iov_base = const_cast<std::uint8_t*>(parts[i].data);
    vectors[used].iov_len = parts[i].size;
    ++used;
  }
  if (used == 0) return {0, false};
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = used;
  const std::size_t written = sent_of(sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL));
  return {written, written > 0};
}

// The parts are the same as before, if records of them are on their way.
StreamChannel::Written StreamChannel::write_records(RecordsOut& records, int fd, const Part* parts,
                                                    std::size_t count) {
  const bool begins = records.is_empty();
  if (begins) records.seal(parts, count);
  const Part rest = records.rest();
  if (rest.size == 0) return {0, false};
  const std::size_t written = sent_of(send(fd, rest.data, rest.size, MSG_DONTWAIT | MSG_NOSIGNAL));
  return {records.sent(written), begins || written > 0};
}

bool StreamChannel::write_some(Composed& composed) {
  if (!composed.parts.empty()) {
    blocked_.store(1);
    const Written written = write_to(0, composed.parts.data(), composed.parts.size());
    composed.take(written.taken);
    return written.any;
  }
  StripesOut& stripes = composed.stripes;
  if (!stripes.has_begun()) {
    stripes.begin(striped_so_far_ + 1, striping_.chunk, 1 + sides());
    striped_so_far_ += stripes.count();
    striped_out_.store(striped_so_far_, std::memory_order_relaxed);
  }
  bool any = false;
  std::uint32_t blocked = 0;
  for (unsigned lane = 0; lane < stripes.lanes(); ++lane) {
    Part parts[2];
    if (!stripes.fill(lane, parts)) continue;
    const Written written = write_to(lane, parts, 2);
    stripes.take(lane, written.taken);
    any = any || written.any;
    if (stripes.is_pending(lane)) blocked |= 1u << lane;
  }
  blocked_.store(blocked);
  return any;
}

bool StreamChannel::wait_for_space(Nanoseconds deadline, Interrupt interrupt) {
  pollfd waited[kMaxStreams];
  nfds_t count = 0;
  const unsigned joined = sides();
  for (unsigned lane = 0; lane <= joined; ++lane) {
    if (is_blocked(lane)) waited[count++] = {fd_of(lane), POLLOUT, 0};
  }
  return poll_until(waited, count, deadline, interrupt) > 0;
}

// Ending.

// The first one first: see `receive_side`.
void StreamChannel::shut_down() {
  Channel::shut_down();
  const unsigned joined = sides();
  for (unsigned lane = 1; lane <= joined; ++lane) shutdown(side_fd(lane), SHUT_RDWR);
}

// Keys are overwritten with the records.
void StreamChannel::close() {
  Channel::close();
  records_.reset();
  for (const auto& side : sides_) {
    if (!side) continue;
    side->socket.reset();
    side->records.reset();
  }
}

}  // namespace farcall
