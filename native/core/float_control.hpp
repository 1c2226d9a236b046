// How the calling thread computes with floating-point numbers: whether it flushes denormal numbers
// to zero, how it rounds, what it traps. `torch.set_flush_denormal` changes that.
//
// On x86 the MXCSR register, on 64-bit ARM the FPCR. A new thread inherits it from the thread that
// starts it. Elsewhere it is not read, and counts as never changed.
#pragma once

#include <cstdint>

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace farcall {

inline std::uint64_t read_float_control() {
#if defined(__SSE__) || defined(__x86_64__)
  constexpr unsigned kExceptionFlags = 0x3f;  // set by any arithmetic: no setting
  return _mm_getcsr() & ~kExceptionFlags;
#elif defined(__aarch64__)
  std::uint64_t value = 0;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
#else
  return 0;
#endif
}

inline void write_float_control(std::uint64_t value) {
#if defined(__SSE__) || defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(value));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(value));
#else
  static_cast<void>(value);
#endif
}

}  // namespace farcall
