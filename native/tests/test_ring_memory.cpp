// How much memory and how many descriptors links over rings take: they grow with the frames, give
// back memory that was not needed for a while, and make do with the budget.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <semaphore>

#include "core/descriptor_passing.hpp"
#include "core/poll.hpp"
#include "descriptors.hpp"
#include "pairs.hpp"

namespace farcall::test_ring_memory {

namespace {

constexpr std::size_t kLargest = sizeof LinkMemory::large[0];
constexpr std::size_t kGrown = sizeof LinkMemory::middle[0] + kLargest;

// Two endpoints whose link was set up as those of two workers are.
struct Workers {
  explicit Workers(std::size_t left_budget = std::size_t{1} << 30,
                   std::size_t right_budget = std::size_t{1} << 30)
      : left_home(std::make_shared<Endpoint>(0, left_budget)),
        right_home(std::make_shared<Endpoint>(0, right_budget)) {
    auto [first, second] = socket_pair();
    std::thread accepting([&, socket = std::move(second)]() mutable {
      right = right_home->open_rings(std::move(socket), kLimits, 1, {}, patient());
    });
    left = left_home->open_rings(std::move(first), kLimits, 0, {}, patient());
    accepting.join();
    left->start();
    right->start();
  }
  ~Workers() {
    left_home->close();
    right_home->close();
  }

  void pass(const TestFrame& frame) {
    std::thread sender([&] { left->send(frame.out(), patient(), no_interrupt); });
    const Event event = next_event(*right_home);
    CHECK(event.frame && frame == *event.frame);
    sender.join();
  }
  // Twice, since memory that was used since the last time is kept.
  void rest() {
    for (int i = 0; i < 2; ++i) {
      left->trim();
      right->trim();
    }
  }

  EndpointRef left_home, right_home;
  LinkRef left, right;
};

// Of all memory of the host, in which nothing else changes much meanwhile.
std::size_t blocks_of_mapped() {
  std::FILE* file = std::fopen("/proc/self/smaps", "r");
  CHECK(file != nullptr);
  char line[4096];
  std::size_t total = 0, size = 0;
  bool is_ours = false;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strstr(line, "memfd:farcall") != nullptr)
      is_ours = true;
    else if (std::strchr(line, '-') != nullptr && std::strchr(line, '/') != nullptr)
      is_ours = false;
    if (is_ours && std::sscanf(line, "Pss: %zu kB", &size) == 1) total += size * 1024;
    if (std::strncmp(line, "VmFlags:", 8) == 0) is_ours = false;
  }
  std::fclose(file);
  return total;
}

void test_a_link_begins_small() {
  CHECK(LinkMemory::first() <= 48 << 10);
  const std::size_t before = blocks_of_mapped();
  Workers workers;
  CHECK(!workers.left->is_stream() && !workers.right->is_stream());
  CHECK(workers.left_home->shared_memory() == LinkMemory::first());
  CHECK(workers.right_home->shared_memory() == 0);  // each byte counts once
  for (std::uint64_t i = 0; i < 1000; ++i) workers.pass(test_frame(kOneWay, i, 10, i % 8000));
  CHECK(workers.left_home->shared_memory() == LinkMemory::first());
  CHECK(blocks_of_mapped() - before <= LinkMemory::first());
}

void test_it_grows_and_gives_back() {
  const std::size_t before = blocks_of_mapped();
  Workers workers;
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t size : {std::size_t{20} << 10, std::size_t{100} << 10, 3 * kLargest}) {
      workers.pass(test_frame(kOneWay, 1, 10, size));
    }
    CHECK(workers.left_home->shared_memory() > LinkMemory::first() + kLargest);
    CHECK(workers.left_home->shared_memory() <= LinkMemory::first() + kGrown);
    CHECK(workers.right_home->shared_memory() == 0);
    CHECK(blocks_of_mapped() - before > kLargest);
    workers.left->trim();  // it was used since the last time
    CHECK(workers.left_home->shared_memory() > LinkMemory::first() + kLargest);
    workers.rest();
    CHECK(workers.left_home->shared_memory() == LinkMemory::first());
    CHECK(blocks_of_mapped() - before <= LinkMemory::first());
  }
  // Memory that the peer has not read is not given back.
  workers.left->send(test_frame(kOneWay, 1, 10, kLargest / 2).out(), 0, no_interrupt);
  workers.rest();
  CHECK(workers.left_home->shared_memory() >= LinkMemory::first() + kLargest);
  CHECK(test_frame(kOneWay, 1, 10, kLargest / 2) == *next_event(*workers.right_home).frame);
  workers.rest();
  CHECK(workers.left_home->shared_memory() == LinkMemory::first());
}

void test_segments_count() {
  Workers workers;
  workers.pass(test_frame(kOneWay, 1, 10, 10, {1 << 20}));
  CHECK(workers.left_home->shared_memory() == LinkMemory::first() + (1 << 20));
  workers.rest();
  CHECK(workers.left_home->shared_memory() == LinkMemory::first());
}

// Everything arrives, whatever the budget; and it is kept to.
void test_budgets() {
  const std::size_t first = LinkMemory::first();
  for (const std::size_t budget :
       {std::size_t{0}, first - 1, first, first + (64 << 10), first + (200 << 10), first + kLargest,
        first + kGrown, first + kGrown + (1 << 20)}) {
    Workers workers(budget, budget);
    CHECK(workers.left->is_stream() == (budget < first));
    CHECK(workers.right->is_stream() == (budget < first));
    for (const std::size_t size : {std::size_t{100}, std::size_t{40} << 10, std::size_t{5} << 20}) {
      workers.pass(test_frame(kOneWay, 1, 10, size));
      workers.pass(test_frame(kOneWay, 2, 10, 10, {size, 33 << 10, size / 2}));
      CHECK(workers.left_home->shared_memory() <= budget);
      CHECK(workers.right_home->shared_memory() == 0);
    }
    workers.rest();
    CHECK(workers.left_home->shared_memory() <= first);
  }
}

// Segments that are not needed make room for others.
void test_free_segments_make_room() {
  Workers workers(LinkMemory::first() + (1 << 20));
  for (const std::size_t size : {100, 200, 400, 800}) {
    const std::size_t before = workers.left_home->shared_memory();
    workers.pass(test_frame(kOneWay, 1, 10, 10, {size << 10}));
    CHECK(workers.left_home->shared_memory() != before);
  }
  CHECK(!workers.left->is_stream());
}

void test_links_that_end_give_everything_back() {
  const std::size_t before = blocks_of_mapped();
  auto home = std::make_shared<MemoryBudget>(1 << 30);
  {
    SharedMemory::Plan plan{4096, home};
    auto memory = SharedMemory::create(1 << 20, plan).first;
    CHECK(memory && home->used() == 4096);
    CHECK(memory->take(8192, 4096) && home->used() == 8192);
    CHECK(memory->give_back(8192, 4096) && home->used() == 4096);
    CHECK(!SharedMemory::create(1 << 30, {0, home}).first && home->used() == 4096);
    CHECK(!memory->take(0, 1 << 30) && home->used() == 4096);
  }
  CHECK(home->used() == 0 && blocks_of_mapped() == before);
}

// The endpoint's thread may sleep when callers begin to use memory: it wakes to look after that.
void test_what_callers_use_is_given_back() {
  Workers workers;
  std::atomic<bool> ending{false};
  const auto serve = [&](const EndpointRef& home) {
    return std::thread([&ending, home] {
      while (!ending) home->next(kNever, no_interrupt);
    });
  };
  std::thread left = serve(workers.left_home), right = serve(workers.right_home);
  while (!workers.left_home->sleeps()) std::this_thread::yield();
  workers.left->send(test_frame(kOneWay, 1, 10, 3 * kLargest, {1 << 20}).out(), patient(),
                     no_interrupt);
  while (workers.left_home->shared_memory() > LinkMemory::first()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  ending = true;
  workers.left_home->wake();
  workers.right_home->wake();
  left.join();
  right.join();
}

void limit_descriptors(rlim_t most) {
  rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = most;
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

// Up to now all descriptors are in use, and there may be no more. No thread begins or ends meanwhile:
// to check what it does there, UBSan needs descriptors.
struct NoMoreDescriptors {
  NoMoreDescriptors() {
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    const int free = dup(0);
    CHECK(free >= 0);
    close(free);
    limit_descriptors(static_cast<rlim_t>(free));
    CHECK(dup(0) < 0);
  }
  ~NoMoreDescriptors() { limit_descriptors(before.rlim_cur); }

  rlimit before;
};

void test_receiver_without_a_free_descriptor() {
  Workers workers;
  const TestFrame frame = test_frame(kOneWay, 1, 10, 10, {1 << 20, 1 << 20});
  const std::size_t descriptors = count_descriptors();
  for (int round = 0; round < 3; ++round) {
    workers.left->send(frame.out(), 0, no_interrupt);
    {
      NoMoreDescriptors none;
      const Event event = next_event(*workers.right_home);
      CHECK(event.frame && frame == *event.frame);
    }
    workers.rest();
  }
  // Without the one that is kept for this: it waits until there is one.
  workers.right_home->memory().spare.end();
  workers.left->send(frame.out(), 0, no_interrupt);
  {
    std::atomic<bool> has_begun{false}, is_limited{false};
    std::optional<NoMoreDescriptors> none;
    std::thread later([&] {
      has_begun = true;
      while (!is_limited) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      none.reset();
    });
    while (!has_begun) std::this_thread::yield();
    none.emplace();
    is_limited = true;
    const Event event = next_event(*workers.right_home);
    CHECK(event.frame && frame == *event.frame);
    later.join();
  }
  CHECK(count_descriptors() == descriptors - 1);
}

void test_set_up_without_a_free_descriptor() {
  for (const int poor : {0, 1}) {
    auto [first, second] = socket_pair();
    const Descriptor* ends[] = {&first, &second};
    const auto set_up = [&](int side) {
      return RingChannel::set_up(*ends[side], side, nullptr, patient());
    };
    std::shared_ptr<SharedMemory> memory;
    std::binary_semaphore may_end(0);
    if (poor == 0) {
      std::atomic<bool> has_begun{false};
      std::thread other([&] {
        has_begun = true;
        CHECK(!set_up(1));
        may_end.acquire();
      });
      while (!has_begun) std::this_thread::yield();
      {
        NoMoreDescriptors none;
        CHECK(!set_up(0));
      }
      may_end.release();
      other.join();
    } else {
      std::thread other([&] {
        memory = set_up(0);
        may_end.acquire();
      });
      pollfd waited{second.get(), POLLIN, 0};
      CHECK(poll_until(&waited, 1, patient(), no_interrupt) == 1);
      {
        NoMoreDescriptors none;
        CHECK(!set_up(1));
      }
      may_end.release();
      other.join();
      CHECK(!memory);
    }
  }
}

// A user may have so many descriptors on their way; root, any number.
void test_set_up_with_too_many_descriptors_on_their_way() {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child > 0) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return;
  }
  if (geteuid() == 0) CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
  limit_descriptors(32);
  auto [from, to] = socket_pair();
  int sent = 0;
  while (sent < 10'000) {
    std::uint8_t byte = 0;
    iovec vector{&byte, 1};
    alignas(cmsghdr) Control control = {};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    attach(message, control, 0);
    if (sendmsg(from.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) break;
    ++sent;
  }
  CHECK(errno == ETOOMANYREFS);
  auto [first, second] = socket_pair();
  std::thread other([&, end = &second] { CHECK(!RingChannel::set_up(*end, 1, nullptr, patient())); });
  CHECK(!RingChannel::set_up(first, 0, nullptr, patient()));
  other.join();
  std::_Exit(0);
}

const TestFile kFile("test_ring_memory", [] {
  test_a_link_begins_small();
  test_it_grows_and_gives_back();
  test_segments_count();
  test_budgets();
  test_free_segments_make_room();
  test_links_that_end_give_everything_back();
  test_what_callers_use_is_given_back();
  test_receiver_without_a_free_descriptor();
  test_set_up_without_a_free_descriptor();
  test_set_up_with_too_many_descriptors_on_their_way();
});

}  // namespace

}  // namespace farcall::test_ring_memory
