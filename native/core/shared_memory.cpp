#include "shared_memory.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>

#include "memory.hpp"
#include "memory_budget.hpp"

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

void SpareDescriptor::give() {
  MutexLock lock(mutex_);
  descriptor_.reset();
}

void SpareDescriptor::restore() {
  MutexLock lock(mutex_);
  if (!descriptor_ && !has_ended_) descriptor_.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void SpareDescriptor::end() {
  MutexLock lock(mutex_);
  has_ended_ = true;
  descriptor_.reset();
}

std::shared_ptr<SharedMemory> SharedMemory::map_whole(int fd, std::size_t size, bool is_sparse) {
  if (count() >= 8 * count_limit()) return nullptr;
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  if (is_sparse) {
    madvise(data, size, MADV_NOHUGEPAGE);  // the first touch would take 2 MiB
  } else {
    advise_huge(data, size);
  }
  return std::shared_ptr<SharedMemory>(new SharedMemory(static_cast<std::uint8_t*>(data), size));
}

std::pair<std::shared_ptr<SharedMemory>, Descriptor> SharedMemory::create(std::size_t size,
                                                                          const Plan& plan) {
  const std::size_t first = plan.first == 0 ? size : plan.first;
  if (plan.budget && !plan.budget->has(first)) return {};
  Descriptor descriptor(memfd_create("farcall", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor || ftruncate(descriptor.get(), static_cast<off_t>(size)) != 0 ||
      fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return {};
  }
  auto memory = map_whole(descriptor.get(), size, first < size);
  if (!memory) return {};
  memory->budget_ = plan.budget;
  if (plan.budget && !plan.budget->take(first)) return {};
  memory->counted_ = plan.budget ? first : 0;
  // Now, where it can fail: later the first touch of a page that the system lacks would kill us.
  if (madvise(memory->data_, first, MADV_POPULATE_WRITE) != 0 &&
      (errno != EINVAL || posix_fallocate(descriptor.get(), 0, static_cast<off_t>(first)) != 0)) {
    return {};
  }
  return {std::move(memory), std::move(descriptor)};
}

std::shared_ptr<SharedMemory> SharedMemory::map(const Descriptor& descriptor, std::size_t size,
                                                const Plan& plan) {
  const std::size_t first = plan.first == 0 ? size : plan.first;
  const std::optional<struct stat> status = status_in_memory(descriptor);
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (!status || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      static_cast<std::uint64_t>(status->st_size) != size ||
      static_cast<std::uint64_t>(status->st_blocks) * 512 < first) {
    return nullptr;
  }
  auto memory = map_whole(descriptor.get(), size, first < size);
  if (!memory) return nullptr;
  memory->budget_ = plan.budget;
  // One call instead of a fault for each page; without it they come one by one.
  memory->touch(0, first);
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::map_imported(const Descriptor& descriptor,
                                                         std::size_t size) {
  return map_whole(descriptor.get(), size);
}

bool SharedMemory::touch(std::size_t offset, std::size_t size) {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t start = offset / page * page;
  return madvise(data_ + start, offset - start + size, MADV_POPULATE_WRITE) == 0 || errno == EINVAL;
}

bool SharedMemory::take(std::size_t offset, std::size_t size) {
  if (budget_ && !budget_->take(size)) return false;
  counted_.fetch_add(size, std::memory_order_relaxed);
  if (touch(offset, size)) return true;
  give_back(offset, size);
  return false;
}

bool SharedMemory::give_back(std::size_t offset, std::size_t size) {
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t start = (offset + page - 1) / page * page;
  const std::size_t end = (offset + size) / page * page;
  if (start < end && madvise(data_ + start, end - start, MADV_REMOVE) != 0) return false;
  counted_.fetch_sub(size, std::memory_order_relaxed);
  if (budget_) budget_->give_back(size);
  return true;
}

SharedMemory::SharedMemory(std::uint8_t* data, std::size_t size) : data_(data), size_(size) {
  mapped.fetch_add(1, std::memory_order_relaxed);
}

SharedMemory::~SharedMemory() {
  munmap(data_, size_);
  if (budget_) budget_->give_back(counted_.load(std::memory_order_relaxed));
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

std::optional<struct stat> status_in_memory(const Descriptor& descriptor) {
  struct stat status;
  struct statfs system;
  if (fstat(descriptor.get(), &status) != 0 || fstatfs(descriptor.get(), &system) != 0 ||
      !S_ISREG(status.st_mode) || system.f_type != TMPFS_MAGIC) {
    return std::nullopt;
  }
  return status;
}

}  // namespace farcall
