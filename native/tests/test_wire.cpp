#include <cstring>

#include "core/segments.hpp"
#include "frames.hpp"

namespace farcall::test_wire {

namespace {

constexpr Limits kSmall{100, 200, 3, 1000, 1500, 9};

Header header_of(std::uint8_t kind, std::uint32_t meta, std::uint32_t buffers, std::uint64_t body) {
  Header header;
  header.kind = kind;
  header.meta_length = meta;
  header.buffer_count = buffers;
  header.call_id = 0x0123456789abcdef;
  header.body_length = body;
  return header;
}

Header again(const Header& header) { return decode_header(encode_header(header), kSmall, true); }

Table table_of(std::uint8_t flags, const std::vector<std::uint64_t>& numbers, std::uint32_t buffers,
               std::uint64_t body = 0) {
  Header header = header_of(1, 0, buffers, body);
  header.flags = flags;
  CHECK(header.table_length() == 8 * numbers.size());
  Bytes bytes(8 * numbers.size());
  if (!numbers.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return decode_table(header, bytes.data(), kSmall);
}

void test_header_comes_back() {
  Header header = header_of(9, 100, 3, 200);
  header.flags = kInSegments;
  const Header decoded = again(header);
  CHECK(decoded.kind == 9 && decoded.flags == kInSegments && decoded.meta_length == 100);
  CHECK(decoded.buffer_count == 3 && decoded.body_length == 200);
  CHECK(decoded.call_id == 0x0123456789abcdef);
  CHECK(decoded.table_length() == 48 && decoded.front_length() == 348);
  // A stream has no segments: the flag says nothing there, as all that are not known.
  CHECK(decode_header(encode_header(header), kSmall, false).flags == 0);
  HeaderBytes bytes = encode_header(header);
  bytes[6] = bytes[7] = 0xff;
  CHECK(decode_header(bytes, kSmall, true).flags == kInSegments);
}

void test_header_is_checked() {
  for (const std::size_t place : {0, 1, 2, 3, 4}) {
    HeaderBytes bytes = encode_header(header_of(1, 0, 0, 0));
    bytes[place] ^= 0x80;
    CHECK_THROWS(decode_header(bytes, kSmall, true), BadFrame);
  }
  CHECK_THROWS(again(header_of(0, 0, 0, 0)), BadFrame);
  CHECK_THROWS(again(header_of(10, 0, 0, 0)), BadFrame);
  CHECK_THROWS(again(header_of(255, 0, 0, 0)), BadFrame);
  CHECK_THROWS(again(header_of(1, 101, 0, 0)), BadFrame);
  CHECK_THROWS(again(header_of(1, 0, 4, 0)), BadFrame);
  CHECK_THROWS(again(header_of(1, 0, 0, 201)), BadFrame);
  CHECK_THROWS(again(header_of(1, 0, 0, ~std::uint64_t{0})), BadFrame);
  CHECK_THROWS(again(header_of(1, ~std::uint32_t{0}, ~std::uint32_t{0}, 0)), BadFrame);
}

void test_table_is_checked() {
  const Table table = table_of(0, {1000, 0, 500}, 3);
  CHECK((table.lengths == std::vector<std::uint64_t>{1000, 0, 500}) && table.places.empty());
  CHECK_THROWS(table_of(0, {1001}, 1), BadFrame);
  CHECK_THROWS(table_of(0, {1000, 501}, 2), BadFrame);
  CHECK_THROWS(table_of(0, {1000, 500}, 2, 1), BadFrame);  // the body counts
  const Table places = table_of(kInSegments, {7, 8, 0, ~std::uint64_t{0}}, 2);
  CHECK((places.lengths == std::vector<std::uint64_t>{7, 8}));
  CHECK((places.places == std::vector<std::uint64_t>{0, ~std::uint64_t{0}}));
  CHECK(table_of(0, {}, 0).lengths.empty());
}

// Whatever the limits are, a sum that wraps around is over them.
void test_table_does_not_overflow() {
  constexpr std::uint64_t huge = std::uint64_t{1} << 63;
  const Limits limits{100, 200, 3, huge, huge, 9};
  const std::uint64_t lengths[] = {huge, huge};
  CHECK_THROWS(
      decode_table(header_of(1, 0, 2, 0), reinterpret_cast<const std::uint8_t*>(lengths), limits),
      BadFrame);
}

void test_padding() {
  CHECK(padding(0) == 0 && padding(1) == 63 && padding(63) == 1 && padding(64) == 0);
  CHECK(padding(~std::uint64_t{0}) == 1);
}

void test_segment_names() {
  for (const SegmentName name : {SegmentName{0, 1}, SegmentName{1023, 1}, SegmentName{5, 1 << 30}}) {
    CHECK(name.packed() != 0);
    const SegmentName unpacked = SegmentName::unpack(name.packed());
    CHECK(unpacked.slot == name.slot && unpacked.serial == name.serial);
  }
}

const TestFile kFile("test_wire", [] {
  test_header_comes_back();
  test_header_is_checked();
  test_table_is_checked();
  test_table_does_not_overflow();
  test_padding();
  test_segment_names();
});

}  // namespace

}  // namespace farcall::test_wire
