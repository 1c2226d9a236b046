// Large buffers in chunks, which go by any of the streams of a link.
//
// They follow everything else in their frame. Each stream carries chunks one after the other, each
// behind a header that says where it belongs; on the first stream a header without a chunk ends them.
// All parts of a frame go by all streams before the next frame goes by any.
// Here is no I/O.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "errors.hpp"
#include "wire.hpp"

namespace farcall {

constexpr unsigned kMaxStreams = 16;  // of a link: its connections

// How a worker sends.
struct Striping {
  unsigned streams = 1;  // that a link may have; 1: no stripes
  std::size_t threshold = 1 << 20;  // bytes of the smallest buffer that is striped
  std::size_t chunk = 1 << 20;  // bytes
  bool dialled = false;  // this worker opens the further streams
};

constexpr std::size_t kChunkHeaderSize = 24;
constexpr std::uint64_t kMaxChunks = 1 << 20;  // of one buffer
constexpr std::uint64_t kMaxAhead = 1 << 20;  // buffers that a stream may be ahead of others

struct ChunkHeader {
  std::uint32_t length = 0;  // bytes; 0: the first stream has no more of this frame
  std::uint64_t buffer = 0;  // striped buffers of a direction count from 1
  std::uint64_t offset = 0;  // in it
};

using ChunkBytes = std::array<std::uint8_t, kChunkHeaderSize>;

ChunkBytes encode_chunk(const ChunkHeader& header);
// Throws BadFrame: that is none.
ChunkHeader decode_chunk(const ChunkBytes& bytes);

// How many chunks of that size a buffer has. Throws BadFrame: too many.
std::uint64_t count_chunks(std::uint64_t size, std::uint64_t chunk);

// The rest of the striped buffers of one frame, still to be written.
class StripesOut {
 public:
  bool is_empty() const { return rest_.empty(); }
  void add(Part buffer) { rest_.push_back(buffer); }
  std::uint64_t count() const { return rest_.size(); }
  // Once, before anything is written: the number of the first buffer.
  void begin(std::uint64_t first, std::size_t chunk, std::size_t streams);
  bool has_begun() const { return !streams_.empty(); }

  std::size_t streams() const { return streams_.size(); }
  // Gives what to write on a stream next: rest of a header, rest of a chunk. Returns false if
  // there is nothing.
  bool fill(std::size_t stream, Part (&parts)[2]);
  // So many bytes of it were taken.
  void take(std::size_t stream, std::size_t count);
  bool is_pending(std::size_t stream) const {
    return streams_[stream].header_left + streams_[stream].data.size > 0;
  }
  bool is_written() const;

  // Calls `own`, which returns the new place, for each piece of memory that is still needed.
  template <class Own>
  void move_memory(Own own) {
    for (Stream& stream : streams_) stream.data.data = own(stream.data);
    for (std::size_t i = next_; i < rest_.size(); ++i) rest_[i].data = own(rest_[i]);
  }
  std::size_t bytes_left() const;

 private:
  struct Stream {
    ChunkBytes header{};
    std::size_t header_left = 0;
    Part data;
  };

  std::vector<Part> rest_;  // of each buffer, not cut yet
  std::size_t next_ = 0;  // the buffer that is being cut
  std::size_t offset_ = 0;  // of its rest
  std::uint64_t first_ = 0;
  std::size_t chunk_ = 0;
  bool ended_ = false;  // the first stream was given the end
  std::vector<Stream> streams_;
};

// A buffer that arrives in chunks.
class StripesIn {
 public:
  // The bytes that arrived on one stream.
  struct Stream {
    ChunkBytes bytes{};
    std::size_t filled = 0;  // of `bytes`
    std::optional<ChunkHeader> header;
    std::uint8_t* to = nullptr;
    std::size_t left = 0;  // of the chunk that is being read

    bool is_between_chunks() const { return left == 0 && filled == 0; }
  };
  // kInput: it has to be read when there is more. kHeld: not until the next buffer.
  // kEnd: not until the next frame.
  enum class State { kInput, kHeld, kEnd };

  // The next buffer, of the size and in the chunks that `count_chunks` was asked about.
  void begin(std::uint8_t* data, std::uint64_t size, std::uint64_t chunk);
  bool is_complete() const { return left_ == 0; }

  // Takes the input that is there. `read(data, size)`: how many of the next bytes it has put there; 0:
  // none is there. Throws BadFrame.
  template <class Read>
  State advance(Stream& stream, bool is_first, Read read) {
    while (true) {
      if (stream.left > 0) {
        const std::size_t count = read(stream.to, stream.left);
        if (count == 0) return State::kInput;
        stream.to += count;
        stream.left -= count;
        if (stream.left == 0) --left_;
        continue;
      }
      if (!stream.header) {
        if (is_complete()) return State::kHeld;
        if (!read_header(stream, read)) return State::kInput;
      }
      if (stream.header->length == 0) return check_end(is_first);
      if (!start_chunk(stream)) return State::kHeld;
    }
  }

  // The buffers of a frame are complete: reads the end on the first stream. Returns
  // false if it is not there yet. Throws BadFrame.
  template <class Read>
  bool finish(Stream& first, Read read) {
    if (!first.header && !read_header(first, read)) return false;
    check_finished(*first.header);
    first.header.reset();
    return true;
  }

 private:
  template <class Read>
  static bool read_header(Stream& stream, Read read) {
    while (stream.filled < kChunkHeaderSize) {
      const std::size_t count = read(stream.bytes.data() + stream.filled,
                                     kChunkHeaderSize - stream.filled);
      if (count == 0) return false;
      stream.filled += count;
    }
    stream.filled = 0;
    stream.header = decode_chunk(stream.bytes);
    return true;
  }
  static State check_end(bool is_first);
  bool start_chunk(Stream& stream);
  void check_finished(const ChunkHeader& header) const;

  std::uint64_t number_ = 0;
  std::uint8_t* data_ = nullptr;
  std::uint64_t size_ = 0;
  std::uint64_t chunk_ = 0;
  std::uint64_t left_ = 0;  // chunks that are not here
  std::vector<bool> begun_;  // which chunks are here, or being read
};

}  // namespace farcall
