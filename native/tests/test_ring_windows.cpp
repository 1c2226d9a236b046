// A ring that goes on in larger windows, and back in the smallest one.
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <semaphore>
#include <thread>

#include "rings.hpp"

namespace farcall::test_ring_windows {

namespace {

// Bytes that were written and not read, of which at most so many may be read.
struct Expected {
  std::uint64_t seed = 0;
  std::deque<std::uint8_t> bytes;

  Bytes next(std::size_t size) {
    const Bytes made = pattern(size, ++seed);
    bytes.insert(bytes.end(), made.begin(), made.end());
    return made;
  }
  void check(const Bytes& read) {
    CHECK(read.size() <= bytes.size());
    CHECK(std::equal(read.begin(), read.end(), bytes.begin()));
    bytes.erase(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(read.size()));
  }
};

void test_grows_when_it_is_full() {
  Ring ring(kWindows);
  CHECK(!ring.writer.is_grown());
  CHECK(ring.write(pattern(kSize, 1)) == kSize);
  CHECK(!ring.writer.is_grown());
  CHECK(ring.write(pattern(1, 2)) == 1);
  CHECK(ring.writer.is_grown() && ring.keeper.taken[1] && !ring.keeper.taken[2]);
  // Before the reader has seen the change there is no other.
  CHECK(ring.write(pattern(2 * kSizes[1], 3)) == kSizes[1] - 1);
  CHECK(ring.write(pattern(1, 4)) == 0);
  CHECK(ring.read(kSize) == pattern(kSize, 1));
  CHECK(ring.write(pattern(1, 4)) == 0);
  CHECK(ring.read(1) == pattern(1, 2));
  CHECK(ring.write(pattern(kSizes[2], 5)) == kSizes[2]);
  CHECK(ring.keeper.taken[2]);
  Bytes rest = pattern(2 * kSizes[1], 3);
  rest.resize(kSizes[1] - 1);
  CHECK(ring.read(rest.size()) == rest);
  CHECK(ring.read(2 * kSizes[2]) == pattern(kSizes[2], 5));
}

// It takes the window that holds the next write.
void test_grows_as_far_as_needed() {
  for (std::size_t size = kSize - 1; size <= kSizes[2] + 1; size += 7) {
    Ring ring(kWindows);
    const Bytes bytes = pattern(size, size);
    CHECK(ring.writer.fits(size) == (size <= kSizes[2]));
    CHECK(ring.write(bytes) == std::min(size, kSizes[2]));
    CHECK(ring.keeper.taken[1] == (size > kSizes[0] && size <= kSizes[1]));
    CHECK(ring.keeper.taken[2] == (size > kSizes[1]));
    CHECK(
        std::equal(bytes.begin(), bytes.begin() + std::min(size, kSizes[2]), ring.read(size).begin()));
  }
}

void test_makes_do_without_memory() {
  Ring ring(1);
  CHECK(!ring.writer.fits(kSize + 1));
  CHECK(ring.write(Bytes(2 * kSize)) == kSize);
  Ring middle(2);
  CHECK(middle.write(Bytes(kSizes[2])) == kSizes[1]);
  CHECK(!middle.keeper.taken[2]);
}

void test_shrinks_when_all_is_read() {
  Ring ring(kWindows);
  CHECK(!ring.writer.shrink());
  ring.write(pattern(kSizes[2], 1));
  CHECK(ring.writer.shrink() && ring.writer.is_grown());
  ring.read(kSizes[2] - 1);
  CHECK(ring.writer.shrink() && ring.keeper.taken[2]);
  ring.read(1);
  CHECK(!ring.writer.shrink());
  CHECK(!ring.writer.is_grown() && !ring.keeper.taken[1] && !ring.keeper.taken[2]);
  CHECK(!ring.writer.shrink());
  // And it grows again: at once, or as soon as the reader has seen the change.
  CHECK(ring.writer.fits(kSizes[2]) && ring.keeper.taken[2]);
  CHECK(ring.write(pattern(kSizes[2], 4)) == kSizes[2]);
  CHECK(ring.read(kSizes[2]) == pattern(kSizes[2], 4));
  CHECK(!ring.writer.shrink());
  CHECK(ring.write(Bytes(1)) == 1);
  CHECK(!ring.writer.fits(kSize));
  CHECK(ring.read(1).size() == 1);
  CHECK(ring.write(pattern(2 * kSize, 2)) == 2 * kSize);
  CHECK(ring.read(2 * kSize) == pattern(2 * kSize, 2));
  CHECK(!ring.writer.shrink());
  CHECK(ring.write(pattern(kSize, 2)) == kSize);
  CHECK(ring.write(Bytes(1)) == 0);
  CHECK(ring.read(1).size() == 1);
  CHECK(ring.write(pattern(kSizes[1], 3)) == kSizes[1]);
  const Bytes expected = pattern(kSize, 2);
  CHECK((ring.read(kSize - 1) == Bytes(expected.begin() + 1, expected.begin() + kSize)));
  CHECK(ring.read(kSizes[2]) == pattern(kSizes[1], 3));
}

// Any order of writing, reading and shrinking.
void test_random_steps(unsigned seed) {
  std::mt19937 random(seed);
  Ring ring(kWindows);
  Expected expected;
  for (int step = 0; step < 5'000; ++step) {
    ring.keeper.windows = random() % 8 == 0 ? 1 + random() % kWindows : ring.keeper.windows;
    switch (random() % 4) {
      case 0:
      case 1: {
        const std::size_t size = random() % (random() % 4 == 0 ? 2 * kSizes[2] : kSize);
        const std::size_t room = std::min(size, ring.writer.fits(size) ? size : ring.writer.space());
        CHECK(ring.write(expected.next(room)) == room);
        break;
      }
      case 2: {
        ring.keeper.windows = kWindows;  // the reader needs no memory of its own
        const std::size_t size = random() % (random() % 4 == 0 ? 2 * kSizes[2] : kSize);
        const std::size_t count = std::min(size, expected.bytes.size());
        const Bytes bytes = ring.read(size);
        CHECK(bytes.size() == count);
        expected.check(bytes);
        break;
      }
      case 3:
        if (random() % 8 == 0 && !ring.writer.shrink()) CHECK(!ring.writer.is_grown());
        break;
    }
    CHECK(ring.reader.has_input() == !expected.bytes.empty());
  }
}

void test_changes_that_lie() {
  constexpr std::uint64_t kNoWindow = 3;
  const auto lie = [](std::uint64_t position, std::uint64_t window, std::uint64_t tail) {
    Ring ring(kWindows);
    ring.write(Bytes(20));
    CHECK(ring.read(10).size() == 10);
    ring.control.turn = position << 2 | window;
    ring.control.tail = tail;
    return ring.read(2 * kSizes[2]).size();
  };
  CHECK(lie(20, 1, 30) == 20);                                   // no lie
  CHECK(lie(20, 2, 20 + kSizes[2]) == 10 + kSizes[2]);           // nor this
  CHECK(lie(10 + kSize, 1, 10 + kSize + kSizes[1]) == kSize + kSizes[1]);  // the most there can be
  CHECK(lie(30, 1, 30) == 20);  // not yet
  CHECK_THROWS(lie(20, kNoWindow, 30), LinkFailure);
  CHECK_THROWS(lie(19, 1, 30), LinkFailure);  // where we have looked already
  CHECK_THROWS(lie(0, 1, 30), LinkFailure);
  CHECK_THROWS(lie(20, 1, 20 + kSizes[1] + 1), LinkFailure);
  CHECK_THROWS(lie(11 + kSize, 1, 20 + kSize), LinkFailure);  // more than lies in the old one
  CHECK_THROWS(lie(~std::uint64_t{0} >> 2, 2, ~std::uint64_t{0}), LinkFailure);
  // A second one before the first was reached.
  Ring ring(kWindows);
  ring.write(Bytes(20));
  ring.control.turn = 30 << 2 | 1;
  ring.control.tail = 40;
  CHECK(ring.read(25).size() == 25);
  ring.control.turn = 45 << 2 | 2;
  ring.control.tail = 50;
  CHECK_THROWS(ring.read(40), LinkFailure);
  // There is no memory for what the peer has announced.
  Ring poor(kWindows);
  poor.write(Bytes(kSize + 1));
  poor.write(Bytes(1));
  poor.keeper.windows = 1;
  CHECK_THROWS(poor.read(2 * kSize), LinkFailure);
}

// Two threads, one of which shrinks the ring now and then; both sleep whenever they may.
void test_two_threads(unsigned seed) {
  constexpr std::size_t total = 400'000;
  auto ring = std::make_unique<Ring>(kWindows);
  std::counting_semaphore<> bell(0);
  const Bytes sent = pattern(total, seed);
  std::thread writer([&] {
    std::mt19937 random(seed);
    std::size_t written = 0;
    while (written < total) {
      const std::size_t most = random() % 8 == 0 ? 2 * kSizes[2] : kSize;
      const std::size_t count = ring->writer.write(
          sent.data() + written, std::min<std::size_t>(random() % most + 1, total - written));
      written += count;
      if (ring->writer.publish() == Tell::kBell) bell.release();
      if (count == 0) CHECK(ring->writer.wait_for_space(kNever, no_interrupt));
      if (random() % 16 == 0) ring->writer.shrink();
      if (random() % 64 == 0) std::this_thread::yield();
    }
  });
  std::mt19937 random(seed + 1);
  const Bytes arrived = read_all(
      *ring, bell, total, [&] { return random() % (random() % 8 == 0 ? 2 * kSizes[2] : kSize) + 1; });
  writer.join();
  CHECK(arrived == sent);
}

const TestFile kFile("test_ring_windows", [] {
  test_grows_when_it_is_full();
  test_grows_as_far_as_needed();
  test_makes_do_without_memory();
  test_shrinks_when_all_is_read();
  for (unsigned seed = 0; seed < 50; ++seed) test_random_steps(seed);
  test_changes_that_lie();
  for (unsigned seed = 0; seed < 20; ++seed) test_two_threads(seed);
});

}  // namespace

}  // namespace farcall::test_ring_windows
