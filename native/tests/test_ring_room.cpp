// How much shared memory a link takes: bytes that its peer has not read, and mappings that are kept.
#include <cstring>

#include "pairs.hpp"
#include "sides.hpp"

namespace farcall::test_ring_room {

namespace {

constexpr std::size_t kSize = kSmallestSegment;

TestFrame large(std::uint64_t call_id) { return test_frame(kOneWay, call_id, 10, 10, {kSize}); }

// Bytes in segments may be as many as three of these frames have.
RingBounds three() {
  RingBounds bounds;
  bounds.on_their_way = 3 * kSize;
  return bounds;
}

void check_next(Endpoint& endpoint, const TestFrame& frame) {
  const Event event = next_event(endpoint);
  CHECK(event.frame && frame == *event.frame);
}

void test_waits_until_the_peer_has_read() {
  Pair pair(Kind::kRings, 0, three());
  for (std::uint64_t i = 0; i < 3; ++i) pair.left->send(large(i).out(), 0, no_interrupt);
  CHECK_THROWS(pair.left->send(large(9).out(), 0, no_interrupt), NotSent);
  CHECK_THROWS(pair.left->send(large(9).out(), now() + kMillisecond, no_interrupt), NotSent);
  const TestFrame small = test_frame(kOneWay, 3, 10, kSize, {});
  pair.left->send(small.out(), 0, no_interrupt);  // needs no room
  std::thread sender([&] { pair.left->send(large(4).out(), patient(), no_interrupt); });
  pair.await_full(0);
  for (std::uint64_t i = 0; i < 3; ++i) check_next(*pair.right_home, large(i));
  check_next(*pair.right_home, small);
  sender.join();
  check_next(*pair.right_home, large(4));
}

// The peer reads as little as one frame: there is room for one more.
void test_room_for_one() {
  Pair pair(Kind::kRings, 0, three());
  for (std::uint64_t i = 0; i < 3; ++i) pair.left->send(large(i).out(), 0, no_interrupt);
  for (std::uint64_t i = 0; i < 20; ++i) {
    CHECK_THROWS(pair.left->send(large(9).out(), 0, no_interrupt), NotSent);
    check_next(*pair.right_home, large(i));
    pair.left->send(large(i + 3).out(), 0, no_interrupt);
  }
}

void test_frame_that_is_larger_than_all_room_goes_alone() {
  Pair pair(Kind::kRings, 0, three());
  const TestFrame huge = test_frame(kOneWay, 1, 10, 10, {kSize, 5 * kSize});
  pair.left->send(huge.out(), 0, no_interrupt);
  CHECK_THROWS(pair.left->send(large(2).out(), 0, no_interrupt), NotSent);
  check_next(*pair.right_home, huge);
  pair.left->send(large(2).out(), 0, no_interrupt);
  CHECK_THROWS(pair.left->send(huge.out(), 0, no_interrupt), NotSent);
  check_next(*pair.right_home, large(2));
  pair.left->send(huge.out(), 0, no_interrupt);
  check_next(*pair.right_home, huge);
}

// The link is lost while a sender waits for room: by the peer, and by us.
void test_wait_ends_with_the_link() {
  for (const bool by_peer : {true, false}) {
    Pair pair(Kind::kRings, 0, three());
    for (std::uint64_t i = 0; i < 3; ++i) pair.left->send(large(i).out(), 0, no_interrupt);
    std::thread sender(
        [&] { CHECK_THROWS(pair.left->send(large(4).out(), kNever, no_interrupt), LinkFailure); });
    pair.await_full(0);
    (by_peer ? pair.right : pair.left)->fail("the test ends it");
    sender.join();
  }
}

Composed composed_by(Side& side, const TestFrame& frame) {
  Composed composed;
  side.channel->compose(frame.out(), composed);
  return composed;
}

// Threads compose before they have the role of writing. The room that they fill meanwhile counts.
void test_what_is_composed_counts() {
  Side side(three());
  std::vector<TestFrame> frames;
  std::vector<Composed> composed;
  for (std::uint64_t i = 0; i < 4; ++i) frames.push_back(large(i));
  const std::size_t before = SharedMemory::count();
  for (const TestFrame& frame : frames) composed.push_back(composed_by(side, frame));
  for (std::size_t i = 0; i < 3; ++i) CHECK(composed[i].in_segments == kSize);
  CHECK(composed[3].parts.empty() && composed[3].in_segments == 0);
  CHECK(SharedMemory::count() == before + 3);
  // It does not go, so the next may be composed early again.
  side.channel->discard(composed[2]);
  CHECK(composed_by(side, frames[3]).in_segments == kSize);
  side.channel->discard(composed[3]);  // nothing
  CHECK(composed_by(side, frames[3]).parts.empty());
  // The holder of the role of writing never waits for threads that wait for it.
  CHECK(side.channel->wait_for_room(frames[3].out(), composed[3], 0, no_interrupt));
  CHECK(composed[3].in_segments == kSize);
  // Nor does it wait in vain for what it has sent itself.
  side.channel->write(composed[3].parts.data(), composed[3].parts.size());
  side.channel->sent(composed[3]);
  Composed next = composed_by(side, frames[2]);
  CHECK(!side.channel->wait_for_room(frames[2].out(), next, 0, no_interrupt));
  CHECK(next.parts.empty());
}

// Many threads wait for a peer that has stopped reading, and then all are served.
void test_many_senders() {
  constexpr std::uint64_t kSenders = 12;
  Pair pair(Kind::kRings, 0, three());
  Server writer(pair.left_home, [](Event&) {});
  const TestFrame stuck = test_frame(kOneWay, 99, 10, 3 << 20);
  CHECK_THROWS(pair.left->send(stuck.out(), 0, no_interrupt), TimedOut);  // the role is taken
  const std::size_t before = SharedMemory::count();
  std::vector<TestFrame> frames;
  for (std::uint64_t i = 0; i < kSenders; ++i) frames.push_back(large(i));
  std::vector<std::thread> threads;
  for (const TestFrame& frame : frames) {
    threads.emplace_back([&] { pair.left->send(frame.out(), patient(), no_interrupt); });
  }
  check_next(*pair.right_home, stuck);
  std::vector<bool> arrived(kSenders);
  for (std::uint64_t i = 0; i < kSenders; ++i) {
    const Event event = next_event(*pair.right_home);
    const std::uint64_t id = event.frame->call_id;
    CHECK(id < kSenders && !arrived[id] && frames[id] == *event.frame);
    arrived[id] = true;
  }
  for (std::thread& thread : threads) thread.join();
  // Three, one that is late, and one that was read and is looked at; each is mapped twice.
  CHECK(SharedMemory::count() <= before + 2 * 5);
}

// A receiver that keeps more than a process may map has copies of the rest.
void test_too_many_mappings() {
  RingBounds bounds;
  bounds.mappings = SharedMemory::count() + 1 + 20;  // a link, and ten segments on both sides
  Pair pair(Kind::kRings, 0, bounds);
  std::vector<InFrame> kept;
  const auto receive = [&](std::uint64_t i) {
    pair.left->send(large(i).out(), 0, no_interrupt);
    kept.push_back(*next_event(*pair.right_home).frame);
  };
  for (std::uint64_t i = 0; i < 100; ++i) receive(i);
  CHECK(SharedMemory::count() <= bounds.mappings + 2);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(large(i) == kept[i]);
  // Copies are the receiver's own, and what it drops is mapped again for the next.
  std::memset(kept[99].buffers[0]->data(), 0, kSize);
  CHECK(large(98) == kept[98]);
  kept.clear();
  for (std::uint64_t i = 0; i < 10; ++i) receive(i);
  for (std::uint64_t i = 0; i < 10; ++i) CHECK(large(i) == kept[i]);
  CHECK(SharedMemory::count() <= bounds.mappings + 2);
}

const TestFile kFile("test_ring_room", [] {
  test_waits_until_the_peer_has_read();
  test_room_for_one();
  test_frame_that_is_larger_than_all_room_goes_alone();
  test_wait_ends_with_the_link();
  test_what_is_composed_counts();
  test_many_senders();
  test_too_many_mappings();
});

}  // namespace

}  // namespace farcall::test_ring_room
