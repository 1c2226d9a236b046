// A channel through shared memory: two rings, segments for large buffers, and a socket that rings the
// bell.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "channel.hpp"
#include "ring.hpp"
#include "segments.hpp"

namespace farcall {

// In the memory of a link: two rings, and the states of the segments of either side.
struct LinkMemory {
  static constexpr std::size_t kRing = 1 << 20;
  static constexpr std::uint64_t kMagic = 0x31'6d68'7363'6c66;  // "flcshm1"

  RingControl controls[2];
  SegmentStates states[2];
  alignas(64) std::uint8_t data[2][kRing];
};

struct RingBounds {
  // Bytes in segments that the peer has not read the frames of, or that are not sent yet. One frame
  // may be more.
  std::size_t on_their_way = 1 << 30;
  // With more shared memory mapped than that, what arrives in it is copied out.
  std::size_t mappings = SharedMemory::count_limit();
};

class RingChannel final : public Channel {
 public:
  // `side`: 0 for who dialled, 1 for the other.
  RingChannel(Descriptor socket, std::shared_ptr<SharedMemory> memory, int side, HeapPool& pool,
              const RingBounds& bounds = {});

  // Both sides call this on a connected Unix socket. Null: there is no shared memory for the two,
  // and the socket is as before. Throws LinkFailure: the connection is of no use.
  static std::shared_ptr<SharedMemory> set_up(const Descriptor& socket, int side,
                                              Nanoseconds deadline);

  std::size_t read(std::uint8_t* data, std::size_t size) override;
  BlockRef segment(std::uint64_t place, std::size_t size) override;
  bool has_segments() const override { return true; }
  bool may_have_input() const override {
    return reader_.has_input() || ended_.load(std::memory_order_relaxed);
  }
  bool look() override { return may_have_input(); }
  void on_readable() override;
  void finish_reading() override;
  bool arm() override { return reader_.arm() && !ended_.load(std::memory_order_relaxed); }
  void disarm() override { reader_.disarm(); }

  void compose(const OutFrame& frame, Composed& composed) override;
  void discard(const Composed& composed) override;
  bool wait_for_room(const OutFrame& frame, Composed& composed, Nanoseconds deadline,
                     Interrupt interrupt) override;
  std::size_t write(const Part* parts, std::size_t count) override;
  void sent(const Composed& composed) override;
  bool write_at_once(const OutFrame& frame) override;
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) override;
  bool ask_for_space() override { return writer_.ask_for_bell(); }
  bool is_stream() const override { return false; }
  void wake_writer() override { writer_.wake(); }
  bool trim() override { return segments_out_.trim(); }

 private:
  enum class RecordType : std::uint32_t { kBell = 1, kSegment = 2 };
  // What goes over the socket beside the rings.
  struct Record {
    RecordType type;
    std::uint32_t slot;
    std::uint64_t serial;
    std::uint64_t size;
  };

  LinkMemory& shared() const { return *reinterpret_cast<LinkMemory*>(memory_->data()); }
  void check_peer() const;
  void ring_bell();
  bool announce(SegmentName name, std::size_t size, int descriptor);
  bool receive_record();
  bool reserve(std::size_t size);
  void fill_segments(const OutFrame& frame, Composed& composed);
  void forget_read(std::uint64_t read);

  std::shared_ptr<SharedMemory> memory_;
  RingWriter writer_;
  RingReader reader_;
  SegmentWriter segments_out_;
  SegmentReader segments_in_;
  std::atomic<bool> ended_{false};  // nothing comes over the socket any more

  HeapPool& pool_;
  const RingBounds bounds_;
  std::atomic<std::size_t> reserved_{0};  // bytes in segments; see RingBounds
  // Those of frames that were sent, by the position after the frame. For who writes.
  std::deque<std::pair<std::uint64_t, std::size_t>> on_their_way_;
};

}  // namespace farcall
