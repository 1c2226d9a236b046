// Allocations by the `new` of allocation.cpp, which a test may leave without memory for large pieces.
#pragma once

#include <atomic>
#include <cstddef>

namespace farcall {

inline std::atomic<std::size_t> allocations{0};
inline std::atomic<std::size_t> largest_allocation{~std::size_t{0}};

}  // namespace farcall
