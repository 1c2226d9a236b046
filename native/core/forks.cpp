#include "forks.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <new>

namespace farcall {

namespace {

// The inode of the socket behind each descriptor, 0 for none. The handler may run in any child of a
// process with threads, so it takes no lock and allocates nothing: blocks are never freed.
constexpr std::size_t kBlockSize = 1024;
constexpr std::size_t kBlocks = 1024;  // Linux allows about a million descriptors by default

struct InodeBlock {
  std::atomic<std::uint64_t> inodes[kBlockSize] = {};
};

std::atomic<InodeBlock*> blocks[kBlocks];
std::atomic<std::uint32_t> forks{0};

std::uint64_t inode_of(int fd) {
  struct stat status;
  return fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode) ? status.st_ino : 0;
}

// A socket without a peer. The descriptor stays taken, so that its owner, who closes it later, does
// not close a file that the child has opened meanwhile.
void replace(int fd, int& placeholder) {
  if (placeholder < 0) placeholder = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (placeholder >= 0 && dup3(placeholder, fd, O_CLOEXEC) >= 0) return;
  close(fd);  // no descriptor was left
}

// In the child. Calls only functions that are safe in a signal handler.
void on_fork() {
  const int error = errno;
  forks.fetch_add(1, std::memory_order_relaxed);
  int placeholder = -1;
  for (std::size_t i = 0; i < kBlocks; ++i) {
    const InodeBlock* block = blocks[i].load(std::memory_order_acquire);
    if (block == nullptr) continue;
    for (std::size_t j = 0; j < kBlockSize; ++j) {
      const std::uint64_t inode = block->inodes[j].load(std::memory_order_relaxed);
      if (inode == 0) continue;
      const int fd = static_cast<int>(i * kBlockSize + j);
      if (inode_of(fd) == inode) replace(fd, placeholder);
    }
  }
  if (placeholder >= 0) close(placeholder);
  errno = error;
}

const int registered = pthread_atfork(nullptr, nullptr, on_fork);

}  // namespace

void close_in_forked_children(int fd) {
  const auto index = static_cast<std::size_t>(fd);
  if (fd < 0 || index >= kBlocks * kBlockSize) return;
  std::atomic<InodeBlock*>& place = blocks[index / kBlockSize];
  InodeBlock* block = place.load(std::memory_order_acquire);
  if (block == nullptr) {
    InodeBlock* fresh = new (std::nothrow) InodeBlock;
    if (fresh == nullptr) return;
    if (place.compare_exchange_strong(block, fresh, std::memory_order_acq_rel)) {
      block = fresh;
    } else {
      delete fresh;
    }
  }
  block->inodes[index % kBlockSize].store(inode_of(fd), std::memory_order_relaxed);
}

std::uint32_t fork_generation() {
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

}  // namespace farcall
