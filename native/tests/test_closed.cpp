// After the end: no system call is told a descriptor that is closed. Its number may be another file's
// by then, and a thread that asks while another one closes it is a race.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstring>
#include <thread>

#include "pairs.hpp"

namespace farcall::test_closed {

namespace {

std::atomic<bool> checks{false};  // not for the other tests of this program
std::atomic<long> calls_seen{0};

// A `Descriptor` that is closed has a number below 0.
void check(int fd) {
  if (!checks) return;
  calls_seen.fetch_add(1, std::memory_order_relaxed);
  CHECK(fd >= 0);
}

void check(const pollfd* waited, nfds_t count) {
  for (nfds_t i = 0; i < count; ++i) check(waited[i].fd);
}

}  // namespace

// In the place of the C library's, for this program.
extern "C" {

int epoll_wait(int fd, epoll_event* events, int count, int timeout) {
  check(fd);
  return epoll_pwait(fd, events, count, timeout, nullptr);
}

int epoll_ctl(int fd, int operation, int other, epoll_event* event) noexcept {
  check(fd);
  check(other);
  return static_cast<int>(syscall(SYS_epoll_ctl, fd, operation, other, event));
}

int eventfd_write(int fd, eventfd_t value) {
  check(fd);
  return write(fd, &value, sizeof value) == sizeof value ? 0 : -1;
}

ssize_t send(int fd, const void* data, size_t size, int flags) {
  check(fd);
  return sendto(fd, data, size, flags, nullptr, 0);
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  check(fd);
  return syscall(SYS_sendmsg, fd, message, flags);
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  check(fd);
  return syscall(SYS_recvmsg, fd, message, flags);
}

int shutdown(int fd, int how) noexcept {
  check(fd);
  return static_cast<int>(syscall(SYS_shutdown, fd, how));
}

ssize_t recv(int fd, void* data, size_t size, int flags) {
  check(fd);
  return recvfrom(fd, data, size, flags, nullptr, nullptr);
}

int ppoll(pollfd* waited, nfds_t count, const timespec* timeout, const sigset_t*) {
  check(waited, count);
  timespec left = timeout == nullptr ? timespec{} : *timeout;  // the system writes to it
  return static_cast<int>(
      syscall(SYS_ppoll, waited, count, timeout == nullptr ? nullptr : &left, nullptr, 0));
}

int poll(pollfd* waited, nfds_t count, int timeout_ms) {
  const timespec timeout{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  return ppoll(waited, count, timeout_ms < 0 ? nullptr : &timeout, nullptr);
}

// Those of hardened builds.

ssize_t __recv_chk(int fd, void* data, size_t size, size_t, int flags) {
  return recv(fd, data, size, flags);
}

int __poll_chk(pollfd* waited, nfds_t count, int timeout_ms, size_t) {
  return poll(waited, count, timeout_ms);
}

int __ppoll_chk(pollfd* waited, nfds_t count, const timespec* timeout, const sigset_t*, size_t) {
  return ppoll(waited, count, timeout, nullptr);
}

}  // extern "C"

namespace {

constexpr int kRounds = 40;  // an endpoint asks epoll every 16th time, whatever else there is

template <class Work>
void may_fail(Work work) {
  try {
    work();
  } catch (const LinkFailure&) {
  } catch (const NotSent&) {
  } catch (const TimedOut&) {
  }
}

void use(Endpoint& endpoint) {
  for (int round = 0; round < kRounds; ++round) {
    endpoint.next(0, no_interrupt);
    endpoint.poll();
    endpoint.wake();
  }
}

void use(Link& link) {
  const TestFrame small = test_frame(kRequest, 1, 5, 50), large = test_frame(kOneWay, 2, 5, 8 << 20);
  for (const TestFrame* frame : {&small, &large}) {
    may_fail([&] { link.send_at_once(frame->out()); });
    may_fail([&] { link.send(frame->out(), 0, no_interrupt); });
    may_fail([&] { link.exchange(frame->out(), 0, no_interrupt, {}); });
    may_fail([&] { link.exchange(frame->out(), 0, no_interrupt, [] {}); });
  }
  may_fail([&] { link.receive(~std::uint64_t{0}, -1, 0, no_interrupt); });
  may_fail([&] { link.start(); });
  link.set_reading(false);
  link.set_reading(true);
  may_fail([&] { link.join(socket_pair().first); });
  link.fail("again");
  CHECK(link.is_lost() && link.streams() > 0);
}

void test_after_close(Kind kind, bool residue) {
  Pair pair(kind);
  {
    EchoServer server(pair.right_home);
    call(*pair.left, test_frame(kRequest, 1, 5, 50));
  }
  if (residue) {  // of a frame that is not read
    const TestFrame large = test_frame(kOneWay, 1, 1, 8 << 20);
    CHECK_THROWS(pair.left->send(large.out(), 0, no_interrupt), TimedOut);
  }
  pair.left_home->close();
  use(*pair.left_home);
  use(*pair.left);
  pair.left_home->close();
  use(*pair.left_home);
}

void test_after_loss(Kind kind) {
  Pair pair(kind);
  pair.left->fail("enough");
  use(*pair.left_home);
  use(*pair.left);
  while (!pair.right->is_lost()) pair.right_home->next(patient(), no_interrupt);
  use(*pair.right);
}

void test_with_further_streams() {
  const Striping striping{3, 1 << 16, 1 << 16, true};
  auto endpoint = std::make_shared<Endpoint>(0);
  auto [ours, theirs] = socket_pair();
  const auto link = endpoint->open_stream(std::move(ours), kLimits, striping);
  link->start();
  auto [beside, other] = socket_pair();
  link->join(std::move(beside));
  use(*endpoint);
  endpoint->close();
  use(*endpoint);
  use(*link);
}

// The child has copies of links and of an endpoint in which a thread of the parent sleeps.
void test_in_a_forked_child(Kind kind) {
  Pair pair(kind);
  Server server(pair.left_home, [](Event&) {});
  server.await_rest();
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    pair.left->close_after_fork();
    pair.left_home->close_after_fork();
    pair.left_home->wake();
    use(*pair.left);
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Threads are inside, and others come, while the endpoint closes. The sanitizers look, too.
void test_while_it_closes(Kind kind) {
  for (int round = 0; round < 20; ++round) {
    Pair pair(kind);
    std::atomic<bool> over{false};
    std::atomic<int> inside{0};
    std::vector<std::thread> threads;
    const auto go_on = [&](auto work) {
      threads.emplace_back([&, work] {
        for (++inside; !over; work()) {
        }
        work();
      });
    };
    go_on([&] { pair.left_home->next(now() + kMillisecond, no_interrupt); });
    go_on([&] { pair.left_home->wake(); });
    go_on([&] {
      may_fail([&] { pair.left->send(test_frame(kOneWay, 1, 5, 50).out(), 0, no_interrupt); });
    });
    while (inside < 3) std::this_thread::yield();
    pair.left_home->close();
    use(*pair.left_home);
    over = true;
    for (std::thread& thread : threads) thread.join();
  }
}

const TestFile kFile("test_closed", [] {
  checks = true;
  for (const Kind kind : kKinds) {
    test_after_close(kind, false);
    test_after_close(kind, true);
    test_after_loss(kind);
    test_while_it_closes(kind);
    test_in_a_forked_child(kind);
  }
  test_with_further_streams();
  CHECK(calls_seen > 100);  // and not the C library's
});

}  // namespace

}  // namespace farcall::test_closed
