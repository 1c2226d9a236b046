// Messages of a hostile peer beside the rings, and when they are set up. `fuzz_ring.cpp` tries the
// rest.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "descriptors.hpp"
#include "pairs.hpp"
#include "sides.hpp"

namespace farcall::test_hostile {

namespace {

struct Record {
  std::uint32_t type = 1;
  std::uint32_t slot = 0;
  std::uint64_t serial = 0;
  std::uint64_t size = 0;
};

constexpr std::size_t kMostDescriptors = 253;  // that the system takes with one message

// As many descriptors as there are names of them.
void send_bytes(const Descriptor& socket, const void* data, std::size_t size,
                const std::vector<int>& descriptors = {}) {
  iovec vector{const_cast<void*>(data), size};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
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
    for (const std::size_t count : {1, 2, 3, 8, 253}) {
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
    CHECK_THROWS(RingChannel::set_up(ours, side, nullptr, now() + kMillisecond),
                 LinkFailure);  // silence
    theirs.reset();
    CHECK_THROWS(RingChannel::set_up(ours, side, nullptr, patient()), LinkFailure);
  }
  CHECK(count_descriptors() == before);
}

struct Named {
  const char* name;
  Descriptor descriptor;
};

// Descriptors that a peer may send in place of a sealed file of `size` bytes in memory.
std::vector<Named> wrong_files(std::size_t size) {
  std::vector<Named> files;
  const auto add = [&](const char* name, int descriptor) {
    files.push_back({name, Descriptor(descriptor)});
    return descriptor;
  };
  const auto in_memory = [&](const char* name, std::size_t length, unsigned flags, int seals,
                             bool is_whole) {
    const int file = add(name, memfd_create(name, MFD_CLOEXEC | flags));
    if (file < 0) return file;  // a system without huge pages
    CHECK(ftruncate(file, static_cast<off_t>(length)) == 0);
    if (is_whole) CHECK(posix_fallocate(file, 0, static_cast<off_t>(length)) == 0);
    if (seals != 0) CHECK(fcntl(file, F_ADD_SEALS, seals) == 0);
    return file;
  };
  const int good = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  in_memory("without seals", size, 0, 0, true);
  in_memory("sealed against growing only", size, MFD_ALLOW_SEALING, F_SEAL_GROW, true);
  in_memory("sealed against writing", size, MFD_ALLOW_SEALING, good | F_SEAL_WRITE, true);
  in_memory("with holes", size, MFD_ALLOW_SEALING, good, false);
  in_memory("too small", size - 4096, MFD_ALLOW_SEALING, good, true);
  in_memory("too large", size + 4096, MFD_ALLOW_SEALING, good, true);
  in_memory("empty", 0, MFD_ALLOW_SEALING, good, false);
  in_memory("of huge pages", 2 << 20, MFD_ALLOW_SEALING | MFD_HUGETLB, good, false);
  const int file = in_memory("as it should be, but for a path only", size, MFD_ALLOW_SEALING, good,
                             true);
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  const int path_only = open(path.c_str(), O_PATH | O_CLOEXEC);
  const int read_only = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  files.back().descriptor.reset();
  add("a path only", path_only);
  add("that can't be written", read_only);
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  add("a pipe to read", ends[0]);
  add("a pipe to write", ends[1]);
  add("zeros", open("/dev/zero", O_RDWR | O_CLOEXEC));
  add("a folder", open("/dev/shm", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  add("a file of a tmpfs", open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  add("a file of a disk", open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  add("an event", eventfd(0, EFD_CLOEXEC));
  add("a socket", socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return files;
}

// Whatever is sent in place of a segment is refused, and closed.
void test_files_that_are_no_segments() {
  const std::size_t size = kSmallestSegment;
  for (const Named& file : wrong_files(size)) {
    if (!file.descriptor) continue;
    const std::size_t before = count_descriptors();
    {
      Side victim;
      const Record record{2, 0, 1, size};
      send_bytes(victim.peer, &record, sizeof record, {file.descriptor.get()});
      CHECK_THROWS(victim.channel->on_readable(), BadFrame);
    }
    CHECK(count_descriptors() == before);
  }
  for (const Named& file : wrong_files(sizeof(LinkMemory))) {
    if (file.descriptor) CHECK(!SharedMemory::map(file.descriptor, sizeof(LinkMemory)));
  }
}

// Pages of such a file that the system has no more of kill the process that touches them.
void test_huge_pages_are_no_memory_to_share() {
  const Descriptor huge(memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB));
  if (huge) CHECK(!status_in_memory(huge));
  const Descriptor ordinary(memfd_create("test", MFD_CLOEXEC));
  CHECK(status_in_memory(ordinary)->st_size == 0);
}

// A peer that makes segments without end leaves this process mappings for everything else.
void test_many_segments_leave_mappings_for_the_program() {
  const std::size_t most = 8 * SharedMemory::count_limit();
  std::vector<std::shared_ptr<SharedMemory>> mapped;
  const Descriptor descriptor = SharedMemory::create(4096).second;
  while (auto memory = SharedMemory::map(descriptor, 4096)) {
    mapped.push_back(std::move(memory));
    CHECK(mapped.size() <= most);
  }
  CHECK(mapped.size() + 10 > most);
  mapped.pop_back();
  CHECK(SharedMemory::map(descriptor, 4096));
}

// A link whose peer lies is lost, and says why; its other threads are woken.
void test_lies_cost_the_link() {
  Pair pair(Kind::kRings);
  std::thread caller(
      [&] { CHECK_THROWS(call(*pair.left, test_frame(kRequest, 1, 0, 0)), LinkFailure); });
  const TestFrame large = test_frame(kOneWay, 1, 1, 8 << 20);
  std::thread writer(
      [&] { CHECK_THROWS(pair.left->send(large.out(), patient(), no_interrupt), LinkFailure); });
  pair.await_full(0);
  pair.shared().controls[0].head = ~std::uint64_t{0};
  writer.join();
  caller.join();
  const Event event = next_event(*pair.left_home);
  CHECK(!event.frame && !event.cause.empty());
}

const TestFile kFile("test_hostile", [] {
  test_records();
  test_descriptors_are_closed();
  test_offers();
  test_files_that_are_no_segments();
  test_huge_pages_are_no_memory_to_share();
  test_many_segments_leave_mappings_for_the_program();
  test_lies_cost_the_link();
});

}  // namespace

}  // namespace farcall::test_hostile
