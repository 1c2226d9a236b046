// The decoder of frames, over a stream that is cut into random pieces. An accepted stream is decoded a
// second time, whole, and has to give the same.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/errors.hpp"
#include "core/frame_reader.hpp"

using namespace farcall;

namespace {

constexpr Limits kLimits{1 << 12, 1 << 16, 1 << 10, 1 << 16, 1 << 18, 16};
constexpr std::size_t kSegments = 4, kSegmentSize = 1000;

void require(bool condition) {
  if (!condition) std::abort();
}

class FuzzSource final : public Source {
 public:
  FuzzSource(const std::uint8_t* data, std::size_t size, HeapPool& pool, bool segments)
      : end(size), data_(data), pool_(pool), segments_(segments) {}

  std::size_t read(std::uint8_t* data, std::size_t size) override {
    require(size > 0);
    const std::size_t count = std::min(size, end - position);
    if (count > 0) std::memcpy(data, data_ + position, count);
    position += count;
    return count;
  }
  BlockRef segment(std::uint64_t place, std::size_t size) override {
    require(segments_);
    if (place > kSegments || size > kSegmentSize) throw BadFrame("no such segment");
    BlockRef block = pool_.allocate(size);
    std::memset(block->data(), static_cast<int>(place), size);
    return block;
  }
  bool has_segments() const override { return segments_; }

  std::size_t end;
  std::size_t position = 0;

 private:
  const std::uint8_t* const data_;
  HeapPool& pool_;
  const bool segments_;
};

// All memory of a frame, in one piece.
std::vector<std::uint8_t> flat(const InFrame& frame) {
  std::vector<std::uint8_t> bytes{frame.kind};
  const auto add = [&](const std::uint8_t* data, std::size_t size) {
    if (size > 0) bytes.insert(bytes.end(), data, data + size);
    bytes.push_back(0xfe);
  };
  require(frame.meta_offset + frame.meta_size <= frame.front->size());
  require(frame.body_offset + frame.body_size <= frame.front->size());
  add(frame.front->data() + frame.meta_offset, frame.meta_size);
  add(frame.front->data() + frame.body_offset, frame.body_size);
  for (const BlockRef& buffer : frame.buffers) add(buffer->data(), buffer->size());
  return bytes;
}

}  // namespace

// The first byte says how to cut and whether there are segments, then the stream follows. Each
// frame's magic and version are put in, so that the fuzzer need not find them again and again.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t size) {
  if (size < 2) return 0;
  const bool segments = input[0] & 1;
  std::uint32_t random = input[1] * 2654435761u + input[0];
  std::vector<std::uint8_t> bytes(input + 2, input + size);
  if (input[0] & 2) {
    static const std::uint8_t start[] = {'f', 'c', 'a', 'l', 1};
    std::copy(start, start + std::min(bytes.size(), sizeof start), bytes.begin());
  }
  auto pool = std::make_shared<HeapPool>();
  std::vector<std::vector<std::uint8_t>> cut, whole;
  std::size_t allocated = 0;
  for (const bool in_pieces : {true, false}) {
    FuzzSource source(bytes.data(), bytes.size(), *pool, segments);
    FrameReader reader(kLimits, *pool);
    if (in_pieces) source.end = 0;
    try {
      while (true) {
        while (const std::optional<InFrame> frame = reader.read(source)) {
          (in_pieces ? cut : whole).push_back(flat(*frame));
          allocated += frame->front->size();
        }
        require(source.position == source.end);
        if (source.end == bytes.size()) break;
        random = random * 1664525 + 1013904223;
        source.end = std::min<std::size_t>(bytes.size(), source.end + (random >> 24) % 80);
      }
    } catch (const BadFrame&) {
    }
  }
  require(cut == whole);
  require(allocated <= 2 * bytes.size());
  return 0;
}
