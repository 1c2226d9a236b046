// Calls and frames over both kinds of links.
#include <fcntl.h>
#include <unistd.h>

#include <random>

#include "pairs.hpp"

namespace farcall::test_link_exchange {

namespace {

TestFrame reply_to(TestFrame request) {
  request.kind = kReply;
  return request;
}

const std::vector<std::size_t> kManyBuffers{0, 1, 64, 100, 40'000, 0, 300'000, 32 << 10};

void test_one_call(Kind kind) {
  Pair pair(kind);
  EchoServer server(pair.right_home);
  for (const TestFrame& request :
       {test_frame(kRequest, 1, 0, 0), test_frame(kRequest, 2, 10, 20, {0, 5}),
        test_frame(kRequest, 3, 10, 3 << 20), test_frame(kRequest, 4, 10, 20, kManyBuffers),
        test_frame(kRequest, 5, 10, 20, std::vector<std::size_t>(300, 33))}) {
    CHECK(reply_to(request) == call(*pair.left, request));
  }
}

// Both sides' callers would read for themselves, so none did, when both were busy writing.
void test_large_calls_both_ways(Kind kind) {
  Pair pair(kind);
  const TestFrame request = test_frame(kRequest, 1, 10, 8 << 20);
  std::thread first([&] { CHECK(reply_to(request) == call(*pair.left, request)); });
  std::thread second([&] { CHECK(reply_to(request) == call(*pair.right, request)); });
  if (kind == Kind::kRings) {
    pair.await_full(0);
    pair.await_full(1);
  }
  EchoServer left(pair.left_home), right(pair.right_home);
  first.join();
  second.join();
}

// As above, and more callers wait for the role of writing with the role of reading.
void test_many_callers_both_ways(Kind kind, int spin_threads) {
  Pair pair(kind, spin_threads);
  EchoServer left(pair.left_home), right(pair.right_home);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(i);
      Link& link = i % 2 ? *pair.left : *pair.right;
      for (std::uint64_t round = 0; round < 20; ++round) {
        const std::size_t body = random() % 8 == 0 ? 2 << 20 : random() % 1000;
        const std::vector<std::size_t> buffers(random() % 3, random() % 2 ? 100 : 50'000);
        const TestFrame request = test_frame(kRequest, i * 1000 + round + 1, random() % 30, body,
                                             buffers);
        CHECK(reply_to(request) == call(link, request));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void test_meanwhile(Kind kind) {
  Pair pair(kind);
  EchoServer server(pair.right_home);
  const TestFrame request = test_frame(kRequest, 1, 1, 1);
  int calls = 0;
  CHECK(reply_to(request) ==
        pair.left->exchange(request.out(), patient(), no_interrupt, [&] { ++calls; }));
  CHECK(calls == 1);
}

// A reply that comes while its caller is busy wakes no thread; other frames then do.
void test_reply_meanwhile_rings_no_bell() {
  Pair pair(Kind::kRings);
  std::atomic<int> news{0};
  Server left(pair.left_home,
              [&](Event& event) { news += event.frame && event.frame->kind == kOneWay; });
  Server right(pair.right_home, [](Event& event) { echo(event, patient()); });
  RingControl& control = pair.shared().controls[1];
  for (std::uint64_t id = 1; id <= 20; ++id) {
    const TestFrame request = test_frame(kRequest, id, 1, 1);
    const bool with_news = id % 2 == 0;
    pair.await_sleep(0);
    left.await_rest();
    const auto before = control.tail.load();
    const InFrame reply = pair.left->exchange(request.out(), patient(), no_interrupt, [&] {
      while (control.tail.load() == before) std::this_thread::yield();
      CHECK(control.head.load() == before);
      CHECK(control.reader_sleeps.load() == 1);
      if (!with_news) return;
      const int seen = news;
      pair.right->send(test_frame(kOneWay, id, 1, 1).out(), patient(), no_interrupt);
      while (news == seen) std::this_thread::yield();
    });
    CHECK(reply_to(request) == reply);
  }
}

// A call from the left, whose caller is busy until something has come, with `meanwhile` first.
void await_reply(const Pair& pair, std::uint64_t id, const std::function<void()>& meanwhile) {
  const TestFrame request = test_frame(kRequest, id, 1, 1);
  const RingControl& control = pair.shared().controls[1];
  const auto before = control.tail.load();
  const auto until_there = [&] {
    meanwhile();
    while (control.tail.load() == before) std::this_thread::yield();
  };
  CHECK(reply_to(request) == pair.left->exchange(request.out(), patient(), no_interrupt, until_there));
}

// But another caller that reads, and sleeps, has to deliver it.
void test_reply_meanwhile_wakes_the_caller_that_reads() {
  Pair pair(Kind::kRings);
  std::thread reader([&] { call(*pair.left, test_frame(kRequest, 1, 1, 1)); });
  const Event first = next_event(*pair.right_home);
  {
    Server right(pair.right_home, [](Event& event) { echo(event, patient()); });
    for (std::uint64_t id = 2; id <= 20; ++id) {
      pair.await_sleep(0);
      await_reply(pair, id, [] {});
    }
  }
  echo(first, patient());
  reader.join();
}

// Also if that one begins to read, and falls asleep, while the first is busy.
void test_reply_meanwhile_wakes_the_caller_that_has_begun_to_read() {
  for (int round = 0; round < 20; ++round) {
    Pair pair(Kind::kRings);
    std::thread reader;
    Event first;
    await_reply(pair, 2, [&] {
      const Event second = next_event(*pair.right_home);
      reader = std::thread([&] { call(*pair.left, test_frame(kRequest, 1, 1, 1)); });
      first = next_event(*pair.right_home);
      pair.await_sleep(0);
      echo(second, patient());
    });
    echo(first, patient());
    reader.join();
  }
}

// Nor is it lost when the caller does not look for it after all.
void test_reply_of_a_caller_that_fails_meanwhile() {
  struct Failure {};
  Pair pair(Kind::kRings);
  Server right(pair.right_home, [](Event& event) { echo(event, patient()); });
  std::thread sleeper([&] { CHECK(next_event(*pair.left_home).frame->call_id == 1); });
  pair.await_sleep(0);
  const TestFrame request = test_frame(kRequest, 1, 1, 1);
  const auto fail = [&] {
    while (pair.shared().controls[1].tail.load() == 0) std::this_thread::yield();
    throw Failure();
  };
  CHECK_THROWS(pair.left->exchange(request.out(), patient(), no_interrupt, fail), Failure);
  sleeper.join();
}

// Frames of each sender arrive whole and in order.
void test_many_senders(Kind kind) {
  constexpr unsigned senders = 6, rounds = 60;
  Pair pair(kind);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < senders; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(i);
      for (unsigned round = 0; round < rounds; ++round) {
        const std::uint64_t id = i * 1000 + round;
        const TestFrame frame = test_frame(kOneWay, id, 8, random() % 30'000, {id % 5 * 20'000});
        if (!pair.left->send_at_once(frame.out()))
          pair.left->send(frame.out(), patient(), no_interrupt);
      }
    });
  }
  unsigned next[senders] = {};
  for (unsigned i = 0; i < senders * rounds; ++i) {
    const Event event = next_event(*pair.right_home);
    CHECK(event.frame && event.link == pair.right);
    const std::uint64_t id = event.frame->call_id;
    CHECK(id % 1000 == next[id / 1000]++);
    CHECK(test_frame(kOneWay, id, 8, event.frame->body_size, {id % 5 * 20'000}) == *event.frame);
  }
  for (std::thread& thread : threads) thread.join();
}

// A frame that is no outcome of a call goes to the endpoint, though a caller reads it.
void test_caller_reads_for_others(Kind kind) {
  Pair pair(kind);
  const TestFrame news = test_frame(kOneWay, 7, 5, 5);
  const TestFrame request = test_frame(kRequest, 1, 1, 1);
  std::thread peer([&] {
    const Event event = next_event(*pair.right_home);
    for (int i = 0; i < 3; ++i) pair.right->send(news.out(), patient(), no_interrupt);
    pair.right->send(test_frame(kReply, 99, 0, 0).out(), patient(), no_interrupt);  // no caller's
    echo(event, patient());
  });
  CHECK(reply_to(request) == call(*pair.left, request));
  for (int i = 0; i < 3; ++i) CHECK(news == *next_event(*pair.left_home).frame);
  CHECK(next_event(*pair.left_home).frame->call_id == 99);
  peer.join();
}

// The endpoint's queue is bounded: a caller does not read for a peer that never stops.
void test_caller_keeps_its_deadline(Kind kind) {
  Pair pair(kind);
  std::atomic<bool> over{false};
  std::atomic<std::size_t> sent{0};
  std::thread flood([&] {
    const TestFrame news = test_frame(kOneWay, 7, 5, 1000);
    try {
      while (!over) {
        pair.right->send(news.out(), patient(), no_interrupt);
        ++sent;
      }
    } catch (const LinkFailure&) {
    }
  });
  CHECK_THROWS(call(*pair.left, test_frame(kRequest, 1, 0, 0), now() + 300 * kMillisecond), TimedOut);
  const std::size_t most = 100 + (4 << 20) / 1000;  // what a socket or a ring holds, and the queue
  CHECK(sent < most);
  over = true;
  pair.left->fail("enough");
  flood.join();
}

// An endpoint takes no more than it is asked for.
void test_slow_reader_slows_its_writer(Kind kind) {
  Pair pair(kind);
  const auto [left, right, memory] = linked(kind, pair.left_home, pair.right_home);
  left->start();
  right->start();
  const TestFrame news = test_frame(kOneWay, 7, 5, 10'000);
  std::atomic<std::size_t> sent{0};
  std::thread flood([&] {
    try {
      while (true) {
        pair.left->send(news.out(), patient(), no_interrupt);
        ++sent;
      }
    } catch (const LinkFailure&) {
    }
  });
  CHECK(news == *next_event(*pair.right_home).frame);
  // Its writer gets stuck. The other link works.
  while (pair.left->send_at_once(test_frame(kOneWay, 1, 0, 0).out())) std::this_thread::yield();
  const TestFrame other = test_frame(kOneWay, 8, 1, 1);
  left->send(other.out(), patient(), no_interrupt);
  for (std::size_t taken = 0;; ++taken) {
    CHECK(taken < 2000);
    if (next_event(*pair.right_home).frame->call_id == 8) break;
  }
  pair.left->fail("enough");
  flood.join();
  CHECK(sent < 3000);
}

// A peer that always has a next frame does not keep another one's frame, or its end, from being heard.
void test_flood_starves_nobody(Kind kind) {
  Pair pair(kind);
  const auto [left, right, memory] = linked(kind, pair.left_home, pair.right_home);
  left->start();
  right->start();
  const TestFrame flood = test_frame(kOneWay, 7, 5, 90);
  // With the socket or the ring full before each frame is taken, there is no moment without input.
  const auto next_in_flood = [&] {
    try {
      while (true) {
        pair.left_home->poll();  // writes the rest of a frame
        pair.left->send(flood.out(), 0, no_interrupt);
      }
    } catch (const std::runtime_error&) {  // TimedOut or NotSent
    }
    return next_event(*pair.right_home);
  };
  const auto await_other = [&](const auto& is_it) {
    for (int taken = 0; !is_it(next_in_flood()); ++taken) CHECK(taken < 300);
  };
  next_in_flood();
  left->send(test_frame(kOneWay, 8, 1, 1).out(), patient(), no_interrupt);
  await_other([](const Event& event) { return event.frame && event.frame->call_id == 8; });
  left->fail("enough");
  await_other([&ended = right](const Event& event) { return !event.frame && event.link == ended; });
}

void test_receive(Kind kind) {
  Pair pair(kind);
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  const Descriptor alarm(ends[0]), ringer(ends[1]);
  const TestFrame news = test_frame(kOneWay, 7, 5, 5), other = test_frame(kRequest, 8, 5, 5);
  const std::uint64_t kinds = 1 << kOneWay;
  CHECK(!pair.left->receive(kinds, alarm.get(), 0, no_interrupt));
  CHECK(!pair.left->receive(kinds, alarm.get(), now() + 5 * kMillisecond, no_interrupt));
  std::thread peer([&] {
    pair.right->send(other.out(), patient(), no_interrupt);
    pair.right->send(news.out(), patient(), no_interrupt);
  });
  const auto frame = pair.left->receive(kinds, alarm.get(), patient(), no_interrupt);
  CHECK(frame && news == *frame);
  CHECK(other == *next_event(*pair.left_home).frame);
  peer.join();
  std::thread sleeper([&] { CHECK(!pair.left->receive(kinds, alarm.get(), kNever, no_interrupt)); });
  CHECK(write(ringer.get(), "x", 1) == 1);
  sleeper.join();
  CHECK(!pair.left->receive(kinds, alarm.get(), kNever, no_interrupt));
}

// Rings that are set up by both sides, with two mappings as in two processes.
void test_set_up() {
  auto left_home = std::make_shared<Endpoint>(1), right_home = std::make_shared<Endpoint>(1);
  auto [first, second] = socket_pair();
  LinkRef right;
  std::thread accepting([&, socket = std::move(second)]() mutable {
    right = right_home->open_rings(std::move(socket), kLimits, 1, {}, patient());
  });
  const LinkRef left = left_home->open_rings(std::move(first), kLimits, 0, {}, patient());
  accepting.join();
  CHECK(!left->is_stream() && !right->is_stream());
  left->start();
  right->start();
  {
    EchoServer server(right_home);
    const TestFrame request = test_frame(kRequest, 1, 10, 2 << 20, kManyBuffers);
    for (int i = 0; i < 5; ++i) CHECK(reply_to(request) == call(*left, request));
  }
  left_home->close();
  right_home->close();
}

void test_wake() {
  auto endpoint = std::make_shared<Endpoint>(0);
  endpoint->wake();
  CHECK(!endpoint->next(kNever, no_interrupt));
  for (int i = 0; i < 200; ++i) {
    std::atomic<bool> ending{false};
    std::thread sleeper([&] {
      while (!ending) CHECK(!endpoint->next(kNever, no_interrupt));  // may return for no reason
    });
    if (i % 2 == 0) {
      while (!endpoint->sleeps()) std::this_thread::yield();
    }
    ending = true;
    endpoint->wake();
    sleeper.join();
  }
  CHECK(!endpoint->next(0, no_interrupt));
  CHECK(!endpoint->poll());
  endpoint->close();
  CHECK(!endpoint->next(kNever, no_interrupt));
}

const TestFile kFile("test_link_exchange", [] {
  test_wake();
  test_set_up();
  test_reply_meanwhile_rings_no_bell();
  test_reply_meanwhile_wakes_the_caller_that_reads();
  test_reply_meanwhile_wakes_the_caller_that_has_begun_to_read();
  test_reply_of_a_caller_that_fails_meanwhile();
  for (const Kind kind : kKinds) {
    test_one_call(kind);
    test_meanwhile(kind);
    test_caller_reads_for_others(kind);
    test_receive(kind);
    test_many_senders(kind);
    test_large_calls_both_ways(kind);
    test_many_callers_both_ways(kind, 0);
    test_many_callers_both_ways(kind, 2);
    test_caller_keeps_its_deadline(kind);
    test_slow_reader_slows_its_writer(kind);
    test_flood_starves_nobody(kind);
  }
});

}  // namespace

}  // namespace farcall::test_link_exchange
