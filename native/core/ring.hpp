// A stream of bytes through memory that two processes share.
//
// One process writes, the other reads; no locks. Each keeps its own position privately and only
// publishes it. The other's position is checked and believed only as far as it costs nothing
// but this link: a peer that scribbles over the memory can't make us read or write outside it.
//
// A ring has windows of several sizes, and uses one of them at a time. The writer goes on in a larger
// one when the smaller one is full, and in the smallest one when little was sent for a while. So a
// link takes as much memory as it needs. The writer says at which position it changes the window;
// the reader finishes what lies in the old one first. The writer changes again only when the reader
// has read beyond that position: so no more than two windows have unread bytes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "clock.hpp"
#include "futex.hpp"

namespace farcall {

// In shared memory. The positions count bytes since the link began and never wrap (2**64).
struct RingControl {
  alignas(64) std::atomic<std::uint64_t> tail;  // how much was written
  // The last change of the window: its position * 4 + the new window. 0: there was none.
  std::atomic<std::uint64_t> turn;
  alignas(64) std::atomic<std::uint64_t> head;  // how much was read
  // The reader sleeps (1) and wants the writer to ring the doorbell.
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;
  // Not for the outcome of this call, which a thread is about to look for (0: of none).
  std::atomic<std::uint64_t> awaited;
  // The writer waits for space: 0, or one of the values below.
  alignas(64) std::atomic<std::uint32_t> writer_waits;
  std::atomic<std::uint32_t> space;  // changes whenever a waiting writer is to look again
};

constexpr std::uint32_t kWriterSleeps = 1;     // on `space`
constexpr std::uint32_t kWriterWantsBell = 2;  // the rest of a frame waits for the endpoint

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// The sides to tell after a step. The caller rings, for it has the socket.
enum class Tell { kNobody, kBell };

// From the smallest to the largest. Sizes are powers of two; the windows don't overlap.
constexpr unsigned kWindows = 3;
struct RingWindow {
  std::uint8_t* data;
  std::size_t size;
};
using RingWindows = std::array<RingWindow, kWindows>;

// Has the memory of the windows but the smallest one, whose memory is always there.
class WindowKeeper {
 public:
  virtual ~WindowKeeper() = default;
  // The writer wants this window. Returns whether there is memory for it.
  virtual bool take(unsigned window) = 0;
  // The writer has no more use for this window, if it had it, and the reader has read all of it.
  virtual void give_back(unsigned window) = 0;
  // The reader is about to read this window. Returns whether its pages can be mapped.
  virtual bool touch(unsigned window) = 0;
};

class RingWriter {
 public:
  RingWriter(RingControl& control, const RingWindows& windows, WindowKeeper& keeper)
      : control_(control), windows_(windows), keeper_(keeper) {}

  // Copies as much as there is space for. Not seen by the reader before `publish`.
  // Throws LinkFailure: the reader's position makes no sense.
  std::size_t write(const std::uint8_t* data, std::size_t size);

  // `outcome`: of which call this is the outcome, and all of it; 0: of none.
  Tell publish(std::uint64_t outcome = 0);
  // How much `write` takes at once.
  std::size_t space();
  // Whether it takes that much at once, in a larger window if need be.
  bool fits(std::size_t size) {
    return room() >= size || space() >= size || (grow(size) && room() >= size);
  }
  // Go on in the smallest window if the reader has read everything, and give back the others.
  // Returns whether there is still one to give back.
  bool shrink();
  bool is_grown() const { return window_ > 0; }

  // Sleep until half of the window is free, or a little. Returns false if the deadline passed.
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt);
  // The same, until the reader has read on from `read`.
  bool wait_for_progress(std::uint64_t read, Nanoseconds deadline, Interrupt interrupt);
  // Have the reader ring the bell when there is space. Returns true if there is some already.
  bool ask_for_bell();
  // Wake a thread that sleeps in `wait_for_space`, since the link is lost.
  void wake();

  // How much was written, and of that read.
  std::uint64_t written() const { return tail_; }
  std::uint64_t read_by_peer() { return checked_head(); }

 private:
  std::uint64_t checked_head();
  std::uint8_t* data() const { return windows_[window_].data; }
  std::size_t size() const { return windows_[window_].size; }
  // How much of the window is in use, as far as is known.
  std::size_t used() const { return tail_ - (head_ > from_ ? head_ : from_); }
  std::size_t room() const { return size() - used(); }
  bool grow(std::size_t size);
  void turn(unsigned window);
  template <class IsDone>
  bool wait(Nanoseconds deadline, Interrupt interrupt, IsDone is_done);

  RingControl& control_;
  const RingWindows windows_;
  WindowKeeper& keeper_;
  unsigned window_ = 0;
  bool has_turned_ = false;
  std::uint64_t from_ = 0;  // where the window was changed last
  std::uint64_t tail_ = 0;
  std::uint64_t published_ = 0;
  std::uint64_t head_ = 0;  // as last seen
};

class RingReader {
 public:
  RingReader(RingControl& control, const RingWindows& windows, WindowKeeper& keeper)
      : control_(control), windows_(windows), keeper_(keeper) {}

  // As many of the next `size` bytes as there are. The space is the writer's again at `publish`.
  // Throws LinkFailure: the writer's position makes no sense.
  std::size_t read(std::uint8_t* data, std::size_t size);

  // Callable by any thread; everything else by one at a time.
  bool has_input() const {
    return control_.tail.load(std::memory_order_relaxed) != head_.load(std::memory_order_relaxed);
  }
  Tell publish();

  // Ask for the doorbell at the next byte. Returns false if there is input already.
  bool arm();
  // No bell for the outcome of this call: its caller looks for it soon, after `await(0)`.
  // Callable by any thread.
  void await(std::uint64_t call_id) { control_.awaited.store(call_id, std::memory_order_seq_cst); }
  // The reader no longer sleeps.
  void disarm() { control_.reader_sleeps.store(0, std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

  void look();
  void note_turn(std::uint64_t turn, std::uint64_t tail);
  void enter_next_window();
  std::size_t size() const { return windows_[window_].size; }

  RingControl& control_;
  const RingWindows windows_;
  WindowKeeper& keeper_;
  unsigned window_ = 0;
  std::uint64_t from_ = 0;              // where the window was changed last
  std::uint64_t turn_ = 0;              // the last change that was believed
  std::uint64_t next_from_ = kNowhere;  // where it will be changed
  unsigned next_window_ = 0;
  std::atomic<std::uint64_t> head_{0};
  std::uint64_t published_ = 0;
  std::uint64_t tail_ = 0;  // as last seen
};

}  // namespace farcall
