#include "channel.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.hpp"

namespace farcall {

namespace {

const std::uint8_t kZeros[kAlignment] = {};

}  // namespace

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

void throw_broken(int error) {
  if (error == EPIPE) throw LinkFailure(kClosed);
  throw LinkFailure("the connection broke: " + std::string(std::strerror(error)));
}

HeaderBytes header_of(const OutFrame& frame, std::uint8_t flags) {
  Header header;
  header.kind = frame.kind;
  header.flags = flags;
  header.meta_length = static_cast<std::uint32_t>(frame.meta.size);
  header.buffer_count = static_cast<std::uint32_t>(frame.buffers.size());
  header.call_id = frame.call_id;
  header.body_length = frame.body.size;
  return encode_header(header);
}

void lay_out(const OutFrame& frame, const std::vector<std::uint64_t>& places, Composed& composed,
             std::uint8_t flag) {
  const HeaderBytes header = header_of(frame, places.empty() ? 0 : flag);
  composed.front.resize(kHeaderSize + 8 * (frame.buffers.size() + places.size()));
  std::uint8_t* front = composed.front.data();
  std::memcpy(front, header.data(), kHeaderSize);
  front += kHeaderSize;
  for (const Part& buffer : frame.buffers) {
    const std::uint64_t length = buffer.size;
    std::memcpy(front, &length, 8);
    front += 8;
  }
  composed.parts.reserve(3 + 2 * frame.buffers.size());
  composed.parts.push_back({composed.front.data(), composed.front.size()});
  composed.parts.push_back(frame.meta);
  composed.parts.push_back(frame.body);
  std::uint64_t offset = composed.front.size() + frame.meta.size + frame.body.size;
  for (std::size_t i = 0; i < frame.buffers.size(); ++i) {
    if (!places.empty()) {
      std::memcpy(front, &places[i], 8);
      front += 8;
      if (places[i] != 0) continue;
    }
    composed.parts.push_back({kZeros, padding(offset)});
    composed.parts.push_back(frame.buffers[i]);
    offset += padding(offset) + frame.buffers[i].size;
  }
}

void Composed::own() {
  std::size_t size = stripes.bytes_left();
  for (const Part& part : parts) size += part.size;
  std::vector<std::uint8_t> memory(size);
  std::uint8_t* end = memory.data();
  const auto copy = [&end](const Part& part) {
    if (part.size > 0) std::memcpy(end, part.data, part.size);
    return std::exchange(end, end + part.size);
  };
  for (Part& part : parts) part.data = copy(part);
  stripes.move_memory(copy);
  owned_ = std::move(memory);
}

void Composed::take(std::size_t count) {
  auto part = parts.begin();
  while (part != parts.end() && count >= part->size) count -= part++->size;
  if (part != parts.end()) {
    part->data += count;
    part->size -= count;
  }
  parts.erase(parts.begin(), part);
}

bool Channel::write_some(Composed& composed) {
  const std::size_t written = write(composed.parts.data(), composed.parts.size());
  composed.take(written);
  return written > 0;
}

void Channel::shut_down() { shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace farcall
