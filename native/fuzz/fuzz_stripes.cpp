// A link's reader over several streams, and a peer that says on each of them what it likes, in
// any order. Buffers are small, so that each is a piece of the heap of its own: AddressSanitizer sees
// a write beside it.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/errors.hpp"
#include "core/frame_reader.hpp"
#include "core/stream_channel.hpp"

using namespace farcall;

namespace {

constexpr Limits kLimits{1 << 10, 1 << 10, 1 << 6, 1 << 12, 1 << 14, 16};
constexpr unsigned kStreams = 3;
constexpr std::size_t kMost = 32 << 10;  // bytes of a stream, so that its socket takes them

void require(bool condition) {
  if (!condition) std::abort();
}

// The fuzzer's bytes, one at a time; zeros at the end.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}

  bool are_left() const { return data_ < end_; }
  std::uint8_t byte() { return are_left() ? *data_++ : 0; }
  // Mostly small, for most right numbers are.
  std::uint64_t number() {
    const std::uint8_t chosen = byte();
    if (chosen < 0xf0) return chosen;
    if (chosen < 0xf8) return std::uint64_t{byte()} * 100;
    const unsigned shift = byte() % 64;
    return (std::uint64_t{1} << shift) - (chosen & 1);
  }

 private:
  const std::uint8_t* data_;
  const std::uint8_t* const end_;
};

using Bytes = std::vector<std::uint8_t>;

void append(Bytes& bytes, const void* data, std::size_t size) {
  const auto* begin = static_cast<const std::uint8_t*>(data);
  bytes.insert(bytes.end(), begin, begin + size);
}

// The start of a frame, up to its striped buffers.
Bytes frame(Choices& choices) {
  Header header;
  header.kind = 6;
  header.flags = choices.byte() & 15 ? kStriped : choices.byte();
  header.buffer_count = choices.byte() % 4;
  header.meta_length = static_cast<std::uint32_t>(choices.number());
  const HeaderBytes encoded = encode_header(header);
  Bytes bytes(encoded.begin(), encoded.end());
  for (std::uint32_t i = 0; i < header.buffer_count; ++i) {
    const std::uint64_t size = choices.number();
    append(bytes, &size, sizeof size);
  }
  for (std::uint32_t i = 0; i < header.buffer_count; ++i) {
    const std::uint64_t chunk = choices.number();
    append(bytes, &chunk, sizeof chunk);
  }
  bytes.resize(bytes.size() + std::min<std::size_t>(header.meta_length, 300), 0xaa);
  return bytes;
}

Bytes chunk(Choices& choices) {
  ChunkHeader header;
  header.buffer = choices.number();
  header.offset = choices.number();
  header.length = static_cast<std::uint32_t>(choices.number());
  const ChunkBytes encoded = encode_chunk(header);
  Bytes bytes(encoded.begin(), encoded.end());
  bytes.resize(bytes.size() + std::min<std::size_t>(header.length, 300), 0xbb);
  return bytes;
}

Bytes raw(Choices& choices) {
  Bytes bytes(choices.byte());
  for (std::uint8_t& byte : bytes) byte = choices.byte();
  return bytes;
}

class Peer {
 public:
  Peer() {
    std::vector<Descriptor> theirs;
    for (Descriptor& socket : sockets_) {
      int ends[2];
      require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
      socket = Descriptor(ends[0]);
      theirs.emplace_back(ends[1]);
    }
    channel = std::make_unique<StreamChannel>(std::move(theirs[0]), Striping{kStreams, 1, 1, false});
    for (unsigned stream = 1; stream < kStreams; ++stream) channel->join(std::move(theirs[stream]));
  }

  void say(unsigned stream, const Bytes& bytes) {
    if (!sockets_[stream] || bytes.empty() || said_[stream] + bytes.size() > kMost) return;
    said_[stream] += bytes.size();
    send(sockets_[stream].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  void close(unsigned stream) { sockets_[stream].reset(); }

  std::unique_ptr<StreamChannel> channel;

 private:
  std::array<Descriptor, kStreams> sockets_;
  std::array<std::size_t, kStreams> said_{};
};

// Takes the input that is there. Afterwards nothing tells of more: a thread that waits for it sleeps.
void read(FrameReader& reader, StreamChannel& channel) {
  while (const std::optional<InFrame> frame = reader.read(channel)) {
    require(frame->meta_offset + frame->meta_size <= frame->front->size());
    std::uint64_t size = frame->front->size();
    for (const BlockRef& buffer : frame->buffers) size += buffer->size();
    require(size <= kLimits.frame + frame->front->size());
  }
  require(!channel.may_have_input());
  pollfd waited[kMaxStreams];
  const nfds_t count = channel.wait_set(waited);
  require(count > 0);
  require(::poll(waited, count, 0) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t size) {
  Choices choices(input, size);
  auto pool = std::make_shared<HeapPool>();
  Peer peer;
  FrameReader reader(kLimits, *pool);
  try {
    while (choices.are_left()) {
      const std::uint8_t step = choices.byte();
      const unsigned stream = step % 4 % kStreams;
      switch (step >> 2 & 7) {
        case 0:
        case 1:
          peer.say(0, frame(choices));
          break;
        case 2:
        case 3:
        case 4:
          peer.say(stream, chunk(choices));
          break;
        case 5:
          peer.say(stream, raw(choices));
          break;
        case 6:
          if (step >> 5 == 7) peer.close(stream);
          break;
        case 7:
          read(reader, *peer.channel);
          break;
      }
    }
    read(reader, *peer.channel);
  } catch (const BadFrame&) {
  } catch (const LinkFailure&) {
  }
  return 0;
}
