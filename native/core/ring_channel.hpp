// A channel through shared memory: two rings, segments for large buffers, memory of either program
// that the other one maps, and a socket that rings the bell.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "channel.hpp"
#include "imported_memory.hpp"
#include "memory_budget.hpp"
#include "ring.hpp"
#include "segments.hpp"

namespace farcall {

// In the memory of a link: two rings, and the states of the segments of either side. The part before
// `middle` is there from the start, the rest when a writer takes it.
struct LinkMemory {
  static constexpr std::uint64_t kMagic = 0x32'6d68'7363'6c66;  // "flcshm2"

  RingControl controls[2];
  SegmentStates states[2];
  alignas(4 << 10) std::uint8_t small[2][16 << 10];
  std::uint8_t middle[2][128 << 10];
  std::uint8_t large[2][1 << 20];

  // So much is there from the start.
  static constexpr std::size_t first();
  RingWindows windows(int side) {
    return {{{small[side], sizeof small[side]},
             {middle[side], sizeof middle[side]},
             {large[side], sizeof large[side]}}};
  }
};

constexpr std::size_t LinkMemory::first() { return offsetof(LinkMemory, middle); }

struct RingBounds {
  // Bytes in segments that the peer has not read the frames of, or that are not sent yet. One frame
  // may be more.
  std::size_t on_their_way = 1 << 30;
  // With more shared memory mapped than that, what arrives in it is copied out.
  std::size_t mappings = SharedMemory::count_limit();
  // Whether we map memory of the peer's program, and it ours (zero-copy).
  bool zero_copy = false;
};

class RingChannel final : public Channel {
 public:
  // `side`: 0 for the dialler, 1 for the other.
  RingChannel(Descriptor socket, std::shared_ptr<SharedMemory> memory, int side, EndpointMemory& home,
              const RingBounds& bounds = {});

  // Both sides call this on a connected Unix socket. Null: there is no shared memory for the two,
  // and the socket is as before. Throws LinkFailure: the connection is of no use.
  static std::shared_ptr<SharedMemory> set_up(const Descriptor& socket, int side,
                                              const std::shared_ptr<MemoryBudget>& budget,
                                              Nanoseconds deadline);

  std::size_t read(std::uint8_t* data, std::size_t size) override REQUIRES(reading);
  BlockRef segment(std::uint64_t place, std::size_t size) override REQUIRES(reading);
  bool has_segments() const override { return true; }
  bool may_have_input() const override {
    return reader_.has_input() || ended_.load(std::memory_order_relaxed);
  }
  bool look() override REQUIRES(reading) { return may_have_input(); }
  void on_readable() override REQUIRES(reading);
  void finish_reading() override REQUIRES(reading);
  bool arm() override { return reader_.arm() && !ended_.load(std::memory_order_relaxed); }
  void disarm() override REQUIRES(reading) { reader_.disarm(); }
  void await_outcome(std::uint64_t call_id) override { reader_.await(call_id); }

  void compose(const OutFrame& frame, Composed& composed) override;
  void discard(const Composed& composed) override;
  bool wait_for_room(const OutFrame& frame, Composed& composed, Nanoseconds deadline,
                     Interrupt interrupt) override REQUIRES(writing);
  std::size_t write(const Part* parts, std::size_t count) override REQUIRES(writing) {
    return write(parts, count, 0);
  }
  void sent(const Composed& composed) override REQUIRES(writing);
  bool write_at_once(const OutFrame& frame) override REQUIRES(writing);
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) override REQUIRES(writing);
  bool ask_for_space() override REQUIRES(writing) { return writer_.ask_for_bell(); }
  bool is_stream() const override { return false; }
  void wake_writer() override { writer_.wake(); }
  bool trim() override {
    const bool imported = imported_.trim();
    return segments_out_.trim() || imported;
  }
  bool trim_writing() override REQUIRES(writing);
  void shut_down() override {
    is_shut_down_.store(true, std::memory_order_relaxed);
    Channel::shut_down();
  }

 private:
  enum class RecordType : std::uint32_t { kBell = 1, kSegment = 2, kZeroCopy = 3 };
  // A message that goes over the socket beside the rings.
  struct Record {
    RecordType type;
    std::uint32_t slot;
    std::uint64_t serial;
    std::uint64_t size;  // of zero-copy memory: where it begins
  };
  // The windows of one ring, as far as they are not there from the start.
  class Windows final : public WindowKeeper {
   public:
    Windows(SharedMemory& memory, const RingWindows& windows) : memory_(memory), windows_(windows) {}
    bool take(unsigned window) override;
    void give_back(unsigned window) override;
    bool touch(unsigned window) override;

   private:
    std::size_t offset(unsigned window) const { return windows_[window].data - memory_.data(); }

    SharedMemory& memory_;
    const RingWindows windows_;
    bool has_[kWindows] = {};
  };
  // Sent and not yet read by the peer, by the position in the ring after its frame.
  struct OnItsWay {
    std::uint64_t end;
    std::size_t in_segments;
    std::size_t zero_copy;
  };

  LinkMemory& shared() const { return *reinterpret_cast<LinkMemory*>(memory_->data()); }
  std::size_t write(const Part* parts, std::size_t count, std::uint64_t outcome) REQUIRES(writing);
  void check_peer() const;
  void ring_bell();
  bool announce(SegmentName name, std::size_t size, int descriptor);
  bool send_record(Record record, int descriptor);
  bool receive_records() REQUIRES(reading);
  void wait_for_descriptor() REQUIRES(reading);
  void learn(const Record& record, Descriptor descriptor) REQUIRES(reading);
  bool reserve(std::size_t size);
  void fill_segments(const OutFrame& frame, Composed& composed);
  bool goes_in_segment(const OutBuffer& buffer) const;
  std::size_t size_in_segments(const OutFrame& frame) const;
  bool is_zero_copy(const OutBuffer& buffer) const {
    return bounds_.zero_copy && buffer.descriptor >= 0 && buffer.size >= kSmallestZeroCopy;
  }
  void discard_read(std::uint64_t read) REQUIRES(writing);
  template <class IsThere>
  bool wait_for_peer(IsThere is_there, Nanoseconds deadline, Interrupt interrupt) REQUIRES(writing);
  bool announce_zero_copy(const OutFrame& frame, Composed& composed, Nanoseconds deadline,
                          Interrupt interrupt) REQUIRES(writing);

  EndpointMemory& home_;
  std::shared_ptr<SharedMemory> memory_;
  Windows windows_out_;
  Windows windows_in_;
  RingWriter writer_;  // `wake` is for any thread
  RingReader reader_;  // so are `has_input`, `arm` and `await`
  SegmentWriter segments_out_;
  SegmentReader segments_in_ GUARDED_BY(reading);
  ImportedMemory imported_;
  std::atomic<bool> ended_{false};  // nothing comes over the socket any more

  std::atomic<bool> is_shut_down_{false};
  Nanoseconds waits_for_descriptor_since_ GUARDED_BY(reading) = kNever;

  const RingBounds bounds_;
  std::atomic<std::size_t> reserved_{0};  // bytes in segments; see RingBounds
  std::deque<OnItsWay> on_their_way_ GUARDED_BY(writing);
  std::size_t zero_copy_on_their_way_ GUARDED_BY(writing) = 0;
  std::uint64_t announced_ever_ GUARDED_BY(writing) = 0;
  std::uint64_t written_at_trim_ GUARDED_BY(writing) = 0;
};

}  // namespace farcall
