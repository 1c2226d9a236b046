#include "ring_channel.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "descriptor_passing.hpp"
#include "errors.hpp"
#include "poll.hpp"

namespace farcall {

namespace {

constexpr std::size_t kSmallFrame = 16 << 10;
// Read from a socket at a time: more than it holds, so only who never stops sending gets there.
constexpr int kMaxRecords = 1 << 16;
constexpr std::size_t kRecordsAtOnce = 16;
// How long a process may have no file descriptor to spare before this costs the link.
constexpr Nanoseconds kMaxWaitForDescriptor = 60 * kSecond;

}  // namespace

RingChannel::RingChannel(Descriptor socket, std::shared_ptr<SharedMemory> memory, int side,
                         EndpointMemory& home, const RingBounds& bounds)
    : Channel(std::move(socket)),
      home_(home),
      memory_(std::move(memory)),
      windows_out_(*memory_, shared().windows(side)),
      windows_in_(*memory_, shared().windows(1 - side)),
      writer_(shared().controls[side], shared().windows(side), windows_out_),
      reader_(shared().controls[1 - side], shared().windows(1 - side), windows_in_),
      segments_out_(memory_, shared().states[side], home.budget,
                    [this](SegmentName name, std::size_t size, int descriptor) {
                      return announce(name, size, descriptor);
                    }),
      segments_in_(memory_, shared().states[1 - side]),
      bounds_(bounds) {}

// A window that is left over from before counts still.
bool RingChannel::Windows::take(unsigned window) {
  if (!has_[window]) has_[window] = memory_.take(offset(window), windows_[window].size);
  return has_[window];
}

void RingChannel::Windows::give_back(unsigned window) {
  if (has_[window]) has_[window] = !memory_.give_back(offset(window), windows_[window].size);
}

bool RingChannel::Windows::touch(unsigned window) {
  return memory_.touch(offset(window), windows_[window].size);
}

// Little was sent since the last call: the smallest window does.
bool RingChannel::trim_writing() {
  const std::uint64_t written = writer_.written();
  const bool is_quiet = written - written_at_trim_ <= sizeof LinkMemory::small[0];
  written_at_trim_ = written;
  return is_quiet ? writer_.shrink() : writer_.is_grown();
}

std::size_t RingChannel::read(std::uint8_t* data, std::size_t size) {
  const std::size_t count = reader_.read(data, size);
  if (count > 0 || !ended_.load(std::memory_order_relaxed)) return count;
  // Not before everything that the peer wrote was read. It wrote before it closed the socket.
  const std::size_t last = reader_.read(data, size);
  if (last == 0) throw LinkFailure(kClosed);
  return last;
}

BlockRef RingChannel::segment(std::uint64_t place, std::size_t size) {
  // The peer announced it before it sent the frame, but over the socket.
  const auto await = [this](auto is_known) {
    reading.assume();
    for (int i = 0; i < kMaxRecords && !is_known() && receive_records(); ++i) {
    }
  };
  BlockRef block;
  if (place & kImportedPlace) {
    const std::uint64_t number = place & ~kImportedPlace;
    await([&] { return imported_.knows(number); });
    block = imported_.open(number, size);
  } else {
    const SegmentName name = SegmentName::unpack(place);
    await([&] {
      reading.assume();
      return segments_in_.knows(name);
    });
    block = segments_in_.open(name, size);
  }
  if (SharedMemory::count() <= bounds_.mappings) return block;
  BlockRef copy = home_.pool->allocate(size);
  std::memcpy(copy->data(), block->data(), size);
  return copy;
}

// The thread that polls the socket is told of the rest.
void RingChannel::on_readable() {
  for (int i = 0; i < kMaxRecords && receive_records(); ++i) {
  }
}

// Returns whether there may be more.
//
// Looks before it takes: a descriptor for which this process has no free number is not lost with the
// record that it came with.
bool RingChannel::receive_records() {
  if (ended_.load(std::memory_order_relaxed)) return false;
  Record records[kRecordsAtOnce];
  iovec vector{records, sizeof records};
  alignas(cmsghdr) Control control;
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t count = recvmsg(socket_.get(), &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0 && would_block(errno)) return false;
  if (count <= 0) {
    ended_.store(true, std::memory_order_relaxed);
    return false;
  }
  Descriptor descriptor = descriptor_of(message);  // of the last record: the system stops there
  const bool had_descriptor = static_cast<bool>(descriptor);
  if (!descriptor && (message.msg_flags & MSG_CTRUNC) != 0) {
    wait_for_descriptor();
    return true;
  }
  recv(socket_.get(), records, static_cast<std::size_t>(count), MSG_DONTWAIT);
  if (count % sizeof(Record) != 0) throw BadFrame("the peer sent a broken record beside the rings");
  const std::size_t known = count / sizeof(Record);
  for (std::size_t i = 0; i < known; ++i) {
    // NOLINTNEXTLINE(bugprone-use-after-move): the last record takes it, once
    learn(records[i], i + 1 == known ? std::move(descriptor) : Descriptor());
  }
  waits_for_descriptor_since_ = kNever;
  if (had_descriptor) home_.spare.restore();  // in the place of that one, which is closed
  return had_descriptor || known == kRecordsAtOnce || is_shut_down_.load(std::memory_order_relaxed);
}

// Other threads of this process may be faster: then until there is a free one again.
void RingChannel::wait_for_descriptor() {
  const Nanoseconds time = now();
  if (waits_for_descriptor_since_ == kNever) waits_for_descriptor_since_ = time;
  if (time - waits_for_descriptor_since_ > kMaxWaitForDescriptor) {
    throw BadFrame("this process has too many open files to receive shared memory");
  }
  home_.spare.give();
  poll_until(nullptr, 0, time + kMillisecond, no_interrupt);
}

void RingChannel::learn(const Record& record, Descriptor descriptor) {
  switch (record.type) {
    case RecordType::kBell:
      break;
    case RecordType::kSegment:
      segments_in_.learn({record.slot, record.serial}, record.size, descriptor);
      break;
    case RecordType::kZeroCopy:
      if (!bounds_.zero_copy) {
        throw BadFrame("the peer sent a shared tensor, which this worker does not take");
      }
      imported_.learn(record.serial, record.size, descriptor);
      break;
    default:
      throw BadFrame("the peer sent an unknown record beside the rings");
  }
}

void RingChannel::finish_reading() {
  if (reader_.publish() == Tell::kBell) ring_bell();
}

void RingChannel::ring_bell() {
  const Record record{RecordType::kBell, 0, 0, 0};
  // If it does not fit, there are bells that the peer has not heard yet. If it is gone, the
  // reader finds out.
  send(socket_.get(), &record, sizeof record, MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool RingChannel::announce(SegmentName name, std::size_t size, int descriptor) {
  return send_record({RecordType::kSegment, name.slot, name.serial, size}, descriptor);
}

bool RingChannel::send_record(Record record, int descriptor) {
  iovec vector{&record, sizeof record};
  alignas(cmsghdr) Control control = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (descriptor >= 0) attach(message, control, descriptor);
  return sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof record;
}

bool RingChannel::reserve(std::size_t size) {
  std::size_t reserved = reserved_.load(std::memory_order_relaxed);
  do {
    if (reserved > 0 && reserved + size > bounds_.on_their_way) return false;
  } while (!reserved_.compare_exchange_weak(reserved, reserved + size, std::memory_order_relaxed));
  return true;
}

// Threads compose at the same time, as far as there is room. A thread that finds none needs the
// role of writing first: only its holder knows what the peer has read, and may wait for it.
void RingChannel::compose(const OutFrame& frame, Composed& composed) {
  const std::size_t size = size_in_segments(frame);
  if (size > 0) {
    if (!reserve(size)) return;
    composed.in_segments = size;
  }
  fill_segments(frame, composed);
}

bool RingChannel::goes_in_segment(const OutBuffer& buffer) const {
  return buffer.size >= kSmallestSegment && !is_zero_copy(buffer);
}

std::size_t RingChannel::size_in_segments(const OutFrame& frame) const {
  std::size_t size = 0;
  for (const OutBuffer& buffer : frame.buffers) size += goes_in_segment(buffer) ? buffer.size : 0;
  return size;
}

// With the bytes reserved.
void RingChannel::fill_segments(const OutFrame& frame, Composed& composed) {
  std::vector<std::uint64_t> places;
  for (std::size_t i = 0; i < frame.buffers.size(); ++i) {
    const OutBuffer& buffer = frame.buffers[i];
    if (is_zero_copy(buffer) && composed.zero_copy.size() < kMaxImported) {
      composed.zero_copy.push_back(i);
      places.resize(frame.buffers.size());
      places[i] = kImportedPlace;  // `announce_zero_copy` has the number
      continue;
    }
    if (!goes_in_segment(buffer)) continue;
    composed.slots.reserve(frame.buffers.size());  // so that noting a slot can't fail
    const SegmentWriter::Place place = segments_out_.take(buffer.size);
    if (!place) {
      composed.in_segments -= buffer.size;
      reserved_.fetch_sub(buffer.size, std::memory_order_relaxed);
      continue;
    }
    composed.slots.push_back(place.name.slot);
    std::memcpy(place.data(), buffer.data, buffer.size);
    places.resize(frame.buffers.size());
    places[i] = place.name.packed();
  }
  lay_out(frame, places, composed);
}

void RingChannel::discard(const Composed& composed) {
  reserved_.fetch_sub(composed.in_segments, std::memory_order_relaxed);
  for (const std::uint32_t slot : composed.slots) segments_out_.put_back(slot);
}

void RingChannel::discard_read(std::uint64_t read) {
  while (!on_their_way_.empty() && on_their_way_.front().end <= read) {
    reserved_.fetch_sub(on_their_way_.front().in_segments, std::memory_order_relaxed);
    zero_copy_on_their_way_ -= on_their_way_.front().zero_copy;
    on_their_way_.pop_front();
  }
}

template <class IsThere>
bool RingChannel::wait_for_peer(IsThere is_there, Nanoseconds deadline, Interrupt interrupt) {
  while (true) {
    const std::uint64_t read = writer_.read_by_peer();
    discard_read(read);
    if (is_there()) return true;
    check_peer();
    if (!writer_.wait_for_progress(read, deadline, interrupt)) return false;
  }
}

bool RingChannel::wait_for_room(const OutFrame& frame, Composed& composed, Nanoseconds deadline,
                                Interrupt interrupt) {
  if (composed.parts.empty()) {
    const std::size_t size = size_in_segments(frame);
    const auto is_room = [&] {
      writing.assume();
      if (reserve(size)) return true;
      // Other reservations wait for the role of writing, which this thread has.
      if (on_their_way_.empty()) reserved_.fetch_add(size, std::memory_order_relaxed);
      return on_their_way_.empty();
    };
    if (!wait_for_peer(is_room, deadline, interrupt)) return false;
    composed.in_segments = size;
    fill_segments(frame, composed);
  } else if (composed.in_segments > 0) {
    discard_read(writer_.read_by_peer());
  }
  if (composed.zero_copy.empty()) return true;
  const auto is_room = [&] {
    writing.assume();
    return on_their_way_.empty() || zero_copy_on_their_way_ + composed.zero_copy.size() <= kMaxImported;
  };
  return wait_for_peer(is_room, deadline, interrupt) &&
         announce_zero_copy(frame, composed, deadline, interrupt);
}

// Now, and not when the frame is composed: so numbers and frames come in the same order, and the
// receiver can tell what no frame will name. Returns false if the deadline passed.
bool RingChannel::announce_zero_copy(const OutFrame& frame, Composed& composed, Nanoseconds deadline,
                                     Interrupt interrupt) {
  const std::size_t count = frame.buffers.size();
  while (composed.told < composed.zero_copy.size()) {
    const std::size_t index = composed.zero_copy[composed.told];
    const OutBuffer& buffer = frame.buffers[index];
    const std::uint64_t number = announced_ever_ + 1;
    if (send_record({RecordType::kZeroCopy, 0, number, buffer.offset}, buffer.descriptor)) {
      const std::uint64_t place = kImportedPlace | number;
      std::memcpy(composed.front.data() + kHeaderSize + 8 * (count + index), &place, 8);
      announced_ever_ = number;
      ++composed.told;
    } else if (would_block(errno)) {
      pollfd waited{socket_.get(), POLLOUT, 0};
      if (poll_until(&waited, 1, deadline, interrupt) == 0) return false;
    } else if (errno == ETOOMANYREFS) {  // on their way in the whole system, and nothing tells when not
      if (now() >= deadline) return false;
      poll_until(nullptr, 0, std::min(deadline, now() + kMillisecond), interrupt);
    } else {
      throw_broken(errno);
    }
  }
  return true;
}

void RingChannel::sent(const Composed& composed) {
  if (composed.in_segments == 0 && composed.zero_copy.empty()) return;
  try {
    on_their_way_.push_back({writer_.written(), composed.in_segments, composed.zero_copy.size()});
    zero_copy_on_their_way_ += composed.zero_copy.size();
  } catch (const std::bad_alloc&) {  // it was sent, and is not counted
    reserved_.fetch_sub(composed.in_segments, std::memory_order_relaxed);
  }
}

std::size_t RingChannel::write(const Part* parts, std::size_t count, std::uint64_t outcome) {
  std::size_t written = 0, total = 0;
  for (std::size_t i = 0; i < count; ++i) total += parts[i].size;
  writer_.fits(total);  // makes it fit, if that is possible
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t taken = writer_.write(parts[i].data, parts[i].size);
    written += taken;
    if (taken < parts[i].size) break;
  }
  if (written > 0 && writer_.publish(outcome) == Tell::kBell) ring_bell();
  return written;
}

bool RingChannel::write_at_once(const OutFrame& frame) {
  std::size_t size = kHeaderSize + frame.meta.size + frame.body.size;
  for (const Part& buffer : frame.buffers) size += 8 + kAlignment + buffer.size;
  if (size > kSmallFrame || !writer_.fits(size)) return false;
  const std::uint64_t outcome = is_outcome(frame.kind) ? frame.call_id : 0;
  if (frame.buffers.empty()) {
    const HeaderBytes header = header_of(frame, 0);
    const Part parts[] = {{header.data(), header.size()}, frame.meta, frame.body};
    write(parts, std::size(parts), outcome);
    return true;
  }
  Composed composed;
  lay_out(frame, {}, composed);
  write(composed.parts.data(), composed.parts.size(), outcome);
  return true;
}

bool RingChannel::wait_for_space(Nanoseconds deadline, Interrupt interrupt) {
  check_peer();
  return writer_.wait_for_space(deadline, interrupt);
}

// A dead peer never makes space. The thread that reads may be this very one.
void RingChannel::check_peer() const {
  pollfd looked_at{socket_.get(), POLLRDHUP, 0};
  if (::poll(&looked_at, 1, 0) > 0) throw LinkFailure(kClosed);
}

}  // namespace farcall
