// How two sides come to have the memory of a link, before there is a channel.
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdint>
#include <tuple>

#include "descriptor_passing.hpp"
#include "errors.hpp"
#include "poll.hpp"
#include "ring_channel.hpp"

namespace farcall {

namespace {

// The first record on the socket, from the dialler: with the memory, or without any.
struct Offer {
  std::uint64_t magic;
  std::uint64_t size;
};

void wait_until(int fd, short events, Nanoseconds deadline) {
  pollfd waited{fd, events, 0};
  if (poll_until(&waited, 1, deadline, no_interrupt) == 0) {
    throw LinkFailure("the peer was silent when shared memory was set up");
  }
}

}  // namespace

std::shared_ptr<SharedMemory> RingChannel::set_up(const Descriptor& socket, int side,
                                                  const std::shared_ptr<MemoryBudget>& budget,
                                                  Nanoseconds deadline) {
  const SharedMemory::Plan plan{LinkMemory::first(), budget};
  Offer offer{LinkMemory::kMagic, sizeof(LinkMemory)};
  iovec vector{&offer, sizeof offer};
  alignas(cmsghdr) Control control = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  std::shared_ptr<SharedMemory> memory;
  std::uint8_t answer = 0;
  if (side == 0) {
    Descriptor descriptor;
    std::tie(memory, descriptor) = SharedMemory::create(sizeof(LinkMemory), plan);
    if (memory) {
      attach(message, control, descriptor.get());
    } else {
      offer.size = 0;
    }
    wait_until(socket.get(), POLLOUT, deadline);
    ssize_t sent = sendmsg(socket.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == ETOOMANYREFS) {  // of descriptors on their way: go on without
      memory.reset();
      offer.size = 0;
      message.msg_control = nullptr;
      message.msg_controllen = 0;
      sent = sendmsg(socket.get(), &message, MSG_NOSIGNAL);
    }
    if (sent != sizeof offer) throw_broken(errno);
    wait_until(socket.get(), POLLIN, deadline);
    const ssize_t count = recv(socket.get(), &answer, 1, 0);
    if (count == 0) throw LinkFailure(kClosed);
    if (count < 0) throw_broken(errno);
  } else {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    wait_until(socket.get(), POLLIN, deadline);
    const ssize_t count = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
    if (count == 0) throw LinkFailure(kClosed);
    if (count < 0) throw_broken(errno);
    const Descriptor descriptor = descriptor_of(message);
    if (count != sizeof offer || offer.magic != LinkMemory::kMagic) {
      throw BadFrame("the peer sent no offer of shared memory");
    }
    if (offer.size == sizeof(LinkMemory) && descriptor) {
      memory = SharedMemory::map(descriptor, sizeof(LinkMemory), plan);
    }
    answer = memory != nullptr;
    if (send(socket.get(), &answer, 1, MSG_NOSIGNAL) != 1) throw_broken(errno);
  }
  return answer != 0 ? memory : nullptr;
}

}  // namespace farcall
