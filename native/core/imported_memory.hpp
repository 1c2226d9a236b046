// Memory of the peer's program that is mapped here, too (zero-copy): of a tensor that lies in shared
// memory already the peer sends the file's descriptor. From then on both programs read and write the
// same bytes.
//
// Segments are the link's own and can't be made smaller. Any process that has such a file can make
// it smaller: then a touch of the missing pages kills this process (SIGBUS). So both workers have to
// ask for it. torch's files can't be sealed.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <utility>

#include "memory.hpp"
#include "shared_memory.hpp"
#include "thread_safety.hpp"

namespace farcall {

// In a frame's table, the place of a zero-copy buffer is this bit and the number of its record.
constexpr std::uint64_t kImportedPlace = std::uint64_t{1} << 63;

// On their way at a time; any more are copied.
constexpr std::size_t kMaxImported = 512;

// Smaller buffers are copied: that takes less time than to send a descriptor.
constexpr std::size_t kSmallestZeroCopy = 128 << 10;

// The receiver's side. Used by one thread at a time; blocks may be dropped by any, and any may trim.
class ImportedMemory {
 public:
  // A tensor of the peer's lies in this file from `offset` on. Numbers go up. Throws BadFrame.
  void learn(std::uint64_t number, std::uint64_t offset, const Descriptor& descriptor);
  bool knows(std::uint64_t number) const;
  // Once for each number; discards those before it, whose frames were not sent after all.
  // Throws BadFrame if there is no such number, or less than `size` bytes.
  BlockRef open(std::uint64_t number, std::size_t size);

  // Unmap memory that is not used and was not announced since the last call. True if any such is left.
  bool trim() EXCLUDES(mutex_);

 private:
  struct Announced {
    std::uint64_t number;
    std::uint64_t offset;
    std::size_t whole;  // of the file now: the mapping may have its earlier size
    std::shared_ptr<SharedMemory> memory;
    bool has_holes;
  };
  // As long as it is mapped, no other file has this device and number.
  struct Mapped {
    dev_t device;
    ino_t file;
    std::weak_ptr<SharedMemory> used;
    std::shared_ptr<SharedMemory> kept;  // null: as long as a block uses it
    bool rested;  // was here at the last `trim`
  };
  // Memory that comes repeatedly is kept mapped: faulting pages in costs more than copying them.
  // But it is the peer's memory, which may be free but for us.
  static constexpr std::size_t kKept = 8;
  static constexpr std::size_t kKeptBytes = 1 << 30;  // or one

  std::shared_ptr<SharedMemory> map(const Descriptor& descriptor, const struct stat& status)
      EXCLUDES(mutex_);
  void keep_few() REQUIRES(mutex_);

  // The reader's: `RingChannel` has this where the role of reading guards it.
  std::deque<Announced> announced_;  // by number
  std::uint64_t last_ = 0;
  Mutex mutex_;
  std::list<Mapped> mapped_ GUARDED_BY(mutex_);  // announced last is first
};

}  // namespace farcall
