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

// The bytes that a system call has sent, by its result. Throws LinkFailure.
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

// The first stream.

std::size_t StreamChannel::receive(std::uint8_t* data, std::size_t size) {
  const ssize_t count = recv(socket_.get(), data, size, MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  if (count < 0 && would_block(errno)) return 0;
  const bool is_closed = count == 0 || further_closed_.load();
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
  for (unsigned stream = 1; stream <= joined; ++stream) {
    if (wanted >> stream & 1 && further_[stream - 1]->ready.load(std::memory_order_relaxed)) {
      return true;
    }
  }
  return false;
}

bool StreamChannel::look() {
  if (!within_stripes_.load(std::memory_order_relaxed)) return look_first();
  if (may_have_input()) return true;
  pollfd waited[kMaxStreams];
  const nfds_t count = wait_set(waited);
  if (::poll(waited, count, 0) <= 0) return false;
  const unsigned joined = further_streams();
  for (nfds_t i = 0; i < count; ++i) {
    if (waited[i].revents == 0) continue;
    if (waited[i].fd == socket_.get()) look_first();
    for (unsigned stream = 1; stream <= joined; ++stream) {
      if (waited[i].fd == stream_fd(stream)) mark_ready(stream);
    }
  }
  return may_have_input();
}

nfds_t StreamChannel::wait_set(pollfd* waited) const {
  nfds_t count = 0;
  const unsigned joined = further_streams();
  for (unsigned stream = 0; stream <= joined; ++stream) {
    if (wants(stream)) waited[count++] = {stream_fd(stream), POLLIN, 0};
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
  const unsigned joined = further_streams();
  std::uint32_t wanted = 0;
  bool any_ended = false;
  const auto from_first = [this](std::uint8_t* data, std::size_t size) {
    reading.assume();
    return read(data, size);
  };
  for (unsigned stream = 1; stream <= joined && !in_.is_complete(); ++stream) {
    FurtherStream& further = *further_[stream - 1];
    const auto from_further = [this, &further](std::uint8_t* data, std::size_t size) {
      reading.assume();
      return read_further(further, data, size);
    };
    const State state = further.ended ? State::kHeld : in_.advance(further.in, false, from_further);
    if (state == State::kInput && !further.ended) wanted |= 1u << stream;
    any_ended = any_ended || further.ended;
  }
  // After the others, whose end ends the first stream.
  if (!in_.is_complete() && in_.advance(first_, true, from_first) == State::kInput) wanted |= 1;
  if (in_.is_complete()) return true;
  if (wanted == 0 && any_ended) throw LinkFailure(why_closed());
  if (wanted == 0 && joined + 1 == striping_.streams) {
    throw BadFrame("a striped buffer is not complete, and no stream brings the rest of it");
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

std::size_t StreamChannel::read_further(FurtherStream& further, std::uint8_t* data, std::size_t size) {
  if (!further.records) return receive_further(further, data, size);
  RecordsIn& records = further.records->in;
  if (!records.is_ready()) {
    const RecordsIn::Room room = records.room();
    records.received(receive_further(further, room.data, room.size));
    if (!records.is_ready()) {
      further.ready.store(false, std::memory_order_relaxed);
      return 0;
    }
  }
  return records.take(data, size);
}

// Both workers close the first stream before the others. So the end of a further stream is the end
// of the link: expected and no news, or the first stream is still open and that is a loss. Frames
// that have arrived by the others still count, a goodbye maybe.
std::size_t StreamChannel::receive_further(FurtherStream& further, std::uint8_t* data,
                                           std::size_t size) {
  const ssize_t count = recv(further.socket.get(), data, size, MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  if (count < 0 && would_block(errno)) {
    further.ready.store(false, std::memory_order_relaxed);
    return 0;
  }
  further.ended = true;
  if (!further.in.is_between_chunks()) throw LinkFailure(kStreamClosed);
  if (!has_first_ended()) {
    blame_further();
    Channel::shut_down();  // so that the end is found behind the input that is there
  }
  return 0;
}

void StreamChannel::join(Descriptor socket, const Keys* keys) {
  const unsigned joined = further_streams();
  if (joined + 1 >= striping_.streams) throw LinkFailure("the link has all its streams");
  further_[joined] = std::make_unique<FurtherStream>(std::move(socket), records_with(keys));
  joined_.store(joined + 1, std::memory_order_seq_cst);
}

// Writing.

void StreamChannel::compose(const OutFrame& frame, Composed& composed) {
  std::vector<std::uint64_t> chunks;
  if (further_streams() > 0) {
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

StreamChannel::Written StreamChannel::write_to(unsigned stream, const Part* parts, std::size_t count) {
  const int fd = stream_fd(stream);
  if (Records* records = records_of(stream)) return write_records(records->out, fd, parts, count);
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
    stripes.begin(striped_so_far_ + 1, striping_.chunk, 1 + further_streams());
    striped_so_far_ += stripes.count();
    striped_out_.store(striped_so_far_, std::memory_order_relaxed);
  }
  bool any = false;
  std::uint32_t blocked = 0;
  for (unsigned stream = 0; stream < stripes.streams(); ++stream) {
    Part parts[2];
    if (!stripes.fill(stream, parts)) continue;
    const Written written = write_to(stream, parts, 2);
    stripes.take(stream, written.taken);
    any = any || written.any;
    if (stripes.is_pending(stream)) blocked |= 1u << stream;
  }
  blocked_.store(blocked);
  return any;
}

bool StreamChannel::wait_for_space(Nanoseconds deadline, Interrupt interrupt) {
  pollfd waited[kMaxStreams];
  nfds_t count = 0;
  const unsigned joined = further_streams();
  for (unsigned stream = 0; stream <= joined; ++stream) {
    if (is_blocked(stream)) waited[count++] = {stream_fd(stream), POLLOUT, 0};
  }
  return poll_until(waited, count, deadline, interrupt) > 0;
}

// Ending.

// The first stream first: see `receive_further`.
void StreamChannel::shut_down() {
  Channel::shut_down();
  const unsigned joined = further_streams();
  for (unsigned stream = 1; stream <= joined; ++stream) shutdown(stream_fd(stream), SHUT_RDWR);
}

// Keys are overwritten with the records.
void StreamChannel::close() {
  Channel::close();
  records_.reset();
  for (const auto& further : further_) {
    if (!further) continue;
    further->socket.reset();
    further->records.reset();
  }
}

}  // namespace farcall
