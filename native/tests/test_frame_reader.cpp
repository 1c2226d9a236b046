#include <random>

#include "allocation.hpp"
#include "frames.hpp"

namespace farcall::test_frame_reader {

namespace {

void append(Bytes& bytes, const Bytes& more) { bytes.insert(bytes.end(), more.begin(), more.end()); }

const TestFrame kFrames[] = {
    test_frame(kRequest, 1, 0, 0),
    test_frame(kReply, 2, 5, 0),
    test_frame(kRequest, ~std::uint64_t{0}, 0, 7),
    test_frame(kOneWay, 4, 20, 30, {0}),
    test_frame(kRequest, 5, 3, 100, {64, 1, 0, 63, 0, 130}),
    test_frame(kRequest, 6, 24, 0, {0, 0, 0}),
    test_frame(kReply, 7, 1, 1, {1}),
};

Bytes all_encoded() {
  Bytes bytes;
  for (const TestFrame& frame : kFrames) append(bytes, frame.encoded());
  return bytes;
}

void check_frames(PiecesSource& source, const std::vector<std::size_t>& ends) {
  auto pool = std::make_shared<HeapPool>();
  FrameReader reader(kLimits, *pool);
  std::size_t arrived = 0;
  for (const std::size_t end : ends) {
    source.end = end;
    while (const std::optional<InFrame> frame = reader.read(source)) {
      CHECK(kFrames[arrived] == *frame);
      ++arrived;
    }
  }
  CHECK(arrived == std::size(kFrames));
  CHECK(source.is_at_end());
}

void test_every_split_in_two() {
  const Bytes bytes = all_encoded();
  for (std::size_t split = 0; split <= bytes.size(); ++split) {
    PiecesSource source(bytes);
    check_frames(source, {split, bytes.size()});
  }
}

void test_a_byte_at_a_time_and_random_pieces() {
  const Bytes bytes = all_encoded();
  std::vector<std::size_t> ends;
  for (std::size_t end = 0; end <= bytes.size(); ++end) ends.push_back(end);
  PiecesSource source(bytes);
  check_frames(source, ends);
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    ends.clear();
    for (std::size_t end = 0; end < bytes.size(); end += random() % 200) ends.push_back(end);
    ends.push_back(bytes.size());
    PiecesSource pieces(bytes);
    check_frames(pieces, ends);
  }
}

void test_frame_is_whole_with_its_last_byte() {
  const Bytes bytes = kFrames[4].encoded();
  auto pool = std::make_shared<HeapPool>();
  for (std::size_t split = 0; split <= bytes.size(); ++split) {
    PiecesSource source(bytes);
    source.end = split;
    FrameReader reader(kLimits, *pool);
    const bool whole = reader.read(source).has_value();
    CHECK(whole == (split == bytes.size()));
    CHECK(source.is_at_end());
  }
}

// Buffers in segments leave no trace in the stream, wherever they are in the frame.
void test_segments_between_buffers() {
  for (unsigned in_segments = 0; in_segments < 16; ++in_segments) {
    const TestFrame whole = test_frame(kRequest, 9, 11, 13, {100, 0, 65, 200});
    TestFrame streamed = whole;
    streamed.buffers.clear();
    std::vector<std::uint64_t> lengths, places;
    for (std::size_t i = 0; i < whole.buffers.size(); ++i) {
      lengths.push_back(whole.buffers[i].size());
      places.push_back(in_segments >> i & 1 ? 100 + i : 0);
    }
    Header header;
    header.kind = whole.kind;
    header.flags = kInSegments;
    header.meta_length = static_cast<std::uint32_t>(whole.meta.size());
    header.buffer_count = static_cast<std::uint32_t>(lengths.size());
    header.call_id = whole.call_id;
    header.body_length = whole.body.size();
    const HeaderBytes header_bytes = encode_header(header);
    Bytes bytes(header_bytes.begin(), header_bytes.end());
    for (const auto* numbers : {&lengths, &places}) {
      const auto* first = reinterpret_cast<const std::uint8_t*>(numbers->data());
      bytes.insert(bytes.end(), first, first + 8 * numbers->size());
    }
    append(bytes, whole.meta);
    append(bytes, whole.body);
    for (std::size_t i = 0; i < whole.buffers.size(); ++i) {
      if (places[i] != 0) continue;
      bytes.resize(bytes.size() + padding(bytes.size()));
      append(bytes, whole.buffers[i]);
    }
    auto pool = std::make_shared<HeapPool>();
    for (std::size_t split = 0; split <= bytes.size(); ++split) {
      PiecesSource source(bytes);
      source.open_segment = [&](std::uint64_t place, std::size_t size) {
        const Bytes& buffer = whole.buffers[place - 100];
        CHECK(size == buffer.size());
        BlockRef block = pool->allocate(size);
        if (size > 0) std::memcpy(block->data(), buffer.data(), size);
        return block;
      };
      FrameReader reader(kLimits, *pool);
      source.end = split;
      std::optional<InFrame> frame = reader.read(source);
      source.end = bytes.size();
      if (!frame) frame = reader.read(source);
      CHECK(frame && whole == *frame);
    }
  }
}

void test_bad_frames() {
  auto pool = std::make_shared<HeapPool>();
  {
    PiecesSource source(Bytes(100, 'x'));
    FrameReader reader(kLimits, *pool);
    CHECK_THROWS(reader.read(source), BadFrame);
  }
  {
    TestFrame frame = test_frame(kRequest, 1, 0, 0, {300});
    PiecesSource source(frame.encoded());
    Limits limits = kLimits;
    limits.buffer = 299;
    FrameReader reader(limits, *pool);
    CHECK_THROWS(reader.read(source), BadFrame);
  }
  {
    // A claim that no memory could ever hold.
    Header header;
    header.kind = kRequest;
    header.body_length = std::uint64_t{1} << 50;
    const HeaderBytes bytes = encode_header(header);
    PiecesSource source(Bytes(bytes.begin(), bytes.end()));
    Limits limits = kLimits;
    limits.body = ~std::uint64_t{0};
    FrameReader reader(limits, *pool);
    CHECK_THROWS(reader.read(source), BadFrame);
  }
}

// A peer that sends only the table of many buffers doesn't make us allocate any of them.
void test_memory_is_taken_when_bytes_arrive() {
  constexpr std::size_t count = 50'000;
  TestFrame frame = test_frame(kRequest, 1, 0, 0, std::vector<std::size_t>(count, 1));
  const Bytes bytes = frame.encoded();
  PiecesSource source(bytes);
  source.end = kHeaderSize + 8 * count;
  auto pool = std::make_shared<HeapPool>();
  FrameReader reader(kLimits, *pool);
  const std::size_t before = allocations;
  CHECK(!reader.read(source));
  CHECK(allocations - before < 100);
  source.end = bytes.size();
  const std::optional<InFrame> whole = reader.read(source);
  CHECK(whole && frame == *whole);
}

const TestFile kFile("test_frame_reader", [] {
  test_every_split_in_two();
  test_a_byte_at_a_time_and_random_pieces();
  test_frame_is_whole_with_its_last_byte();
  test_segments_between_buffers();
  test_bad_frames();
  test_memory_is_taken_when_bytes_arrive();
});

}  // namespace

}  // namespace farcall::test_frame_reader
