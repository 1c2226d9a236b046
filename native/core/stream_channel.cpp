#include "stream_channel.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.hpp"
#include "poll.hpp"

namespace farcall {

namespace {

constexpr std::size_t kMaxVectors = 64;

}  // namespace

StreamChannel::StreamChannel(Descriptor socket) : Channel(std::move(socket)), buffer_(kBuffer) {}

std::size_t StreamChannel::receive(std::uint8_t* data, std::size_t size) {
  const ssize_t count = recv(socket_.get(), data, size, MSG_DONTWAIT);
  if (count > 0) return static_cast<std::size_t>(count);
  if (count < 0 && would_block(errno)) return 0;
  failure_ = count == 0 ? kClosed : "the connection broke: " + std::string(std::strerror(errno));
  buffered_.store(true, std::memory_order_relaxed);
  return 0;
}

std::size_t StreamChannel::read(std::uint8_t* data, std::size_t size) {
  if (start_ == end_) {
    if (failure_.empty() && size >= kBuffer / 4) {
      const std::size_t count = receive(data, size);
      if (count > 0 || failure_.empty()) return count;
    }
    if (!look()) return 0;
    if (start_ == end_) throw LinkFailure(failure_);
  }
  const std::size_t count = std::min(size, end_ - start_);
  std::memcpy(data, buffer_.data() + start_, count);
  start_ += count;
  buffered_.store(start_ < end_, std::memory_order_relaxed);
  return count;
}

BlockRef StreamChannel::segment(std::uint64_t, std::size_t) {
  throw BadFrame("a stream has no shared segments");
}

bool StreamChannel::look() {
  if (start_ < end_ || !failure_.empty()) return true;
  start_ = end_ = 0;
  end_ = receive(buffer_.data(), kBuffer);
  if (end_ > 0) buffered_.store(true, std::memory_order_relaxed);
  return end_ > 0 || !failure_.empty();
}

void StreamChannel::compose(const OutFrame& frame, Composed& composed) {
  lay_out(frame, {}, composed);
}

std::size_t StreamChannel::write(const Part* parts, std::size_t count) {
  iovec vectors[kMaxVectors];
  std::size_t used = 0;
  for (std::size_t i = 0; i < count && used < kMaxVectors; ++i) {
    if (parts[i].size == 0) continue;
    vectors[used].iov_base = const_cast<std::uint8_t*>(parts[i].data);
    vectors[used].iov_len = parts[i].size;
    ++used;
  }
  if (used == 0) return 0;
  msghdr message{};
  message.msg_iov = vectors;
  message.msg_iovlen = used;
  const ssize_t written = sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (written >= 0) return static_cast<std::size_t>(written);
  if (would_block(errno)) return 0;
  throw_broken(errno);
}

bool StreamChannel::wait_for_space(Nanoseconds deadline, Interrupt interrupt) {
  pollfd waited{socket_.get(), POLLOUT, 0};
  return poll_until(&waited, 1, deadline, interrupt) > 0;
}

}  // namespace farcall
