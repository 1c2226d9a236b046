// Links that end, in every state that they and their threads can be in; and that nothing is left.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "descriptors.hpp"
#include "pairs.hpp"

namespace farcall::test_link_loss {

namespace {

const std::string kClosed = "the peer closed the connection";

// A socket that is closed before everything was read says so in another way.
bool is(const std::string& cause, const std::string& expected) {
  return cause == expected ||
         (expected == kClosed && cause == "the connection broke: Connection reset by peer");
}

template <class Work>
std::string cause_of(Work work) {
  try {
    work();
  } catch (const LinkFailure& error) {
    return error.what();
  }
  return "it did not fail";
}

// Sends a request and waits; sleeps, if `side` is that of a ring's reader.
std::thread calling(const LinkRef& link, std::uint64_t call_id, const std::string& cause) {
  return std::thread([=] {
    const TestFrame request = test_frame(kRequest, call_id, 1, 1);
    CHECK(is(cause_of([&] { call(*link, request); }), cause));
  });
}

void check_end(Endpoint& endpoint, const LinkRef& link, const std::string& cause) {
  const Event event = next_event(endpoint);
  CHECK(!event.frame && event.link == link && is(event.cause, cause));
  CHECK(link->is_lost() && link->loss_cause() == event.cause);
  CHECK(!endpoint.next(0, no_interrupt));  // once
  CHECK(cause_of([&] { call(*link, test_frame(kRequest, 1, 0, 0)); }) == event.cause);
  CHECK(cause_of([&] { link->send(test_frame(kRequest, 1, 0, 0).out(), 0, no_interrupt); }) ==
        event.cause);
  CHECK(!link->send_at_once(test_frame(kRequest, 1, 0, 0).out()));
  CHECK(!link->receive(~std::uint64_t{0}, -1, kNever, no_interrupt));
}

// The first caller reads, the second waits for it; no thread is inside `next`, or one is.
void test_peer_closes_while_callers_wait(Kind kind, int spin_threads, bool served) {
  Pair pair(kind, spin_threads);
  std::atomic<int> ends{0};
  std::optional<Server> server;
  if (served) {
    server.emplace(pair.left_home, [&](Event& event) {
      CHECK(!event.frame && is(event.cause, kClosed));
      ++ends;
    });
  }
  std::thread first = calling(pair.left, 1, kClosed), second = calling(pair.left, 2, kClosed);
  next_event(*pair.right_home);
  next_event(*pair.right_home);
  if (kind == Kind::kRings && spin_threads == 0) pair.await_sleep(0);
  pair.right_home->close();
  first.join();
  second.join();
  if (served) {
    while (ends == 0) std::this_thread::yield();
    server.reset();
    CHECK(ends == 1);
  } else {
    check_end(*pair.left_home, pair.left, kClosed);
  }
}

void test_peer_closes_while_writers_are_stuck(Kind kind, bool served) {
  Pair pair(kind);
  std::optional<Server> server;
  if (served) server.emplace(pair.left_home, [](Event&) {});
  const TestFrame large = test_frame(kOneWay, 1, 1, 8 << 20);
  const auto send = [&] {
    CHECK(is(cause_of([&] { pair.left->send(large.out(), patient(), no_interrupt); }), kClosed));
  };
  std::thread first(send), second(send);
  if (kind == Kind::kRings) pair.await_full(0);
  pair.right_home->close();
  first.join();
  second.join();
  server.reset();
  if (!served) check_end(*pair.left_home, pair.left, kClosed);
}

// Frames that the peer sent before it went still arrive, whichever side notices its end first.
void test_what_was_sent_before_the_end_arrives(Kind kind, bool by_writing) {
  Pair pair(kind);
  for (std::uint64_t i = 1; i <= 50; ++i) {
    pair.right->send(test_frame(kOneWay, i, 10, 100, {i}).out(), patient(), no_interrupt);
  }
  pair.right_home->close();
  if (by_writing) {
    const TestFrame large = test_frame(kOneWay, 1, 1, 8 << 20);
    CHECK_THROWS(pair.left->send(large.out(), patient(), no_interrupt), LinkFailure);
  }
  for (std::uint64_t i = 1; i <= 50; ++i) {
    CHECK(test_frame(kOneWay, i, 10, 100, {i}) == *next_event(*pair.left_home).frame);
  }
  check_end(*pair.left_home, pair.left, kClosed);
}

void test_peer_closes_within_a_frame(Kind kind) {
  Pair pair(kind);
  const TestFrame large = test_frame(kOneWay, 1, 1, 8 << 20);
  CHECK_THROWS(pair.right->send(large.out(), 0, no_interrupt), TimedOut);
  pair.right_home->close();
  check_end(*pair.left_home, pair.left, kClosed);
}

void test_fail(Kind kind) {
  Pair pair(kind);
  std::thread first = calling(pair.left, 1, "enough"), second = calling(pair.left, 2, "enough");
  next_event(*pair.right_home);
  next_event(*pair.right_home);
  pair.left->fail("enough");
  pair.left->fail("more than that");
  first.join();
  second.join();
  check_end(*pair.left_home, pair.left, "enough");
  check_end(*pair.right_home, pair.right, kClosed);
}

void test_fail_while_writers_are_stuck(Kind kind) {
  Pair pair(kind);
  const TestFrame large = test_frame(kRequest, 1, 1, 8 << 20);
  const auto send = [&] {
    CHECK(cause_of([&] { pair.left->send(large.out(), patient(), no_interrupt); }) == "enough");
  };
  std::thread first(send), second(send);
  std::thread third([&] { CHECK(cause_of([&] { call(*pair.left, large); }) == "enough"); });
  if (kind == Kind::kRings) pair.await_full(0);
  pair.left->fail("enough");
  first.join();
  second.join();
  third.join();
  check_end(*pair.left_home, pair.left, "enough");
}

// A thread that waits for the role of writing behind the rest of a frame is told, too.
void test_fail_with_a_residue(Kind kind) {
  Pair pair(kind);
  const TestFrame large = test_frame(kOneWay, 1, 1, 8 << 20);
  CHECK_THROWS(pair.left->send(large.out(), 0, no_interrupt), TimedOut);
  CHECK_THROWS(pair.left->send(large.out(), 0, no_interrupt), NotSent);
  std::thread waiting([&] {
    CHECK(cause_of([&] { pair.left->send(large.out(), patient(), no_interrupt); }) == "enough");
  });
  CHECK(!pair.left_home->next(0, no_interrupt));
  pair.left->fail("enough");
  waiting.join();
  check_end(*pair.left_home, pair.left, "enough");
}

// A caller that has read its outcome returns it, though it finds the end right behind.
void test_what_was_read_counts(Kind kind) {
  static Pair* pair = nullptr;  // null: it was done
  Pair here(kind);
  pair = &here;
  // In the caller, which has the role of reading: the peer answers and goes, and writing finds that.
  const Interrupt end_it = [] {
    if (pair == nullptr) return;
    echo(next_event(*pair->right_home), patient());
    pair->right_home->close();
    const TestFrame large = test_frame(kOneWay, 2, 1, 8 << 20);
    CHECK_THROWS(pair->left->send(large.out(), patient(), no_interrupt), LinkFailure);
    CHECK(!pair->left->is_lost());
    pair = nullptr;
  };
  CHECK(here.left->exchange(test_frame(kRequest, 1, 1, 1).out(), patient(), end_it, {}).call_id == 1);
  CHECK(here.left->is_lost());
}

void test_lost_before_it_starts(Kind kind) {
  auto endpoint = std::make_shared<Endpoint>(0), other = std::make_shared<Endpoint>(0);
  const Linked links = linked(kind, endpoint, other);
  links.left->fail("enough");
  CHECK(cause_of([&] { links.left->start(); }) == "enough");
  CHECK(!endpoint->next(0, no_interrupt));  // the endpoint does not know the link
  links.right->start();
  check_end(*other, links.right, kClosed);
  other->close();
  const Linked more = linked(kind, endpoint, other);
  CHECK_THROWS(more.right->start(), LinkFailure);
  endpoint->close();
}

// The caller that starts a link is told of the failure, so no event may tell of its end.
void test_start_that_fails() {
  auto endpoint = std::make_shared<Endpoint>(0);
  Descriptor unwatchable(open("/dev/null", O_RDWR | O_CLOEXEC));  // epoll takes no such files
  const auto link = link_over(endpoint, std::make_unique<StreamChannel>(std::move(unwatchable)));
  CHECK_THROWS(link->start(), LinkFailure);
  link->fail("enough");
  CHECK(!endpoint->next(0, no_interrupt));
  endpoint->close();
}

// Calls, sends and `next` are under way, in any state.
void test_close_while_threads_are_inside(Kind kind, int spin_threads) {
  for (int round = 0; round < 10; ++round) {
    Pair pair(kind, spin_threads);
    EchoServer left(pair.left_home), right(pair.right_home);
    std::vector<std::thread> threads;
    std::atomic<int> under_way{0};
    for (std::uint64_t i = 0; i < 6; ++i) {
      threads.emplace_back([&, i] {
        Link& link = i % 2 ? *pair.left : *pair.right;
        try {
          for (std::uint64_t call_id = i;; call_id += 6) {
            const TestFrame frame = test_frame(i < 4 ? kRequest : kOneWay, call_id, 3, 5000 * i);
            if (i < 4) {
              call(link, frame);
            } else {
              link.send(frame.out(), patient(), no_interrupt);
            }
            if (call_id == i + 6 * 5) ++under_way;
          }
        } catch (const LinkFailure&) {
        }
      });
    }
    while (under_way < 4) std::this_thread::yield();
    (round % 2 ? pair.left_home : pair.right_home)->close();
    for (std::thread& thread : threads) thread.join();
  }
}

std::size_t count_mappings() {
  std::FILE* file = std::fopen("/proc/self/maps", "r");
  CHECK(file != nullptr);
  char line[4096];
  std::size_t count = 0;
  while (std::fgets(line, sizeof line, file) != nullptr)
    count += std::strstr(line, "memfd:") != nullptr;
  std::fclose(file);
  return count;
}

// With frames in the queue, in the rings and in our hands when it ends.
void test_nothing_is_left(Kind kind) {
  const std::size_t descriptors = count_descriptors(), mappings = count_mappings();
  for (int round = 0; round < 20; ++round) {
    Event kept;
    {
      Pair pair(kind);
      for (std::uint64_t i = 0; i < 3; ++i) {
        pair.left->send(test_frame(kOneWay, i, 5, 1'000, {33'000}).out(), patient(), no_interrupt);
      }
      kept = next_event(*pair.right_home);
      next_event(*pair.right_home);
      if (round % 2 == 0) pair.left->fail("enough");
    }
    CHECK(test_frame(kOneWay, 0, 5, 1'000, {33'000}) == *kept.frame);
  }
  CHECK(count_descriptors() == descriptors);
  CHECK(count_mappings() == mappings);
}

const TestFile kFile("test_link_loss", [] {
  for (const Kind kind : kKinds) {
    test_nothing_is_left(kind);
    for (const bool served : {false, true}) {
      test_peer_closes_while_callers_wait(kind, 0, served);
      test_peer_closes_while_callers_wait(kind, 2, served);
      test_peer_closes_while_writers_are_stuck(kind, served);
    }
    test_what_was_sent_before_the_end_arrives(kind, false);
    test_what_was_sent_before_the_end_arrives(kind, true);
    test_peer_closes_within_a_frame(kind);
    test_fail(kind);
    test_fail_while_writers_are_stuck(kind);
    test_fail_with_a_residue(kind);
    test_what_was_read_counts(kind);
    test_lost_before_it_starts(kind);
    test_close_while_threads_are_inside(kind, 0);
    test_close_while_threads_are_inside(kind, 2);
  }
  test_start_that_fails();
});

}  // namespace

}  // namespace farcall::test_link_loss
