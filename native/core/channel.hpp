// How bytes get to a peer: a socket (`stream_channel.hpp`), or rings in shared memory with a socket
// beside them (`ring_channel.hpp`).
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "frame_reader.hpp"
#include "futex.hpp"
#include "shared_memory.hpp"
#include "stripes.hpp"
#include "thread_safety.hpp"

namespace farcall {

// A buffer of a frame. If it lies in a file that the peer can map, at `offset`, it has that file's
// descriptor.
struct OutBuffer : Part {
  OutBuffer(Part part, int descriptor = -1, std::uint64_t offset = 0)
      : Part(part), descriptor(descriptor), offset(offset) {}
  OutBuffer(const std::uint8_t* data, std::size_t size) : OutBuffer(Part{data, size}) {}

  int descriptor;
  std::uint64_t offset;
};

// A frame to be sent. All memory is the caller's.
struct OutFrame {
  std::uint8_t kind = 0;
  std::uint64_t call_id = 0;
  Part meta;
  Part body;
  std::vector<OutBuffer> buffers;

  // Whether receivers with these limits take it.
  bool is_within(const Limits& limits) const {
    std::uint64_t total = body.size;
    for (const OutBuffer& buffer : buffers) {
      if (buffer.size > limits.buffer) return false;
      total += buffer.size;
    }
    return meta.size <= limits.meta && body.size <= limits.body && buffers.size() <= limits.buffers &&
           total <= limits.frame;
  }
};

// A frame as it goes over a channel: what to write, one part after the other.
struct Composed {
  std::vector<std::uint8_t> front;  // header and table
  std::vector<Part> parts;
  std::size_t in_segments = 0;  // bytes, which count as on their way
  std::vector<std::uint32_t> slots;
  std::vector<std::size_t> zero_copy;  // these buffers
  std::size_t told = 0;           // of so many of these the peer knows
  StripesOut stripes;  // after the parts

  bool is_written() const { return parts.empty() && stripes.is_written(); }
  // So many bytes of the parts are written.
  void take(std::size_t count);
  // Copies the rest of the caller's memory.
  void own();

 private:
  std::vector<std::uint8_t> owned_;
};

// Reading is for one thread at a time, and so is writing: what has to be done in a role requires it.
// Everything else is for any thread. `close` comes after all others.
class Channel : public Source {
 public:
  explicit Channel(Descriptor socket) : socket_(std::move(socket)) {}

  // The link decides who has them.
  [[no_unique_address]] const RoleToken reading{};
  [[no_unique_address]] const RoleToken writing{};

  int fd() const { return socket_.get(); }

  // Whether reading makes sense. Costs a few nanoseconds.
  virtual bool may_have_input() const = 0;
  // The same, with a system call where only that can tell.
  virtual bool look() REQUIRES(reading) = 0;
  // The socket can be read. Throws BadFrame.
  virtual void on_readable() REQUIRES(reading) = 0;
  // The caller no longer needs the frame that was read.
  virtual void finish_reading() REQUIRES(reading) {}
  // The reader is about to sleep until the socket can be read. Returns false if there is input.
  virtual bool arm() = 0;
  virtual void disarm() REQUIRES(reading) {}
  // Writes the descriptors to poll for input, `kMaxStreams` at most. Returns their number.
  virtual nfds_t wait_set(pollfd* waited) const REQUIRES(reading) {
    waited[0] = {socket_.get(), POLLIN, 0};
    return 1;
  }
  // The outcome of this call need not wake anybody: the calling thread looks for it soon, having
  // called this with 0. For any thread.
  virtual void await_outcome(std::uint64_t) {}

  // May leave it to `wait_for_room`, and `composed` without parts, if too much is on its way.
  virtual void compose(const OutFrame& frame, Composed& composed) = 0;
  // The composed frame is not sent.
  virtual void discard(const Composed&) {}
  // Wait until so much may be on its way, compose the rest, and tell the peer which memory to map.
  // Returns false if the deadline passed. Throws LinkFailure.
  virtual bool wait_for_room(const OutFrame&, Composed&, Nanoseconds, Interrupt) REQUIRES(writing) {
    return true;
  }
  // How many bytes were taken; 0: there is no space. Throws LinkFailure.
  virtual std::size_t write(const Part* parts, std::size_t count) REQUIRES(writing) = 0;
  // Writes as much of the rest as there is space for. Returns false if nothing was written. Throws
  // LinkFailure.
  virtual bool write_some(Composed& composed) REQUIRES(writing);
  virtual void sent(const Composed&) REQUIRES(writing) {}
  // All of a small frame, without a system call if no thread sleeps at the other end. Returns
  // false, and writes nothing, if it is not small or there is no space. Throws LinkFailure.
  virtual bool write_at_once(const OutFrame&) REQUIRES(writing) { return false; }
  // May return early. Returns false if the deadline passed. Throws LinkFailure.
  virtual bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) REQUIRES(writing) = 0;
  // The rest of a frame waits for the endpoint. Returns true if there is space already,
  // or the channel can't ask: then the endpoint has to.
  virtual bool ask_for_space() REQUIRES(writing) = 0;
  virtual void wake_writer() {}

  // Whether epoll alone tells of input and space.
  virtual bool is_stream() const = 0;
  // Give back to the system what has not been used since the last call. True if there is more.
  virtual bool trim() { return false; }
  // The same for memory of the writer. Throws LinkFailure.
  virtual bool trim_writing() REQUIRES(writing) { return false; }
  virtual void shut_down();
  virtual void close() { socket_.reset(); }

 protected:
  Descriptor socket_;
};

constexpr char kClosed[] = "the peer closed the connection";

// Whether a system call on a socket failed because there is nothing to do now.
bool would_block(int error);
[[noreturn]] void throw_broken(int error);

HeaderBytes header_of(const OutFrame& frame, std::uint8_t flags);

// Header, table and parts of a frame. `places`: which segment each buffer lies in, or in what chunks
// it goes, as `flag` says; 0 if it is in the frame. Empty if all are.
void lay_out(const OutFrame& frame, const std::vector<std::uint64_t>& places, Composed& composed,
             std::uint8_t flag = kInSegments);

}  // namespace farcall
