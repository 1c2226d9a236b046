// Frames out of a stream of bytes, a piece at a time, as few copies as possible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory.hpp"
#include "wire.hpp"

namespace farcall {

// A frame that arrived. Meta and body lie in `front`.
struct InFrame {
  std::uint8_t kind = 0;
  std::uint64_t call_id = 0;
  BlockRef front;
  std::size_t meta_offset = 0;
  std::size_t meta_size = 0;
  std::size_t body_offset = 0;
  std::size_t body_size = 0;
  std::vector<BlockRef> buffers;
};

// Where bytes come from.
class Source {
 public:
  virtual ~Source() = default;
  // As many of the next `size` bytes as are there; 0 if none is. Throws LinkFailure at the end.
  virtual std::size_t read(std::uint8_t* data, std::size_t size) = 0;
  // The content of a segment, at least `size` bytes. Throws BadFrame if there is no such segment.
  virtual BlockRef segment(std::uint64_t place, std::size_t size) = 0;
  virtual bool has_segments() const = 0;

  // Buffers that come in stripes, one after the other: see `stripes.hpp`.
  virtual bool has_stripes() const { return false; }
  // Where the next one goes, in what chunks.
  virtual void begin_striped(std::uint8_t*, std::uint64_t, std::uint64_t) {}
  // Whether it is complete, after the input that is there now. Throws BadFrame, LinkFailure.
  virtual bool read_striped() { return false; }
  // Whether the last one of a frame was complete, and the end is there. Throws as above.
  virtual bool end_striped() { return false; }
};

// Used by one thread at a time.
class FrameReader {
 public:
  FrameReader(const Limits& limits, HeapPool& pool) : limits_(limits), pool_(pool) {}

  // The next whole frame, or none when more bytes have to arrive first.
  // Throws BadFrame: what arrived is not a frame, or breaks a limit. LinkFailure: the stream ended.
  std::optional<InFrame> read(Source& source);

 private:
  enum class Stage { kHeader, kFront, kPadding, kBuffer, kStriped, kEnd };

  bool fill(Source& source, std::uint8_t* data, std::size_t size);
  void open_front();
  bool next_buffer(Source& source);
  bool next_striped(Source& source);
  InFrame finished();

  Limits limits_;
  HeapPool& pool_;
  Stage stage_ = Stage::kHeader;
  std::size_t filled_ = 0;  // of what this stage wants
  HeaderBytes header_bytes_{};
  Header header_;
  InFrame frame_;
  Table table_;
  std::size_t index_ = 0;  // of the buffer that is being read
  std::uint64_t offset_ = 0;  // in the frame
};

}  // namespace farcall
