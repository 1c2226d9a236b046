// A channel through shared memory: two rings, segments for large buffers, memory that a program lends
// the other, and a socket that rings the bell.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "channel.hpp"
#include "lent.hpp"
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
  // Whether the peer may lend us memory, and we it.
  bool lends = false;
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
  void await_outcome(std::uint64_t call_id) override { reader_.await(call_id); }

  void compose(const OutFrame& frame, Composed& composed) override;
  void discard(const Composed& composed) override;
  bool wait_for_room(const OutFrame& frame, Composed& composed, Nanoseconds deadline,
                     Interrupt interrupt) override;
  std::size_t write(const Part* parts, std::size_t count) override { return write(parts, count, 0); }
  void sent(const Composed& composed) override;
  bool write_at_once(const OutFrame& frame) override;
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) override;
  bool ask_for_space() override { return writer_.ask_for_bell(); }
  bool is_stream() const override { return false; }
  void wake_writer() override { writer_.wake(); }
  bool trim() override {
    const bool lent = lent_in_.trim();
    return segments_out_.trim() || lent;
  }

 private:
  enum class RecordType : std::uint32_t { kBell = 1, kSegment = 2, kLent = 3 };
  // What goes over the socket beside the rings.
  struct Record {
    RecordType type;
    std::uint32_t slot;
    std::uint64_t serial;
    std::uint64_t size;  // of what is lent: where it begins
  };
  // What was sent and the peer has not read, by the position in the ring after its frame.
  struct OnItsWay {
    std::uint64_t end;
    std::size_t in_segments;
    std::size_t lent;
  };

  LinkMemory& shared() const { return *reinterpret_cast<LinkMemory*>(memory_->data()); }
  std::size_t write(const Part* parts, std::size_t count, std::uint64_t outcome);
  void check_peer() const;
  void ring_bell();
  bool announce(SegmentName name, std::size_t size, int descriptor);
  bool send_record(Record record, int descriptor);
  bool receive_record();
  bool reserve(std::size_t size);
  void fill_segments(const OutFrame& frame, Composed& composed);
  bool goes_in_segment(const OutBuffer& buffer) const;
  std::size_t size_in_segments(const OutFrame& frame) const;
  bool is_lent(const OutBuffer& buffer) const {
    return bounds_.lends && buffer.descriptor >= 0 && buffer.size >= kSmallestLent;
  }
  void forget_read(std::uint64_t read);
  template <class IsThere>
  bool wait_for_peer(IsThere is_there, Nanoseconds deadline, Interrupt interrupt);
  bool lend(const OutFrame& frame, Composed& composed, Nanoseconds deadline, Interrupt interrupt);

  std::shared_ptr<SharedMemory> memory_;
  RingWriter writer_;
  RingReader reader_;
  SegmentWriter segments_out_;
  SegmentReader segments_in_;
  LentReader lent_in_;
  std::atomic<bool> ended_{false};  // nothing comes over the socket any more

  HeapPool& pool_;
  const RingBounds bounds_;
  std::atomic<std::size_t> reserved_{0};  // bytes in segments; see RingBounds
  // For who writes.
  std::deque<OnItsWay> on_their_way_;
  std::size_t lent_on_their_way_ = 0;
  std::uint64_t lent_ever_ = 0;
};

}  // namespace farcall
