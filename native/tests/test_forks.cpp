// Connections and other descriptors that children inherit, and those that they don't.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <thread>
#include <vector>

#include "core/forks.hpp"
#include "descriptors.hpp"
#include "pairs.hpp"

namespace farcall::test_forks {

namespace {

// Whether `is_right` holds in a child.
template <class IsRight>
bool in_child(IsRight is_right) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) _exit(is_right() ? 0 : 1);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
  return WEXITSTATUS(status) == 0;
}

ino_t inode_of(int fd) {
  struct stat status;
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

// The peer of a connection sees its end, though a child lives.
void test_child_does_not_keep_a_connection_open() {
  auto [ours, theirs] = socket_pair();
  close_in_forked_children(ours.get());
  auto [there, here] = socket_pair();  // the child lives until this one ends
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    char byte;
    here.reset();
    _exit(read(there.get(), &byte, 1) == 0 ? 0 : 1);
  }
  ours.reset();
  char byte;
  CHECK(recv(theirs.get(), &byte, 1, 0) == 0);
  here.reset();
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_descriptor_of_the_child_stays_taken_and_leads_nowhere() {
  auto [ours, theirs] = socket_pair();
  close_in_forked_children(ours.get());
  const ino_t before = inode_of(ours.get());
  const std::size_t count = count_descriptors();
  const int fd = ours.get();
  CHECK(in_child([=] {
    const char byte = 0;
    return count_descriptors() == count && inode_of(fd) != before && fcntl(fd, F_GETFD) == FD_CLOEXEC &&
           send(fd, &byte, 1, MSG_NOSIGNAL) < 0 && errno == ENOTCONN && close(fd) == 0;
  }));
  const char byte = 7;
  CHECK(send(fd, &byte, 1, 0) == 1);  // the parent's lives on
  char arrived = 0;
  CHECK(recv(theirs.get(), &arrived, 1, 0) == 1 && arrived == 7);
}

// No call says when a connection is closed: the number may be something else by then.
void test_descriptors_that_are_used_again_are_left_alone() {
  auto [ours, theirs] = socket_pair();
  const int fd = ours.get();
  close_in_forked_children(fd);
  ours.reset();
  auto [file, other] = socket_pair();
  if (file.get() != fd) CHECK(dup2(file.get(), fd) == fd);
  const ino_t socket = inode_of(fd);
  CHECK(in_child([=] { return inode_of(fd) == socket; }));
  int ends[2];
  CHECK(pipe(ends) == 0 && dup2(ends[0], fd) == fd);
  const ino_t pipe = inode_of(fd);
  CHECK(in_child([=] { return inode_of(fd) == pipe; }));
  close(ends[0]);
  close(ends[1]);
  if (file.get() != fd) close(fd);
  close_in_forked_children(-1);
  close_in_forked_children(1 << 30);
}

// Where the child can't have one more descriptor.
void test_full_table() {
  auto [ours, theirs] = socket_pair();
  auto [second, other] = socket_pair();
  const int first = ours.get(), last = second.get();
  close_in_forked_children(first);
  close_in_forked_children(last);
  const ino_t first_inode = inode_of(first), last_inode = inode_of(last);
  rlimit before;
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{3, before.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const bool right = in_child(
      [=] { return inode_of(first) != first_inode && inode_of(last) != last_inode; });
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(right);
}

void test_grandchildren() {
  const std::uint32_t generation = fork_generation();
  CHECK(in_child([=] {
    auto [mine, peer] = socket_pair();
    const int fd = mine.get();
    close_in_forked_children(fd);
    const ino_t inode = inode_of(fd);
    return fork_generation() == generation + 1 &&
           in_child([=] { return inode_of(fd) != inode && fork_generation() == generation + 2; });
  }));
  CHECK(fork_generation() == generation);
}

// Threads make connections while others fork.
void test_many_threads() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int round = 0; round < 50; ++round) {
        auto [ours, theirs] = socket_pair();
        const int fd = ours.get();
        close_in_forked_children(fd);
        const ino_t inode = inode_of(fd);
        CHECK(in_child([=] { return inode_of(fd) != inode; }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

const TestFile kFile("test_forks", [] {
  test_child_does_not_keep_a_connection_open();
  test_descriptor_of_the_child_stays_taken_and_leads_nowhere();
  test_descriptors_that_are_used_again_are_left_alone();
  test_full_table();
  test_grandchildren();
  test_many_threads();
});

}  // namespace

}  // namespace farcall::test_forks
