// A stream of bytes through memory that two processes share.
//
// One process writes, the other reads; no locks. Each keeps its own position privately and only
// publishes it. What the other publishes is checked and believed only as far as it costs nothing
// but this link: a peer that scribbles over the memory can't make us read or write outside it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "clock.hpp"
#include "futex.hpp"

namespace farcall {

// In shared memory. The positions count bytes since the link began and never wrap (2**64).
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> tail;  // how much was written
  alignas(64) std::atomic<std::uint64_t> head;  // how much was read
  // The reader sleeps (1) and wants the writer to ring the doorbell.
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;
  // Not for the outcome of this call, which somebody is about to look for (0: of none).
  std::atomic<std::uint64_t> awaited;
  // The writer waits for space: 0, or one of the values below.
  alignas(64) std::atomic<std::uint32_t> writer_waits;
  std::atomic<std::uint32_t> space;  // changes whenever a waiting writer is to look again
};

constexpr std::uint32_t kWriterSleeps = 1;     // on `space`
constexpr std::uint32_t kWriterWantsBell = 2;  // what is left of a frame waits for the endpoint

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Whom to tell after a step. Ringing is the caller's, who has the socket.
enum class Tell { kNobody, kBell };

class RingWriter {
 public:
  // `size` is a power of two.
  RingWriter(RingControl& control, std::uint8_t* data, std::size_t size)
      : control_(control), data_(data), size_(size) {}

  // Copies as much as there is space for. Not seen by the reader before `publish`.
  // Throws LinkFailure: the reader's position makes no sense.
  std::size_t write(const std::uint8_t* data, std::size_t size);

  // `outcome`: of which call this is the outcome, and all of it; 0: of none.
  Tell publish(std::uint64_t outcome = 0);
  // How much `write` takes at once.
  std::size_t space();

  // Sleep until half of the ring is free, or a little. False: the deadline passed.
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt);
  // The same, until the reader has read on from `read`.
  bool wait_for_progress(std::uint64_t read, Nanoseconds deadline, Interrupt interrupt);
  // Have the reader ring the bell when there is space. True: there is some already.
  bool ask_for_bell();
  // Wake whoever sleeps in `wait_for_space`, since the link is lost.
  void wake();

  // How much was written, and of that read.
  std::uint64_t written() const { return tail_; }
  std::uint64_t read_by_peer() { return checked_head(); }

 private:
  std::uint64_t checked_head();
  template <class IsDone>
  bool wait(Nanoseconds deadline, Interrupt interrupt, IsDone is_done);

  RingControl& control_;
  std::uint8_t* const data_;
  const std::size_t size_;
  std::uint64_t tail_ = 0;
  std::uint64_t published_ = 0;
  std::uint64_t head_ = 0;  // as last seen
};

class RingReader {
 public:
  RingReader(RingControl& control, const std::uint8_t* data, std::size_t size)
      : control_(control), data_(data), size_(size) {}

  // As many of the next `size` bytes as there are. The space is the writer's again at `publish`.
  // Throws LinkFailure: the writer's position makes no sense.
  std::size_t read(std::uint8_t* data, std::size_t size);

  // Callable by any thread; everything else by one at a time.
  bool has_input() const {
    return control_.tail.load(std::memory_order_relaxed) != head_.load(std::memory_order_relaxed);
  }
  Tell publish();

  // Ask for the doorbell at the next byte. False: there is input already.
  bool arm();
  // No bell for the outcome of this call: who calls this looks for it soon, after `await(0)`.
  // Callable by any thread.
  void await(std::uint64_t call_id) { control_.awaited.store(call_id, std::memory_order_seq_cst); }
  // Nobody sleeps.
  void disarm() { control_.reader_sleeps.store(0, std::memory_order_relaxed); }

 private:
  RingControl& control_;
  const std::uint8_t* const data_;
  const std::size_t size_;
  std::atomic<std::uint64_t> head_{0};
  std::uint64_t published_ = 0;
  std::uint64_t tail_ = 0;  // as last seen
};

}  // namespace farcall
