// Memory that received data lies in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "thread_safety.hpp"

namespace farcall {

// A piece of memory that is given back with the last reference to it.
class Block {
 public:
  Block(std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::uint8_t* data_;
  std::size_t size_;
};

using BlockRef = std::shared_ptr<Block>;

// The size in which memory of `size` bytes is kept, so that a later one of about that size fits:
// four steps to each power of two, in pages of 4 KiB, or of 2 MiB where huge pages pay.
std::size_t pooled_size(std::size_t size);

// Asks for huge pages where they pay. Taking 128 MB in pages of 4 KiB costs as much as copying it.
void advise_huge(void* data, std::size_t size);

// Private memory. Large pieces are kept for a while when they are given back, since fresh pages
// cost more than filling them does. Thread-safe.
class HeapPool : public std::enable_shared_from_this<HeapPool> {
 public:
  static constexpr std::size_t kSmallest = 64 << 10;  // smaller pieces are malloc's
  static constexpr std::size_t kKept = 512 << 20;

  HeapPool();
  ~HeapPool();
  HeapPool(const HeapPool&) = delete;
  HeapPool& operator=(const HeapPool&) = delete;

  // Memory of `size` bytes, at a multiple of 64. Its content is anything that was received here.
  // Throws BadFrame if there is none.
  BlockRef allocate(std::size_t size);
  // The same for memory that fills up in pieces of `piece` bytes, in any order. It is taken as they
  // arrive: the first byte of a huge page would take all of it.
  BlockRef allocate_for_pieces(std::size_t size, std::size_t piece);

  // Give back to the system the kept memory that was not asked for since the last call.
  // True if anything is still kept.
  bool trim() EXCLUDES(mutex_);

 private:
  class Piece;
  struct Kept {
    void* data;
    bool rested;  // it was here at the last `trim`
  };
  void give_back(void* data, std::size_t size) EXCLUDES(mutex_);

  const BlockRef empty_;  // one for all, since a frame may have thousands
  Mutex mutex_;
  std::map<std::size_t, std::vector<Kept>> kept_ GUARDED_BY(mutex_);
  std::size_t bytes_kept_ GUARDED_BY(mutex_) = 0;
};

}  // namespace farcall
