// The layout of a frame. `farcall/wire/frames.py` describes it, `messages.py` beside it knows what the
// messages mean; here is what a transport must know to move one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace farcall {

constexpr std::size_t kHeaderSize = 32;
constexpr std::size_t kAlignment = 64;

struct Part {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

// Whether a message ends a call at its caller: REPLY, FAILURE and ACCEPTED do.
constexpr bool is_outcome(std::uint8_t kind) { return kind == 2 || kind == 3 || kind == 5; }

// The memory that a peer may make us allocate, per frame. All in bytes but `buffers`.
struct Limits {
  std::uint64_t meta;
  std::uint64_t body;
  std::uint64_t buffers;
  std::uint64_t buffer;
  std::uint64_t frame;
  std::uint8_t last_kind;  // of the kinds that are known
};

constexpr std::uint64_t kAnySize = std::numeric_limits<std::uint64_t>::max();
constexpr Limits kNoLimits{kAnySize, kAnySize, kAnySize, kAnySize, kAnySize, 0xff};

// Set if some buffers of the frame lie in shared segments (rings only): the table is followed by as
// many little-endian u64, a place for each buffer. 0: in the frame; else the number of the
// segment's slot, plus 1. A buffer in a segment leaves no trace in the frame, nor does its padding.
constexpr std::uint8_t kInSegments = 1;

// Set if some buffers of the frame come in stripes (streams only, see `stripes.hpp`), after all
// others: the table is followed as above, by the size of each buffer's chunks. 0: in the frame.
constexpr std::uint8_t kStriped = 2;

struct Header {
  std::uint8_t kind = 0;
  std::uint8_t flags = 0;
  std::uint32_t meta_length = 0;
  std::uint32_t buffer_count = 0;
  std::uint64_t call_id = 0;
  std::uint64_t body_length = 0;

  std::uint64_t table_length() const {
    return std::uint64_t{buffer_count} * (flags & (kInSegments | kStriped) ? 16 : 8);
  }
  // Bytes between the header and the buffers' first padding.
  std::uint64_t front_length() const { return table_length() + meta_length + body_length; }
};

using HeaderBytes = std::array<std::uint8_t, kHeaderSize>;

HeaderBytes encode_header(const Header& header);

// Throws BadFrame: not a frame of this version, or a length is over its limit.
// `known_flags`: all others say nothing.
Header decode_header(const HeaderBytes& bytes, const Limits& limits, std::uint8_t known_flags);

struct Table {
  std::vector<std::uint64_t> lengths;
  std::vector<std::uint64_t> places;  // or sizes of chunks; empty: all in the frame
};

// Throws BadFrame: a buffer, or the whole frame, is over its limit.
Table decode_table(const Header& header, const std::uint8_t* bytes, const Limits& limits);

// Bytes from `offset` to the next multiple of the alignment.
constexpr std::size_t padding(std::uint64_t offset) {
  return static_cast<std::size_t>(-offset % kAlignment);
}

}  // namespace farcall
