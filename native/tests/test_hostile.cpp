// What a peer can send beside the rings, and when they are set up. `fuzz_ring.cpp` tries the rest.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "descriptors.hpp"
#include "pairs.hpp"
#include "sides.hpp"

using namespace farcall;

namespace {

struct Record {
  std::uint32_t type = 1;
  std::uint32_t slot = 0;
  std::uint64_t serial = 0;
  std::uint64_t size = 0;
};

// As many descriptors as there are names of them.
void send_bytes(const Descriptor& socket, const void* data, std::size_t size,
                const std::vector<int>& descriptors = {}) {
  iovec vector{const_cast<void*>(data), size};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const std::size_t length = descriptors.size() * sizeof(int);
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(length);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(length);
    std::memcpy(CMSG_DATA(header), descriptors.data(), length);
  }
  CHECK(sendmsg(socket.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
}

void test_records() {
  {
    Side victim;
    const Record bell;
    send_bytes(victim.peer, &bell, sizeof bell);
    victim.channel->on_readable();
    send_bytes(victim.peer, &bell, sizeof bell - 1);
    CHECK_THROWS(victim.channel->on_readable(), BadFrame);
  }
  for (const Record record : {Record{0, 0, 0, 0}, Record{3, 0, 0, 0}, Record{2, 1024, 1, 0},
                              Record{2, 0, 1, 4096}, Record{2, 0, 1, ~std::uint64_t{0}}}) {
    Side victim;
    send_bytes(victim.peer, &record, sizeof record);
    CHECK_THROWS(victim.channel->on_readable(), BadFrame);
  }
  Side victim;
  victim.peer.reset();
  victim.channel->on_readable();
  std::uint8_t byte;
  CHECK_THROWS(victim.channel->read(&byte, 1), LinkFailure);
}

void test_descriptors_are_closed() {
  Side victim;
  const Descriptor any(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::size_t before = count_descriptors();
  for (const std::uint32_t type : {1u, 2u, 3u}) {
    for (std::size_t count = 1; count <= 8; ++count) {
      const Record record{type, 0, 0, 0};
      send_bytes(victim.peer, &record, sizeof record, std::vector<int>(count, any.get()));
      try {
        victim.channel->on_readable();
      } catch (const BadFrame&) {
      }
      CHECK(count_descriptors() == before);
    }
  }
}

void test_offers() {
  struct Offer {
    std::uint64_t magic = LinkMemory::kMagic;
    std::uint64_t size = sizeof(LinkMemory);
  } offer;
  const auto [memory, descriptor] = SharedMemory::create(sizeof(LinkMemory));
  const Descriptor small = SharedMemory::create(4096).second;
  const std::size_t before = count_descriptors();
  const auto answer = [&](const Offer& offered, std::size_t size, const std::vector<int>& descriptors) {
    auto [ours, theirs] = socket_pair();
    send_bytes(theirs, &offered, size, descriptors);
    return RingChannel::set_up(ours, 1, nullptr, patient());
  };
  CHECK(answer(offer, sizeof offer, {descriptor.get()}));
  // The stream has to do.
  CHECK(!answer(offer, sizeof offer, {}));
  CHECK(!answer(offer, sizeof offer, {small.get()}));
  CHECK(!answer({LinkMemory::kMagic, 0}, sizeof offer, {}));
  CHECK(!answer({LinkMemory::kMagic, 4096}, sizeof offer, {small.get()}));
  // This is no peer.
  CHECK_THROWS(answer({1, sizeof(LinkMemory)}, sizeof offer, {descriptor.get()}), BadFrame);
  CHECK_THROWS(answer(offer, 3, {descriptor.get(), descriptor.get(), descriptor.get()}), BadFrame);
  for (const int side : {0, 1}) {
    auto [ours, theirs] = socket_pair();
    CHECK_THROWS(RingChannel::set_up(ours, side, nullptr, now() + kMillisecond), LinkFailure);  // silence
    theirs.reset();
    CHECK_THROWS(RingChannel::set_up(ours, side, nullptr, patient()), LinkFailure);
  }
  CHECK(count_descriptors() == before);
}

// A link whose peer lies is lost, and says why; its other threads are woken.
void test_lies_cost_the_link() {
  Pair pair(Kind::kRings);
  std::thread caller([&] {
    CHECK_THROWS(call(*pair.left, test_frame(kRequest, 1, 0, 0)), LinkFailure);
  });
  const TestFrame large = test_frame(kOneWay, 1, 1, 8 << 20);
  std::thread writer([&] { CHECK_THROWS(pair.left->send(large.out(), patient(), no_interrupt), LinkFailure); });
  pair.await_full(0);
  pair.shared().controls[0].head = ~std::uint64_t{0};
  writer.join();
  caller.join();
  const Event event = next_event(*pair.left_home);
  CHECK(!event.frame && !event.cause.empty());
}

}  // namespace

int main() {
  test_records();
  test_descriptors_are_closed();
  test_offers();
  test_lies_cost_the_link();
}
