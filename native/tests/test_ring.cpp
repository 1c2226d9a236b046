#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <semaphore>
#include <thread>

#include "rings.hpp"
#include "signals.hpp"

namespace farcall::test_ring {

namespace {

// Each size at each place of the ring.
void test_wrap_around() {
  Ring ring;
  for (std::size_t size = 0; size <= kSize; ++size) {
    for (const std::size_t step : {std::size_t{1}, std::size_t{77}}) {
      const Bytes bytes = pattern(size, size + step);
      CHECK(ring.write(bytes) == size);
      CHECK(ring.reader.has_input() == (size > 0));
      CHECK(ring.read(size) == bytes);
      CHECK(ring.write(Bytes(step)) == step && ring.read(kSize).size() == step);
      CHECK(!ring.reader.has_input());
    }
  }
}

void test_full() {
  Ring ring;
  const Bytes bytes = pattern(kSize + 10, 1);
  CHECK(ring.writer.space() == kSize);
  CHECK(ring.write(bytes) == kSize);
  CHECK(ring.writer.space() == 0);
  CHECK(ring.write(bytes) == 0);
  CHECK(ring.writer.written() == kSize && ring.writer.read_by_peer() == 0);
  CHECK(!ring.writer.wait_for_space(0, no_interrupt));
  CHECK((ring.read(100) == Bytes(bytes.begin(), bytes.begin() + 100)));
  CHECK(ring.writer.space() == 100);
  CHECK(!ring.writer.wait_for_space(0, no_interrupt));  // half of it has to be free
  CHECK(ring.writer.wait_for_progress(0, 0, no_interrupt));
  CHECK(!ring.writer.wait_for_progress(100, 0, no_interrupt));
  CHECK((ring.read(kSize) == Bytes(bytes.begin() + 100, bytes.begin() + kSize)));
  CHECK(ring.writer.wait_for_space(0, no_interrupt));
}

void test_unpublished_is_unseen() {
  Ring ring;
  const Bytes bytes(10);
  CHECK(ring.writer.write(nullptr, 0) == 0);
  ring.writer.write(bytes.data(), 10);
  CHECK(!ring.reader.has_input() && ring.read(10).empty());
  ring.writer.publish();
  Bytes out(kSize);
  CHECK(ring.reader.read(out.data(), kSize) == 10);
  CHECK(ring.writer.space() == kSize - 10);  // until the reader publishes
  ring.reader.publish();
  CHECK(ring.writer.space() == kSize);
}

void test_bells() {
  Ring ring;
  const Bytes bytes(200);
  CHECK(ring.reader.arm());
  ring.writer.write(bytes.data(), 10);
  CHECK(ring.writer.publish() == Tell::kBell);
  ring.writer.write(bytes.data(), 10);
  CHECK(ring.writer.publish() == Tell::kNobody);  // once
  CHECK(!ring.reader.arm());
  ring.reader.disarm();
  ring.writer.write(bytes.data(), 200);
  CHECK(ring.writer.publish() == Tell::kNobody);
  // The other way: when half is free, not before.
  CHECK(!ring.writer.ask_for_bell());
  Bytes out(kSize);
  ring.reader.read(out.data(), 50);
  CHECK(ring.reader.publish() == Tell::kNobody);
  ring.reader.read(out.data(), 50);
  CHECK(ring.reader.publish() == Tell::kBell);
  ring.reader.read(out.data(), 50);
  CHECK(ring.reader.publish() == Tell::kNobody);
  CHECK(ring.writer.ask_for_bell());
}

void test_positions_that_lie() {
  constexpr std::uint64_t max = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint64_t tail : {std::uint64_t{19}, std::uint64_t{0}, std::uint64_t{20 + kSize + 1},
                                   max, std::uint64_t{1} << 63}) {
    Ring ring;
    ring.write(Bytes(20));
    CHECK(ring.read(20).size() == 20);
    ring.control.tail = tail;
    CHECK_THROWS(ring.read(1), LinkFailure);
  }
  for (const std::uint64_t head : {std::uint64_t{9}, std::uint64_t{21}, max, std::uint64_t{1} << 63}) {
    Ring ring;
    ring.write(Bytes(20));
    ring.read(10);
    CHECK(ring.writer.space() == kSize - 10);
    ring.control.head = head;
    CHECK_THROWS(ring.writer.space(), LinkFailure);
    CHECK_THROWS(ring.writer.wait_for_space(kNever, no_interrupt), LinkFailure);
    CHECK_THROWS(ring.writer.ask_for_bell(), LinkFailure);
  }
  // A lie that is as good as the truth: data that was not written, but lies in the ring.
  Ring ring;
  ring.control.tail = kSize;
  CHECK(ring.read(2 * kSize) == Bytes(kSize));
  // Each side ignores what the peer does to its own position.
  ring.control.head = 3;
  ring.control.tail = 5;
  CHECK_THROWS(ring.read(1), LinkFailure);
}

void test_interrupt() {
  Ring ring;
  ring.write(Bytes(kSize));
  interrupt_until_thrown([&] {
    while (ring.writer.wait_for_progress(0, kNever, stop)) {
    }
  });
  CHECK(ring.read(kSize).size() == kSize);  // and nothing is broken
  CHECK(ring.write(Bytes(kSize)) == kSize);
}

// Two threads, sleeping whenever they may, for as long as it takes to lose a wake-up if one can be.
void test_two_threads(unsigned seed) {
  constexpr std::size_t total = 200'000;
  auto ring = std::make_unique<Ring>();
  std::counting_semaphore<> bell(0);
  const Bytes sent = pattern(total, seed);
  std::thread writer([&] {
    std::mt19937 random(seed);
    std::size_t written = 0;
    while (written < total) {
      const std::size_t count = ring->writer.write(
          sent.data() + written, std::min<std::size_t>(random() % 300 + 1, total - written));
      written += count;
      if (ring->writer.publish() == Tell::kBell) bell.release();
      if (count == 0) CHECK(ring->writer.wait_for_space(kNever, no_interrupt));
      if (random() % 64 == 0) std::this_thread::yield();
    }
  });
  std::mt19937 random(seed + 1);
  const Bytes arrived = read_all(*ring, bell, total, [&] { return random() % 300 + 1; });
  writer.join();
  CHECK(arrived == sent);
}

const TestFile kFile("test_ring", [] {
  test_wrap_around();
  test_full();
  test_unpublished_is_unseen();
  test_bells();
  test_positions_that_lie();
  test_interrupt();
  for (unsigned seed = 0; seed < 20; ++seed) test_two_threads(seed);
});

}  // namespace

}  // namespace farcall::test_ring
