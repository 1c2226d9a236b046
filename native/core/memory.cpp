#include "memory.hpp"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <new>
#include <string>

#include "errors.hpp"
#include "forks.hpp"
#include "shared_memory.hpp"

namespace farcall {

namespace {

constexpr std::size_t kPage = 4 << 10;
constexpr std::size_t kHugePage = 2 << 20;

class MallocBlock final : public Block {
 public:
  explicit MallocBlock(std::size_t size)
      : Block(static_cast<std::uint8_t*>(
                  std::aligned_alloc(64, (size + 63) / 64 * 64 + (size == 0) * 64)),
              size) {
    if (data() == nullptr) throw std::bad_alloc();
  }
  ~MallocBlock() override { std::free(data()); }
};

class MappedBlock final : public Block {
 public:
  explicit MappedBlock(std::size_t size) : Block(map(size), size) {}
  ~MappedBlock() override { munmap(data(), size()); }

 private:
  static std::uint8_t* map(std::size_t size) {
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    madvise(mapped, size, MADV_NOHUGEPAGE);
    return static_cast<std::uint8_t*>(mapped);
  }
};

[[noreturn]] void throw_no_memory(std::size_t size) {
  throw BadFrame("no memory for a frame part of " + std::to_string(size) + " bytes");
}

// Memory that begins at a multiple of a huge page, if it has that size.
void* map_fresh(std::size_t size) {
  const std::size_t extra = size >= kHugePage ? kHugePage : 0;
  void* mapped = mmap(nullptr, size + extra, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (extra == 0) return mapped;
  const auto start = reinterpret_cast<std::uintptr_t>(mapped);
  const std::uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(mapped, aligned - start);
  const std::uintptr_t end = start + size + extra;
  if (end > aligned + size) munmap(reinterpret_cast<void*>(aligned + size), end - aligned - size);
  advise_huge(reinterpret_cast<void*>(aligned), size);
  return reinterpret_cast<void*>(aligned);
}

}  // namespace

std::size_t pooled_size(std::size_t size) {
  const std::size_t step = std::bit_ceil(size) / 8;
  const std::size_t page = size >= kHugePage ? kHugePage : kPage;
  const std::size_t unit = step > page ? step : page;
  return (size + unit - 1) / unit * unit;
}

void advise_huge(void* data, std::size_t size) {
  if (size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);  // it does without where that fails
}

class HeapPool::Piece final : public Block {
 public:
  Piece(std::shared_ptr<HeapPool> pool, void* data, std::size_t size, std::size_t whole)
      : Block(static_cast<std::uint8_t*>(data), size),
        pool_(std::move(pool)),
        whole_(whole),
        generation_(fork_generation()) {}
  ~Piece() override {
    if (generation_ == fork_generation()) {
      pool_->give_back(data(), whole_);
    } else {
      munmap(data(), whole_);  // a lock of the pool that was held at the fork is held here forever
    }
  }

 private:
  std::shared_ptr<HeapPool> pool_;
  std::size_t whole_;
  std::uint32_t generation_;
};

HeapPool::HeapPool() : empty_(std::make_shared<MallocBlock>(0)) {}

HeapPool::~HeapPool() {
  for (auto& [size, pieces] : kept_) {
    for (Kept& piece : pieces) munmap(piece.data, size);
  }
}

BlockRef HeapPool::allocate(std::size_t size) {
  if (size == 0) return empty_;
  try {
    if (size < kSmallest) return std::make_shared<MallocBlock>(size);
    const std::size_t whole = pooled_size(size);
    void* data = nullptr;
    {
      MutexLock lock(mutex_);
      auto found = kept_.find(whole);
      if (found != kept_.end() && !found->second.empty()) {
        data = found->second.back().data;
        found->second.pop_back();
        bytes_kept_ -= whole;
      }
    }
    if (data == nullptr) data = map_fresh(whole);
    if (data != nullptr) return std::make_shared<Piece>(shared_from_this(), data, size, whole);
  } catch (const std::bad_alloc&) {
  }
  throw_no_memory(size);
}

// Half a huge page for each piece is taken soon enough. Kept memory would have huge pages.
BlockRef HeapPool::allocate_for_pieces(std::size_t size, std::size_t piece) {
  if (size < kHugePage || piece >= kHugePage / 2) return allocate(size);
  try {
    return std::make_shared<MappedBlock>(size);
  } catch (const std::bad_alloc&) {
    throw_no_memory(size);
  }
}

void HeapPool::give_back(void* data, std::size_t size) {
  {
    MutexLock lock(mutex_);
    if (bytes_kept_ + size <= kKept) {
      try {
        kept_[size].push_back({data, false});
        bytes_kept_ += size;
        return;
      } catch (const std::bad_alloc&) {
      }
    }
  }
  munmap(data, size);
}

bool HeapPool::trim() {
  std::vector<std::pair<void*, std::size_t>> rested;
  bool any = false;
  {
    MutexLock lock(mutex_);
    for (auto& [size, pieces] : kept_) {
      std::vector<Kept> fresh;
      for (Kept& piece : pieces) {
        if (piece.rested) {
          rested.emplace_back(piece.data, size);
          bytes_kept_ -= size;
        } else {
          fresh.push_back({piece.data, true});
        }
      }
      pieces = std::move(fresh);
    }
    any = bytes_kept_ > 0;
  }
  for (auto& [data, size] : rested) munmap(data, size);
  return any;
}

}  // namespace farcall
