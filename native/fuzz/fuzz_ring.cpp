// Our end of a link over rings, with a hostile peer: the input says what our side does, and what
// the peer does to the shared memory and sends beside it in between. Our side must neither crash,
// hang, nor touch memory outside.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "core/errors.hpp"
#include "core/frame_reader.hpp"
#include "core/ring_channel.hpp"

using namespace farcall;

namespace {

constexpr Limits kLimits{1 << 12, 1 << 20, 1 << 10, 1 << 20, 1 << 21, 16};
constexpr int kPeer = 0, kUs = 1;

struct Record {
  std::uint32_t type;
  std::uint32_t slot;
  std::uint64_t serial;
  std::uint64_t size;
};

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

  bool is_empty() const { return left_ == 0; }
  std::size_t take(void* into, std::size_t size) {
    const std::size_t count = size < left_ ? size : left_;
    std::memset(into, 0, size);
    if (count > 0) std::memcpy(into, data_, count);
    data_ += count;
    left_ -= count;
    return count;
  }
  template <class Number>
  Number number() {
    Number number;
    take(&number, sizeof number);
    return number;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

// Our side, and the peer's hands.
class Game {
 public:
  Game() {
    std::memset(memory_->data(), 0, memory_->size());
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    peer_.reset(ends[0]);
    RingBounds bounds;
    bounds.zero_copy = true;
    channel_.emplace(Descriptor(ends[1]), memory_, kUs, home_, bounds);
  }

  void play(Input& input) {
    try {
      for (int steps = 0; steps < 400 && !input.is_empty(); ++steps) step(input);
    } catch (const BadFrame&) {
    } catch (const LinkFailure&) {
    }
    held_.clear();
  }

 private:
  LinkMemory& shared() { return *reinterpret_cast<LinkMemory*>(memory_->data()); }

  void step(Input& input) {
    switch (input.number<std::uint8_t>() % 17) {
      case 0:
        return put_frame(input);
      case 1:
        return put_bytes(input);
      case 2:
        shared().controls[kPeer].tail = position(input, shared().controls[kPeer].tail);
        return;
      case 3:
        shared().controls[kUs].head = position(input, shared().controls[kUs].head);
        return;
      case 4:
        return scribble(input);
      case 5:
        return send_record(input);
      case 6:
        return send_segment(input);
      case 7:
        shared().states[input.number<std::uint8_t>() % 2][input.number<std::uint8_t>() % 8] =
            input.number<std::uint8_t>() % 4;
        return;
      case 8:
        while (std::optional<InFrame> frame = reader_.read(*channel_)) {
          held_.push_back(std::move(*frame));
          if (held_.size() > 8) held_.erase(held_.begin());
          channel_->finish_reading();
        }
        channel_->finish_reading();
        return;
      case 9:
        return look_at_frames();
      case 10:
        return channel_->on_readable();
      case 11:
        if (!channel_->arm()) channel_->disarm();
        return;
      case 12:
        return write(input);
      case 13:
        channel_->may_have_input();
        channel_->wait_for_space(0, no_interrupt);
        channel_->ask_for_space();
        channel_->wake_writer();
        return;
      case 14:
        channel_->trim();
        held_.clear();
        return;
      case 15:
        // The peer does as it should: it reads all that we wrote.
        shared().controls[kUs].head = shared().controls[kUs].tail.load();
        return;
      case 16:
        shared().controls[kPeer].turn = position(input, shared().controls[kPeer].tail) << 2 |
                                        input.number<std::uint8_t>() % 4;
        return;
    }
  }

  // Near where it is, near where it would be too far, or anywhere.
  static std::uint64_t position(Input& input, std::uint64_t now) {
    const auto how = input.number<std::uint8_t>();
    if (how < 128) return now + how;
    if (how < 160) return now + sizeof LinkMemory::small[0] + how - 144;
    if (how < 192) return now - (how - 160);
    return input.number<std::uint64_t>();
  }

  // Into the ring that we read, where an honest peer would write while it uses the smallest window.
  void append(const std::uint8_t* data, std::size_t size) {
    RingControl& control = shared().controls[kPeer];
    const std::uint64_t tail = control.tail;
    for (std::size_t i = 0; i < size; ++i) {
      shared().small[kPeer][(tail + i) % sizeof LinkMemory::small[0]] = data[i];
    }
    control.tail = tail + size;
  }

  void put_frame(Input& input) {
    Header header;
    header.kind = input.number<std::uint8_t>() % 18;
    header.flags = input.number<std::uint8_t>() % 2;
    header.meta_length = input.number<std::uint8_t>();
    header.buffer_count = input.number<std::uint8_t>() % 4;
    header.body_length = input.number<std::uint16_t>();
    const HeaderBytes bytes = encode_header(header);
    append(bytes.data(), bytes.size());
    for (std::uint32_t i = 0; i < header.buffer_count; ++i) put_number(input.number<std::uint16_t>());
    if (header.flags == 0) return;
    for (std::uint32_t i = 0; i < header.buffer_count; ++i) {
      const auto which = input.number<std::uint8_t>();
      const SegmentName name{which % 8u, input.number<std::uint8_t>() % 4u};
      put_number(which < 192 ? name.packed() : kImportedPlace | name.serial);
    }
  }

  void put_number(std::uint64_t number) {
    append(reinterpret_cast<const std::uint8_t*>(&number), sizeof number);
  }

  void put_bytes(Input& input) {
    std::uint8_t bytes[256];
    append(bytes, input.take(bytes, input.number<std::uint8_t>()));
    if (input.number<std::uint8_t>() < 128) return;
    const std::vector<std::uint8_t> many(input.number<std::uint16_t>(), 'x');
    append(many.data(), many.size());
  }

  void scribble(Input& input) {
    std::uint8_t bytes[64];
    const std::size_t place = input.number<std::uint32_t>() % (sizeof(LinkMemory) - sizeof bytes);
    const std::size_t size = input.take(bytes, input.number<std::uint8_t>() % sizeof bytes);
    std::memcpy(memory_->data() + place, bytes, size);
  }

  void send(const void* data, std::size_t size, const int* descriptors, std::size_t count) {
    iovec vector{const_cast<void*>(data), size};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    if (count > 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(count * sizeof(int));
      std::memcpy(CMSG_DATA(header), descriptors, count * sizeof(int));
    }
    sendmsg(peer_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  void send_record(Input& input) {
    Record record;
    const std::size_t size = input.take(&record, sizeof record);
    if (input.number<std::uint8_t>() < 8) peer_.reset();
    const int descriptors[] = {memory_descriptor(), memory_descriptor(), memory_descriptor()};
    send(&record, size, descriptors, input.number<std::uint8_t>() % 4);
    for (const int descriptor : descriptors) close(descriptor);
  }

  static int memory_descriptor() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

  // As it should be, or nearly.
  void send_segment(Input& input) {
    Record record{2, input.number<std::uint8_t>() % 8u, input.number<std::uint8_t>() % 4u, 0};
    const auto how = input.number<std::uint8_t>();
    const std::size_t size = (how % 8 + 1) * 4096;
    const Descriptor descriptor(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (ftruncate(descriptor.get(), static_cast<off_t>(size)) != 0) std::abort();
    if (how < 224 && posix_fallocate(descriptor.get(), 0, static_cast<off_t>(size)) != 0) std::abort();
    if (how < 240) fcntl(descriptor.get(), F_ADD_SEALS, F_SEAL_SHRINK);
    record.size = how < 248 ? size : input.number<std::uint16_t>();
    if (how % 3 == 0) record = {3, 0, record.serial, input.number<std::uint16_t>()};  // zero-copy
    const int number = descriptor.get();
    send(&record, sizeof record, &number, 1);
  }

  void look_at_frames() {
    unsigned sum = 0;
    for (const InFrame& frame : held_) {
      for (std::size_t i = 0; i < frame.front->size(); ++i) sum += frame.front->data()[i];
      for (const BlockRef& buffer : frame.buffers) {
        for (std::size_t i = 0; i < buffer->size(); ++i) sum += buffer->data()[i];
      }
    }
    volatile unsigned kept = sum;
    static_cast<void>(kept);
  }

  void write(Input& input) {
    static const std::vector<std::uint8_t> bytes(1 << 20, 'y');
    OutFrame frame;
    frame.kind = 1;
    frame.body = {bytes.data(), input.number<std::uint16_t>() * 16u};
    frame.buffers.resize(input.number<std::uint8_t>() % 3, {bytes.data(), kSmallestSegment});
    if (input.number<std::uint8_t>() < 64) {
      channel_->write_at_once(frame);
      return;
    }
    Composed composed;
    channel_->compose(frame, composed);
    if (!channel_->wait_for_room(frame, composed, 0, no_interrupt)) return channel_->discard(composed);
    channel_->write(composed.parts.data(), composed.parts.size());
    channel_->sent(composed);
  }

  EndpointMemory home_;
  // Always the same, since fresh memory takes long.
  static inline const std::shared_ptr<SharedMemory> memory_ =
      SharedMemory::create(sizeof(LinkMemory)).first;
  Descriptor peer_;
  std::optional<RingChannel> channel_;
  FrameReader reader_{kLimits, *home_.pool};
  std::vector<InFrame> held_;
};

// No descriptor may be left over: the lowest free one is the same as before.
int lowest_descriptor() {
  const int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(descriptor);
  return descriptor;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const int lowest = lowest_descriptor();
  {
    Input input(data, size);
    Game().play(input);
  }
  if (lowest_descriptor() != lowest) std::abort();
  return 0;
}
