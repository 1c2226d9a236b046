#include "wire.hpp"

#include <bit>
#include <cstring>
#include <string>

#include "errors.hpp"

namespace farcall {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

namespace {

constexpr char kMagic[4] = {'f', 'c', 'a', 'l'};
constexpr std::uint8_t kVersion = 1;

template <class Number>
Number load(const std::uint8_t* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof number);
  return number;
}

template <class Number>
void store(std::uint8_t* bytes, Number number) {
  std::memcpy(bytes, &number, sizeof number);
}

// As Python shows bytes.
std::string shown(const std::uint8_t* bytes, std::size_t count) {
  static const char digits[] = "0123456789abcdef";
  std::string text = "b'";
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t byte = bytes[i];
    if (byte >= 0x20 && byte < 0x7f && byte != '\'' && byte != '\\') {
      text += static_cast<char>(byte);
    } else {
      text += "\\x";
      text += digits[byte >> 4];
      text += digits[byte & 15];
    }
  }
  return text + "'";
}

[[noreturn]] void over(std::uint64_t claimed, const char* of_what, std::uint64_t limit) {
  throw BadFrame("frame claims " + std::to_string(claimed) + of_what + "; the limit is " +
                 std::to_string(limit));
}

}  // namespace

HeaderBytes encode_header(const Header& header) {
  HeaderBytes bytes;
  std::memcpy(bytes.data(), kMagic, 4);
  bytes[4] = kVersion;
  bytes[5] = header.kind;
  store<std::uint16_t>(&bytes[6], header.flags);
  store(&bytes[8], header.meta_length);
  store(&bytes[12], header.buffer_count);
  store(&bytes[16], header.call_id);
  store(&bytes[24], header.body_length);
  return bytes;
}

Header decode_header(const HeaderBytes& bytes, const Limits& limits, std::uint8_t known_flags) {
  if (std::memcmp(bytes.data(), kMagic, 4) != 0) {
    throw BadFrame("not a farcall frame: it starts with " + shown(bytes.data(), 4));
  }
  if (bytes[4] != kVersion) {
    throw BadFrame("frame version " + std::to_string(bytes[4]) + "; this farcall speaks version " +
                   std::to_string(kVersion));
  }
  Header header;
  header.kind = bytes[5];
  const auto flags = load<std::uint16_t>(&bytes[6]);
  header.flags = static_cast<std::uint8_t>(flags & known_flags);
  header.meta_length = load<std::uint32_t>(&bytes[8]);
  header.buffer_count = load<std::uint32_t>(&bytes[12]);
  header.call_id = load<std::uint64_t>(&bytes[16]);
  header.body_length = load<std::uint64_t>(&bytes[24]);
  if (header.kind == 0 || header.kind > limits.last_kind) {
    throw BadFrame("unknown frame kind " + std::to_string(header.kind));
  }
  if (header.meta_length > limits.meta) over(header.meta_length, " bytes of metadata", limits.meta);
  if (header.buffer_count > limits.buffers) over(header.buffer_count, " buffers", limits.buffers);
  if (header.body_length > limits.body) {
    throw BadFrame("frame claims a body of " + std::to_string(header.body_length) +
                   " bytes; the limit is " + std::to_string(limits.body));
  }
  return header;
}

Table decode_table(const Header& header, const std::uint8_t* bytes, const Limits& limits) {
  Table table;
  table.lengths.resize(header.buffer_count);
  std::uint64_t total = header.body_length;
  for (std::uint32_t i = 0; i < header.buffer_count; ++i) {
    const auto length = load<std::uint64_t>(bytes + 8 * std::size_t{i});
    if (length > limits.buffer) {
      over(length, (" bytes for buffer " + std::to_string(i)).c_str(), limits.buffer);
    }
    if (__builtin_add_overflow(total, length, &total)) over(length, " bytes more", limits.frame);
    table.lengths[i] = length;
  }
  if (total > limits.frame) over(total, " bytes in all", limits.frame);
  if (header.flags & (kInSegments | kStriped)) {
    const std::uint8_t* places = bytes + 8 * std::size_t{header.buffer_count};
    table.places.resize(header.buffer_count);
    for (std::uint32_t i = 0; i < header.buffer_count; ++i) {
      table.places[i] = load<std::uint64_t>(places + 8 * std::size_t{i});
    }
  }
  return table;
}

}  // namespace farcall
