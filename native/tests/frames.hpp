// Bytes and frames for tests, and sources of bytes that are cut into pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "check.hpp"
#include "core/errors.hpp"
#include "core/frame_reader.hpp"
#include "core/stream_channel.hpp"
#include "core/wire.hpp"

namespace farcall {

using Bytes = std::vector<std::uint8_t>;

constexpr Limits kLimits{
    1 << 20, std::uint64_t{1} << 32, 1 << 16, std::uint64_t{1} << 32, std::uint64_t{1} << 33, 16};

constexpr std::uint8_t kRequest = 1, kReply = 2, kOneWay = 6;

// Different for each `seed` and place.
inline Bytes pattern(std::size_t size, std::uint64_t seed) {
  Bytes bytes(size);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  // A word at a time: there are gigabytes of them, under sanitizers as well.
  for (std::size_t i = 0; i < size; i += sizeof state) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const std::uint64_t word = state ^ state >> 32;  // the low bits of a state repeat themselves
    std::memcpy(bytes.data() + i, &word, std::min(sizeof word, size - i));
  }
  return bytes;
}

inline Part part_of(const Bytes& bytes) { return {bytes.data(), bytes.size()}; }

// A frame and its memory.
struct TestFrame {
  std::uint8_t kind = kRequest;
  std::uint64_t call_id = 0;
  Bytes meta, body;
  std::vector<Bytes> buffers;

  OutFrame out() const {
    OutFrame frame;
    frame.kind = kind;
    frame.call_id = call_id;
    frame.meta = part_of(meta);
    frame.body = part_of(body);
    for (const Bytes& buffer : buffers) frame.buffers.push_back(part_of(buffer));
    return frame;
  }

  // As on a stream.
  Bytes encoded() const {
    StreamChannel channel{Descriptor()};
    Composed composed;
    channel.compose(out(), composed);
    Bytes bytes;
    for (const Part& part : composed.parts) {
      if (part.size > 0) bytes.insert(bytes.end(), part.data, part.data + part.size);
    }
    return bytes;
  }

  bool operator==(const InFrame& other) const {
    if (other.kind != kind || other.call_id != call_id || other.meta_size != meta.size() ||
        other.body_size != body.size() || other.buffers.size() != buffers.size()) {
      return false;
    }
    const std::uint8_t* front = other.front->data();
    if (!std::equal(meta.begin(), meta.end(), front + other.meta_offset)) return false;
    if (!std::equal(body.begin(), body.end(), front + other.body_offset)) return false;
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (other.buffers[i]->size() != buffers[i].size()) return false;
      if (!std::equal(buffers[i].begin(), buffers[i].end(), other.buffers[i]->data())) return false;
    }
    return true;
  }
};

inline TestFrame test_frame(std::uint8_t kind, std::uint64_t call_id, std::size_t meta,
                            std::size_t body, const std::vector<std::size_t>& buffers = {}) {
  TestFrame frame{kind, call_id, pattern(meta, call_id), pattern(body, call_id + 1), {}};
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    frame.buffers.push_back(pattern(buffers[i], call_id + 2 + i));
  }
  return frame;
}

// Gives no byte at or after `end`, which a test moves on.
class PiecesSource : public Source {
 public:
  explicit PiecesSource(Bytes bytes) : end(bytes.size()), bytes_(std::move(bytes)) {}

  std::size_t read(std::uint8_t* data, std::size_t size) override {
    CHECK(size > 0);
    const std::size_t count = std::min(size, end - position_);
    if (count > 0) std::memcpy(data, bytes_.data() + position_, count);
    position_ += count;
    return count;
  }
  BlockRef segment(std::uint64_t place, std::size_t size) override {
    if (!open_segment) throw BadFrame("there are none");
    return open_segment(place, size);
  }
  bool is_at_end() const { return position_ == end; }
  bool has_segments() const override { return open_segment != nullptr; }

  std::size_t end;
  std::function<BlockRef(std::uint64_t, std::size_t)> open_segment;

 private:
  const Bytes bytes_;
  std::size_t position_ = 0;
};

}  // namespace farcall
