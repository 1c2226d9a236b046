// Counts what `new` gives and, if a test asks for it, has no memory for large pieces. For one file
// of a program.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

namespace farcall {

inline std::atomic<std::size_t> allocations{0};
inline std::atomic<std::size_t> largest_allocation{~std::size_t{0}};

}  // namespace farcall

// Not inline, or GCC takes `free` for a mistake where it sees both `new` and that.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++farcall::allocations;
  void* memory = size > farcall::largest_allocation ? nullptr : std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
