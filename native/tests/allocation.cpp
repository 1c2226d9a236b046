#include "allocation.hpp"

#include <cstdlib>
#include <new>

// Not inline, or GCC takes `free` for a mistake where it sees both `new` and that.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++farcall::allocations;
  void* memory = size > farcall::largest_allocation ? nullptr : std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
