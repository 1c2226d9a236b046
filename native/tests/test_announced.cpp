// Memory is taken as bytes arrive, and not as a peer announces them: the resident memory is
// measured.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "pairs.hpp"

namespace farcall::test_announced {

namespace {

constexpr std::size_t kMegabyte = 1 << 20;
// ThreadSanitizer takes several times the memory that the program does: under it only
// announcements of gigabytes would be noticed.
#ifdef __SANITIZE_THREAD__
constexpr std::size_t kTimes = 6;
#else
constexpr std::size_t kTimes = 1;
#endif

std::size_t resident() {
  std::size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// How much more there is than before.
class Growth {
 public:
  std::size_t operator()() const {
    const std::size_t after = resident();
    return after > before_ ? after - before_ : 0;
  }

 private:
  const std::size_t before_ = resident();
};

Bytes header_bytes(std::uint32_t buffers, std::uint64_t body, std::uint8_t flags = 0) {
  Header header;
  header.kind = kOneWay;
  header.flags = flags;
  header.buffer_count = buffers;
  header.body_length = body;
  const HeaderBytes bytes = encode_header(header);
  return {bytes.begin(), bytes.end()};
}

void append_number(Bytes& bytes, std::uint64_t number) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(&number);
  bytes.insert(bytes.end(), first, first + 8);
}

// A reader of two connections, and a peer that says what it likes.
struct Reading {
  Reading() {
    auto [one, other] = socket_pair();
    peer = std::move(one);
    channel = std::make_unique<StreamChannel>(std::move(other),
                                              Striping{2, kMegabyte, kMegabyte, false});
  }
  // All of it is read.
  std::optional<InFrame> say(const Bytes& bytes) {
    for (std::size_t said = 0; said < bytes.size();) {
      const std::size_t size = std::min<std::size_t>(bytes.size() - said, 32 << 10);
      CHECK(send(peer.get(), bytes.data() + said, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
      said += size;
      if (auto frame = reader.read(*channel)) return frame;
    }
    return std::nullopt;
  }

  std::shared_ptr<HeapPool> pool = std::make_shared<HeapPool>();
  FrameReader reader{kLimits, *pool};
  Descriptor peer;
  std::unique_ptr<StreamChannel> channel;
};

void test_large_body() {
  Reading reading;
  const Growth growth;
  Bytes bytes = header_bytes(0, kLimits.body);
  bytes.push_back(1);
  CHECK(!reading.say(bytes));
  CHECK(growth() < kTimes * 8 * kMegabyte);
}

void test_thousands_of_large_buffers() {
  Reading reading;
  const Growth growth;
  Bytes bytes = header_bytes(60'000, 0);
  for (int i = 0; i < 60'000; ++i) append_number(bytes, 100'000);
  bytes.push_back(1);
  CHECK(!reading.say(bytes));
  CHECK(growth() < kTimes * 8 * kMegabyte);
}

// They have nothing but their place in the table.
void test_thousands_of_empty_buffers() {
  Reading reading;
  const Bytes bytes = test_frame(kOneWay, 1, 0, 0, std::vector<std::size_t>(60'000, 0)).encoded();
  const Growth growth;
  std::vector<InFrame> frames;
  for (int i = 0; i < 20; ++i) {
    frames.push_back(*reading.say(bytes));
    CHECK(frames.back().buffers.size() == 60'000);
  }
  CHECK(growth() < kTimes * 60 * kMegabyte);
}

// Pieces far from each other, none of which may take a huge page.
void test_scattered_chunks() {
  constexpr std::uint64_t size = std::uint64_t{1} << 32, chunk = 4096;
  Reading reading;
  const Growth growth;
  Bytes bytes = header_bytes(1, 0, kStriped);
  append_number(bytes, size);
  append_number(bytes, chunk);
  for (std::uint64_t i = 0; i < 100; ++i) {
    const ChunkBytes header = encode_chunk({chunk, 1, i * 2 * kMegabyte});
    bytes.insert(bytes.end(), header.begin(), header.end());
    bytes.resize(bytes.size() + chunk, 7);
  }
  CHECK(!reading.say(bytes));
  CHECK(growth() < kTimes * 16 * kMegabyte);
}

// Neither does a record that is not whole, nor a connection on which nothing arrives.
void test_records() {
  const Growth growth;
  const Keys keys = test_keys(true);
  std::vector<std::unique_ptr<StreamChannel>> channels;
  std::vector<Descriptor> peers;
  for (int i = 0; i < 100; ++i) {
    auto [one, other] = socket_pair();
    channels.push_back(std::make_unique<StreamChannel>(std::move(one), Striping{}, &keys));
    const std::uint32_t length = kMaxPayload;
    CHECK(send(other.get(), &length, sizeof length, MSG_NOSIGNAL) == sizeof length);
    CHECK(!channels.back()->look());
    peers.push_back(std::move(other));
  }
  CHECK(growth() < 100 * (192 << 10));  // AddressSanitizer notes an eighth of what may be used
}

const TestFile kFile("test_announced", [] {
  test_large_body();
  test_thousands_of_large_buffers();
  test_thousands_of_empty_buffers();
  test_scattered_chunks();
  if (has_crypto()) test_records();
});

}  // namespace

}  // namespace farcall::test_announced
