#include "shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>

#include "memory.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; older ones say EINVAL
#endif

namespace farcall {

namespace {

std::atomic<std::size_t> mapped{0};

}  // namespace

void Descriptor::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

std::shared_ptr<SharedMemory> SharedMemory::map_whole(int fd, std::size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  advise_huge(data, size);
  return std::shared_ptr<SharedMemory>(new SharedMemory(static_cast<std::uint8_t*>(data), size));
}

std::pair<std::shared_ptr<SharedMemory>, Descriptor> SharedMemory::create(std::size_t size) {
  Descriptor descriptor(memfd_create("farcall", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor || ftruncate(descriptor.get(), static_cast<off_t>(size)) != 0 ||
      fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return {};
  }
  auto memory = map_whole(descriptor.get(), size);
  if (!memory) return {};
  // Now, where it can fail: later the first touch of a page that the system lacks would kill us.
  if (madvise(memory->data_, size, MADV_POPULATE_WRITE) != 0 &&
      (errno != EINVAL || posix_fallocate(descriptor.get(), 0, static_cast<off_t>(size)) != 0)) {
    return {};
  }
  return {std::move(memory), std::move(descriptor)};
}

std::shared_ptr<SharedMemory> SharedMemory::map(const Descriptor& descriptor, std::size_t size) {
  struct stat status;
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(descriptor.get(), &status) != 0 ||
      static_cast<std::uint64_t>(status.st_size) != size ||
      static_cast<std::uint64_t>(status.st_blocks) * 512 < size) {
    return nullptr;
  }
  auto memory = map_whole(descriptor.get(), size);
  // One call instead of a fault for each page; without it they come one by one.
  if (memory) madvise(memory->data_, size, MADV_POPULATE_WRITE);
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::map_lent(const Descriptor& descriptor,
                                                     std::size_t size) {
  return map_whole(descriptor.get(), size);
}

bool SharedMemory::touch(std::size_t offset, std::size_t size) {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t start = offset / page * page;
  return madvise(data_ + start, offset - start + size, MADV_POPULATE_WRITE) == 0 ||
         errno == EINVAL;
}

SharedMemory::SharedMemory(std::uint8_t* data, std::size_t size) : data_(data), size_(size) {
  mapped.fetch_add(1, std::memory_order_relaxed);
}

SharedMemory::~SharedMemory() {
  munmap(data_, size_);
  mapped.fetch_sub(1, std::memory_order_relaxed);
}

std::size_t SharedMemory::count() { return mapped.load(std::memory_order_relaxed); }

std::size_t SharedMemory::count_limit() {
  static const std::size_t limit = [] {
    std::size_t allowed = 65530;  // the system's default
    std::ifstream("/proc/sys/vm/max_map_count") >> allowed;
    return allowed / 16;
  }();
  return limit;
}

}  // namespace farcall
