// Deadlines and signals in every wait of a link, and the rests of frames.
#include "allocation.hpp"
#include "pairs.hpp"
#include "signals.hpp"

namespace farcall::test_link_waits {

namespace {

const TestFrame kLarge = test_frame(kOneWay, 1, 10, 5 << 20);
const TestFrame kSmall = test_frame(kOneWay, 2, 10, 10);

// The next frame at `endpoint`, while a thread may have to write it at the other.
InFrame next_frame(Endpoint& endpoint) {
  Event event = next_event(endpoint);
  CHECK(event.frame);
  return std::move(*event.frame);
}

void test_not_sent(Kind kind) {
  Pair pair(kind);
  while (pair.left->send_at_once(kSmall.out())) {
  }
  const auto fill = [&] {
    while (true) pair.left->send(kSmall.out(), 0, no_interrupt);
  };
  // A small frame may be cut, too; then the next one is not sent.
  CHECK_THROWS(fill(), std::runtime_error);
  CHECK_THROWS(pair.left->send(kLarge.out(), 0, no_interrupt), std::runtime_error);
  CHECK_THROWS(pair.left->send(kLarge.out(), 0, no_interrupt), NotSent);
  CHECK_THROWS(call(*pair.left, test_frame(kRequest, 3, 0, 0), 0), NotSent);
}

void test_timed_out(Kind kind) {
  Pair pair(kind);
  CHECK_THROWS(call(*pair.left, test_frame(kRequest, 3, 0, 0), 0), TimedOut);
  {
    Server server(pair.right_home, [](Event& event) { echo(event, patient()); });
    // Its late answer is the endpoint's, and the link is as before.
    CHECK(test_frame(kReply, 3, 0, 0) == next_frame(*pair.left_home));
    CHECK(test_frame(kReply, 4, 9, 9) == call(*pair.left, test_frame(kRequest, 4, 9, 9)));
  }
}

// A deadline in the middle of a frame: the endpoint writes the rest, and what comes next waits.
void test_residue(Kind kind) {
  Pair pair(kind);
  Server writer(pair.left_home, [](Event&) {});
  for (int i = 0; i < 3; ++i) {
    CHECK_THROWS(pair.left->send(kLarge.out(), 0, no_interrupt), TimedOut);
    CHECK(!pair.left->send_at_once(kSmall.out()));
    CHECK_THROWS(pair.left->send(kSmall.out(), 0, no_interrupt), NotSent);
    std::thread next([&] { pair.left->send(kSmall.out(), patient(), no_interrupt); });
    CHECK(kLarge == next_frame(*pair.right_home));
    CHECK(kSmall == next_frame(*pair.right_home));
    next.join();
  }
}

// Nothing is taken off a link that is not read; its end is heard, after what came before it.
void test_not_read(Kind kind) {
  Pair pair(kind);
  pair.right->set_reading(false);
  pair.left->send(kSmall.out(), patient(), no_interrupt);
  CHECK(!pair.right_home->next(0, no_interrupt));
  pair.right->set_reading(true);
  CHECK(kSmall == next_frame(*pair.right_home));
  pair.right->set_reading(false);
  pair.left->send(kSmall.out(), patient(), no_interrupt);
  pair.left->fail("the test");
  CHECK(kSmall == next_frame(*pair.right_home));
  CHECK(!next_event(*pair.right_home).frame);
  pair.right->set_reading(false);
}

// Callers come and go, and change what epoll is asked for, while there is something left to write.
void test_residue_under_calls(Kind kind) {
  Pair pair(kind);
  Server writer(pair.left_home, [](Event&) {});
  for (int round = 0; round < 50; ++round) {
    CHECK_THROWS(pair.left->send(kLarge.out(), 0, no_interrupt), TimedOut);
    std::vector<std::thread> callers;
    for (std::uint64_t i = 0; i < 3; ++i) {
      callers.emplace_back([&, i] {
        CHECK(!pair.left->receive(1 << 9, -1, now() + i * 100 * kMicrosecond, no_interrupt));
      });
    }
    CHECK(kLarge == next_frame(*pair.right_home));
    for (std::thread& caller : callers) caller.join();
    // Waits until the endpoint's thread is done with the frame.
    pair.left->send(kSmall.out(), patient(), no_interrupt);
    CHECK(kSmall == next_frame(*pair.right_home));
  }
}

// The bell that tells of space is heard by a caller, and is for the endpoint's thread.
void test_bell_for_another() {
  Pair pair(Kind::kRings);
  std::thread caller(
      [&] { CHECK(test_frame(kReply, 3, 0, 0) == call(*pair.left, test_frame(kRequest, 3, 0, 0))); });
  const Event request = next_event(*pair.right_home);
  pair.await_sleep(0);
  CHECK_THROWS(pair.left->send(kLarge.out(), 0, no_interrupt), TimedOut);
  {
    Server writer(pair.left_home, [](Event&) {});
    pair.await_full(0, kWriterWantsBell);
    CHECK(kLarge == next_frame(*pair.right_home));
  }
  echo(request, patient());
  caller.join();
}

// No memory for the rest of a frame: the link ends, and no thread waits forever.
void test_residue_without_memory(Kind kind) {
  Pair pair(kind);
  largest_allocation = 1 << 20;
  CHECK_THROWS(pair.left->send(kLarge.out(), 0, no_interrupt), TimedOut);
  largest_allocation = ~std::size_t{0};
  CHECK_THROWS(pair.left->send(kSmall.out(), kNever, no_interrupt), LinkFailure);
  const Event event = next_event(*pair.left_home);
  CHECK(!event.frame && event.cause == "no memory for the rest of a frame");
}

// No memory for the table of a frame that arrives: the link ends, and no role is left taken.
void test_table_without_memory(Kind kind) {
  Pair pair(kind);
  const TestFrame frame = test_frame(kOneWay, 1, 0, 0, std::vector<std::size_t>(5'000, 0));
  const OutFrame out = frame.out();
  pair.left->send(out, patient(), no_interrupt);
  largest_allocation = 8 * 5'000 - 1;
  const Event event = next_event(*pair.right_home);
  largest_allocation = ~std::size_t{0};
  CHECK(!event.frame && event.cause == std::bad_alloc().what());
}

void test_interrupts(Kind kind) {
  Pair pair(kind);
  // A caller that reads, and sleeps.
  interrupt_until_thrown(
      [&] { pair.left->exchange(test_frame(kRequest, 1, 0, 0).out(), kNever, stop, {}); });
  // A caller that waits for the reader.
  std::atomic<bool> over{false};
  std::thread reader([&] {
    while (!over) pair.left->receive(1 << 9, -1, now() + 10 * kMillisecond, no_interrupt);
  });
  interrupt_until_thrown(
      [&] { pair.left->exchange(test_frame(kRequest, 2, 0, 0).out(), kNever, stop, {}); });
  over = true;
  reader.join();
  interrupt_until_thrown([&] { pair.left->receive(1 << 9, -1, kNever, stop); });
  // The endpoint's thread.
  interrupt_until_thrown([&] {
    while (true) pair.left_home->next(kNever, stop);
  });
  // A writer in the middle of a frame; its rest is left. One that waits behind that.
  interrupt_until_thrown([&] { pair.left->send(kLarge.out(), kNever, stop); });
  interrupt_until_thrown([&] { pair.left->send(kSmall.out(), kNever, stop); });
  // All is as before.
  std::optional<Server> writer(std::in_place, pair.left_home, [](Event&) {});
  CHECK(next_frame(*pair.right_home).call_id == 1);
  CHECK(next_frame(*pair.right_home).call_id == 2);
  CHECK(kLarge == next_frame(*pair.right_home));
  Server server(pair.right_home, [](Event& event) { echo(event, patient()); });
  CHECK(test_frame(kReply, 4, 9, 9) == call(*pair.left, test_frame(kRequest, 4, 9, 9)));
}

const TestFile kFile("test_link_waits", [] {
  test_bell_for_another();
  for (const Kind kind : kKinds) {
    test_not_sent(kind);
    test_timed_out(kind);
    test_residue(kind);
    test_not_read(kind);
    test_residue_under_calls(kind);
    test_residue_without_memory(kind);
    test_table_without_memory(kind);
    test_interrupts(kind);
  }
});

}  // namespace

}  // namespace farcall::test_link_waits
