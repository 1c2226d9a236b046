// HeapPool, Descriptor, SharedMemory.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>
#include <thread>

#include "check.hpp"
#include "core/errors.hpp"
#include "core/memory.hpp"
#include "core/shared_memory.hpp"

namespace farcall::test_memory {

namespace {

void test_sizes() {
  for (std::size_t size = 1; size < (std::size_t{1} << 36); size += size / 7 + 1) {
    const std::size_t whole = pooled_size(size);
    CHECK(whole >= size && whole % 4096 == 0);
    CHECK(size < 4096 || whole <= 2 * size);
    CHECK(pooled_size(whole) == whole);  // or memory that was given back would not be found again
  }
}

void test_pieces_of_any_size() {
  auto pool = std::make_shared<HeapPool>();
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, HeapPool::kSmallest - 1,
                                 HeapPool::kSmallest, std::size_t{3} << 20}) {
    BlockRef block = pool->allocate(size);
    CHECK(block->size() == size);
    CHECK(reinterpret_cast<std::uintptr_t>(block->data()) % 64 == 0);
    if (size > 0) std::memset(block->data(), 1, size);
  }
  CHECK_THROWS(pool->allocate(std::size_t{1} << 62), BadFrame);
}

void test_reuse_and_trim() {
  auto pool = std::make_shared<HeapPool>();
  constexpr std::size_t size = 100'000;
  std::uint8_t* first = pool->allocate(size)->data();
  BlockRef again = pool->allocate(size - 1000);
  CHECK(again->data() == first);  // warm
  CHECK(pool->allocate(size)->data() != first);
  again.reset();
  CHECK(pool->trim());  // both are kept until there was time to ask for them
  CHECK(!pool->trim());
  CHECK(!pool->trim());
  BlockRef survivor = pool->allocate(size);
  pool.reset();
  std::memset(survivor->data(), 1, size);  // keeps the pool
}

void test_memory_for_pieces() {
  auto pool = std::make_shared<HeapPool>();
  constexpr std::size_t size = 4 << 20;
  const std::uint8_t* kept = pool->allocate(size)->data();
  BlockRef block = pool->allocate_for_pieces(size, 4096);
  CHECK(block->data() != kept && block->size() == size);  // that may have huge pages
  std::memset(block->data(), 1, size);
  CHECK(pool->allocate_for_pieces(size, 1 << 20)->data() == kept);
  CHECK_THROWS(pool->allocate_for_pieces(std::size_t{1} << 62, 1), BadFrame);
}

void test_pool_of_threads() {
  auto pool = std::make_shared<HeapPool>();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&pool, i] {
      for (std::size_t round = 0; round < 300; ++round) {
        const std::size_t size = 60'000 + round * 97;
        BlockRef block = pool->allocate(size);
        std::memset(block->data(), i, size);
        for (const std::size_t place : {std::size_t{0}, size / 2, size - 1}) {
          CHECK(block->data()[place] == i);
        }
        if (round % 50 == 0) pool->trim();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void test_shared_memory() {
  auto [memory, descriptor] = SharedMemory::create(10'000);
  CHECK(memory && descriptor && memory->size() == 10'000);
  CHECK(memory->data()[9'999] == 0);
  auto other = SharedMemory::map(descriptor, 10'000);
  CHECK(other && other->data() != memory->data());
  memory->data()[5] = 7;
  CHECK(other->data()[5] == 7);
  CHECK(ftruncate(descriptor.get(), 0) != 0);  // sealed
  CHECK(ftruncate(descriptor.get(), 20'000) != 0);
  CHECK(!SharedMemory::map(descriptor, 9'999));
  CHECK(!SharedMemory::map(descriptor, 1 << 20));
  CHECK(!SharedMemory::map(Descriptor(), 10'000));
  CHECK(!SharedMemory::create(std::size_t{1} << 60).first);
}

Descriptor memfd(std::size_t size, int seals) {
  Descriptor descriptor(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(descriptor.get(), static_cast<off_t>(size)) == 0);
  CHECK(fcntl(descriptor.get(), F_ADD_SEALS, seals) == 0);
  return descriptor;
}

// Other memory that a peer may offer instead.
void test_shared_memory_of_a_liar() {
  constexpr std::size_t size = 1 << 16;
  const auto filled = [](int seals) {
    Descriptor descriptor = memfd(size, 0);
    CHECK(posix_fallocate(descriptor.get(), 0, size) == 0);
    CHECK(fcntl(descriptor.get(), F_ADD_SEALS, seals) == 0);
    return descriptor;
  };
  CHECK(SharedMemory::map(filled(F_SEAL_SHRINK), size));
  CHECK(!SharedMemory::map(filled(0), size));            // could be made smaller
  CHECK(!SharedMemory::map(filled(F_SEAL_GROW), size));
  CHECK(!SharedMemory::map(filled(F_SEAL_SHRINK | F_SEAL_WRITE), size));
  CHECK(!SharedMemory::map(memfd(size, F_SEAL_SHRINK), size));  // sparse: its memory would be ours
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  const Descriptor out(ends[0]), in(ends[1]);
  CHECK(!SharedMemory::map(out, size));
  const Descriptor file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  CHECK(!SharedMemory::map(file, size));
}

void test_descriptor() {
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  Descriptor in(ends[1]);
  {
    Descriptor out(ends[0]);
    Descriptor moved(std::move(out));
    CHECK(!out && moved && moved.get() == ends[0]);
    out = std::move(moved);
    CHECK(out && !moved);
  }
  CHECK(fcntl(ends[0], F_GETFD) == -1 && errno == EBADF);
  in = Descriptor();
  CHECK(fcntl(ends[1], F_GETFD) == -1);
}

const TestFile kFile("test_memory", [] {
  test_sizes();
  test_pieces_of_any_size();
  test_reuse_and_trim();
  test_memory_for_pieces();
  test_pool_of_threads();
  test_shared_memory();
  test_shared_memory_of_a_liar();
  test_descriptor();
});

}  // namespace

}  // namespace farcall::test_memory
