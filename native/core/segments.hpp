// Shared memory for large buffers: the sender copies into a segment, and the receiver's tensor lies
// over it. When the receiver's last reference is gone the segment is the sender's again, warm.
//
// A segment has a slot, and the slot a word of state in the link's shared memory. A slot has several
// segments one after the other, so frames name a segment by slot and serial number. States:
//
//   free -> used      the sender fills it and sends a frame that names it
//   used -> free      the receiver has dropped what lay over it
//   used -> given     the sender wants no more of it: the receiver keeps too much. It is the
//                     receiver's from now on
//   given -> free     the receiver has dropped it, too, and unmapped it: the slot may get another
//
// A receiver that lies about the state damages only what it receives itself. A sender that lies can
// change data that the receiver is looking at, as it could have sent other data; nothing but
// tensors' contents is ever read from a segment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "memory.hpp"
#include "memory_budget.hpp"
#include "shared_memory.hpp"
#include "thread_safety.hpp"

namespace farcall {

constexpr std::size_t kSegmentSlots = 1024;
constexpr std::size_t kSmallestSegment = 32 << 10;  // smaller buffers go through the ring

using SegmentStates = std::atomic<std::uint32_t>[kSegmentSlots];

// Which segment. Never 0.
struct SegmentName {
  std::uint32_t slot = 0;
  std::uint64_t serial = 0;  // from 1 in the order in which the sender made them

  std::uint64_t packed() const { return serial * kSegmentSlots + slot; }
  static SegmentName unpack(std::uint64_t packed) {
    return {static_cast<std::uint32_t>(packed % kSegmentSlots), packed / kSegmentSlots};
  }
};

// The sender's side. Thread-safe.
class SegmentWriter {
 public:
  // Tells the receiver of a new segment, or of the end of one (size 0). Returns false if
  // the receiver can't be told now.
  using Announce = std::function<bool(SegmentName name, std::size_t size, int descriptor)>;

  SegmentWriter(std::shared_ptr<SharedMemory> home, SegmentStates& states,
                std::shared_ptr<MemoryBudget> budget, Announce announce)
      : home_(std::move(home)),
        states_(states),
        budget_(std::move(budget)),
        announce_(std::move(announce)) {}

  struct Place {
    std::shared_ptr<SharedMemory> memory;  // null: there is no segment, send it some other way
    SegmentName name;

    explicit operator bool() const { return memory != nullptr; }
    std::uint8_t* data() const { return memory->data(); }
  };

  // A segment of at least `size` bytes, which is in use now. It stays mapped while the place is
  // there, even if another thread makes room.
  Place take(std::size_t size) EXCLUDES(mutex_);
  // It was not sent after all.
  void put_back(std::uint32_t slot);

  // Unmap segments that were not asked for since the last call; those that the receiver still keeps
  // then are given away. True if any is left.
  bool trim() EXCLUDES(mutex_);

 private:
  static constexpr std::size_t kMaxMapped = std::size_t{4} << 30;

  struct Segment {
    std::shared_ptr<SharedMemory> memory;
    std::uint64_t serial = 0;
    std::uint64_t used_at = 0;  // in order of use
    bool rested = false;
  };

  bool is_free(std::uint32_t slot) const;
  Place make(std::size_t size) REQUIRES(mutex_);
  bool make_room(std::size_t size) REQUIRES(mutex_);
  bool keep_to_budget(std::size_t size) REQUIRES(mutex_);
  std::size_t oldest(bool& is_free) const REQUIRES(mutex_);
  void drop(std::uint32_t slot) REQUIRES(mutex_);

  const std::shared_ptr<SharedMemory> home_;
  SegmentStates& states_;
  const std::shared_ptr<MemoryBudget> budget_;
  const Announce announce_;
  Mutex mutex_;
  std::vector<Segment> segments_ GUARDED_BY(mutex_);
  std::size_t mapped_ GUARDED_BY(mutex_) = 0;
  std::uint64_t made_ GUARDED_BY(mutex_) = 0;
  std::uint64_t uses_ GUARDED_BY(mutex_) = 0;
};

// The receiver's side. Used by one thread at a time; blocks may be dropped by any.
class SegmentReader {
 public:
  SegmentReader(std::shared_ptr<SharedMemory> home, SegmentStates& states)
      : home_(std::move(home)), states_(states) {}

  // The peer made a segment. Throws BadFrame if that makes no sense.
  void learn(SegmentName name, std::size_t size, const Descriptor& descriptor);
  bool knows(SegmentName name) const;
  // Throws BadFrame if nothing of that size lies there.
  BlockRef open(SegmentName name, std::size_t size);

 private:
  class Piece;
  struct Mapping {
    Mapping(std::uint64_t serial, std::shared_ptr<SharedMemory> memory)
        : serial(serial), memory(std::move(memory)) {}
    const std::uint64_t serial;
    std::shared_ptr<SharedMemory> memory;  // of the thread that has set `handed_out`
    std::atomic<bool> handed_out{false};
  };

  std::shared_ptr<SharedMemory> home_;
  SegmentStates& states_;
  std::vector<std::shared_ptr<Mapping>> mappings_;
};

}  // namespace farcall
