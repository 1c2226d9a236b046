// Memory that two processes have mapped, and that is gone with them: it never has a name.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace farcall {

class MemoryBudget;

// A file descriptor that is closed at the end.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

class SharedMemory {
 public:
  // Options of `create` and `map`. The first bytes are there from the start; the bytes after them
  // have no pages until `take`. With a budget, the pages that this process adds count there.
  struct Plan {
    std::size_t first = 0;  // 0: all
    std::shared_ptr<MemoryBudget> budget;
  };

  // Fresh memory of zeros, and a descriptor by which another process can map it. Its size can't be
  // changed by anyone. Null if the system has none, or the budget is spent.
  static std::pair<std::shared_ptr<SharedMemory>, Descriptor> create(std::size_t size,
                                                                     const Plan& plan);
  static std::pair<std::shared_ptr<SharedMemory>, Descriptor> create(std::size_t size) {
    return create(size, Plan{});
  }

  // The memory that another process created. Null if it can't be mapped, is no ordinary file in memory,
  // has another size, could be made smaller by its creator (our death by SIGBUS), or has fewer pages
  // than it should, which we would have to add.
  static std::shared_ptr<SharedMemory> map(const Descriptor& descriptor, std::size_t size,
                                           const Plan& plan);
  static std::shared_ptr<SharedMemory> map(const Descriptor& descriptor, std::size_t size) {
    return map(descriptor, size, Plan{});
  }

  // A file of which nothing is known but its kind and size. Null if it can't be mapped.
  static std::shared_ptr<SharedMemory> map_imported(const Descriptor& descriptor, std::size_t size);

  // Makes all pages of a part ready, in one call. Returns false if there is no memory for them, or
  // they are not in the file any more.
  bool touch(std::size_t offset, std::size_t size);

  // Adds the pages of a part that has none, which then count in the budget. Returns false, and adds
  // nothing, if the budget is spent or the system has no memory.
  bool take(std::size_t offset, std::size_t size);
  // Gives pages that `take` has added back to the system, for all processes. Returns false if the
  // system does not take them.
  bool give_back(std::size_t offset, std::size_t size);

  // How many this process has mapped. The system allows about 65,000 mappings of any kind.
  static std::size_t count();
  // How many are too many: what arrives is copied out of shared memory from there on. A sixteenth of
  // what the system allows. Nothing more is mapped beyond eight times as many, since the program
  // needs the rest.
  static std::size_t count_limit();

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  SharedMemory(std::uint8_t* data, std::size_t size);
  static std::shared_ptr<SharedMemory> map_whole(int fd, std::size_t size, bool is_sparse = false);

  std::uint8_t* data_;
  std::size_t size_;
  std::shared_ptr<MemoryBudget> budget_;
  std::atomic<std::size_t> counted_{0};  // bytes of it that count there
};

// The system's word on a descriptor that a peer sent, if that is an ordinary file in memory: a
// memfd, or a file of a tmpfs. Others may block a thread that touches them, or kill by SIGBUS, as
// one of huge pages does when the system has none left.
std::optional<struct stat> status_in_memory(const Descriptor& descriptor);

}  // namespace farcall
