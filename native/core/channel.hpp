// How bytes get to a peer: a socket, or rings in shared memory with a socket beside them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frame_reader.hpp"
#include "futex.hpp"
#include "ring.hpp"
#include "segments.hpp"
#include "shared_memory.hpp"

namespace farcall {

struct Part {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

// A frame to be sent. All memory is the caller's.
struct OutFrame {
  std::uint8_t kind = 0;
  std::uint64_t call_id = 0;
  Part meta;
  Part body;
  std::vector<Part> buffers;
};

// A frame as it goes over a channel: what to write, one part after the other.
struct Composed {
  std::vector<std::uint8_t> front;  // header and table
  std::vector<Part> parts;
  std::size_t in_segments = 0;  // bytes
  std::vector<std::uint32_t> slots;
};

// Reading is for one thread at a time, and so is writing; `may_have_input`, `compose`, `discard`,
// `wake_writer`, `shut_down` and `trim` are for any. `close` comes after all others.
class Channel : public Source {
 public:
  explicit Channel(Descriptor socket) : socket_(std::move(socket)) {}

  int fd() const { return socket_.get(); }

  // Whether reading makes sense. Costs a few nanoseconds.
  virtual bool may_have_input() const = 0;
  // The same, with a system call where only that can tell.
  virtual bool look() = 0;
  // The socket can be read. Throws BadFrame.
  virtual void on_readable() = 0;
  // What was read is done with.
  virtual void finish_reading() {}
  // The reader is about to sleep until the socket can be read. False: there is input already.
  virtual bool arm() = 0;
  virtual void disarm() {}

  virtual void compose(const OutFrame& frame, Composed& composed) = 0;
  // What was composed is not sent.
  virtual void discard(const Composed&) {}
  // Wait until so much may be on its way. False: the deadline passed. Throws LinkFailure.
  virtual bool wait_for_room(const Composed&, Nanoseconds, Interrupt) { return true; }
  // How many bytes were taken; 0: there is no space. Throws LinkFailure.
  virtual std::size_t write(const Part* parts, std::size_t count) = 0;
  virtual void sent(const Composed&) {}
  // All of a small frame, without a system call if nobody sleeps at the other end. False: none of
  // it, for it is not small, or there is no space. Throws LinkFailure.
  virtual bool write_at_once(const OutFrame&) { return false; }
  // May return early. False: the deadline passed. Throws LinkFailure.
  virtual bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) = 0;
  // What is left of a frame waits for the endpoint. True: there is space already, or the channel
  // can't ask: the endpoint has to.
  virtual bool ask_for_space() = 0;
  virtual void wake_writer() {}

  // Whether epoll alone tells of input and space.
  virtual bool is_stream() const = 0;
  // Give back to the system what has not been used since the last call. True if there is more.
  virtual bool trim() { return false; }
  void shut_down();
  void close() { socket_.reset(); }

 protected:
  Descriptor socket_;
};

class StreamChannel final : public Channel {
 public:
  explicit StreamChannel(Descriptor socket);

  std::size_t read(std::uint8_t* data, std::size_t size) override;
  BlockRef segment(std::uint64_t place, std::size_t size) override;
  bool has_segments() const override { return false; }
  bool may_have_input() const override { return buffered_.load(std::memory_order_relaxed); }
  bool look() override;
  void on_readable() override { look(); }
  bool arm() override { return !may_have_input(); }

  void compose(const OutFrame& frame, Composed& composed) override;
  std::size_t write(const Part* parts, std::size_t count) override;
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) override;
  bool ask_for_space() override { return false; }
  bool is_stream() const override { return true; }

 private:
  static constexpr std::size_t kBuffer = 64 << 10;

  std::size_t receive(std::uint8_t* data, std::size_t size);

  std::vector<std::uint8_t> buffer_;
  std::size_t start_ = 0;
  std::size_t end_ = 0;
  std::string failure_;  // why nothing comes any more
  std::atomic<bool> buffered_{false};  // or it failed
};

// In the memory of a link: two rings, and the states of the segments of either side.
struct LinkMemory {
  static constexpr std::size_t kRing = 1 << 20;
  static constexpr std::uint64_t kMagic = 0x31'6d68'7363'6c66;  // "flcshm1"

  std::uint64_t magic;
  RingControl controls[2];
  SegmentStates states[2];
  alignas(64) std::uint8_t data[2][kRing];
};

class RingChannel final : public Channel {
 public:
  // `side`: 0 for who dialled, 1 for the other.
  RingChannel(Descriptor socket, std::shared_ptr<SharedMemory> memory, int side);

  // Both sides call this on a connected Unix socket. Null: there is no shared memory for the two,
  // and the socket is as before. Throws LinkFailure: the connection is of no use.
  static std::shared_ptr<SharedMemory> set_up(const Descriptor& socket, int side,
                                              Nanoseconds deadline);

  std::size_t read(std::uint8_t* data, std::size_t size) override;
  BlockRef segment(std::uint64_t place, std::size_t size) override;
  bool has_segments() const override { return true; }
  bool may_have_input() const override {
    return reader_.has_input() || ended_.load(std::memory_order_relaxed);
  }
  bool look() override { return may_have_input(); }
  void on_readable() override;
  void finish_reading() override;
  bool arm() override { return reader_.arm() && !ended_.load(std::memory_order_relaxed); }
  void disarm() override { reader_.disarm(); }

  void compose(const OutFrame& frame, Composed& composed) override;
  void discard(const Composed& composed) override;
  bool wait_for_room(const Composed& composed, Nanoseconds deadline, Interrupt interrupt) override;
  std::size_t write(const Part* parts, std::size_t count) override;
  void sent(const Composed& composed) override;
  bool write_at_once(const OutFrame& frame) override;
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) override;
  bool ask_for_space() override { return writer_.ask_for_bell(); }
  bool is_stream() const override { return false; }
  void wake_writer() override { writer_.wake(); }
  bool trim() override { return segments_out_.trim(); }

 private:
  enum class RecordType : std::uint32_t { kBell = 1, kSegment = 2 };
  // What goes over the socket beside the rings.
  struct Record {
    RecordType type;
    std::uint32_t slot;
    std::uint64_t serial;
    std::uint64_t size;
  };

  LinkMemory& shared() const { return *reinterpret_cast<LinkMemory*>(memory_->data()); }
  void check_peer() const;
  void ring_bell();
  bool announce(SegmentName name, std::size_t size, int descriptor);
  bool receive_record();

  std::shared_ptr<SharedMemory> memory_;
  RingWriter writer_;
  RingReader reader_;
  SegmentWriter segments_out_;
  SegmentReader segments_in_;
  std::atomic<bool> ended_{false};  // nothing comes over the socket any more

  // Bytes in segments that the peer has not read the frames of, by the position after the frame.
  static constexpr std::size_t kMaxOnTheirWay = 1 << 30;
  std::deque<std::pair<std::uint64_t, std::size_t>> on_their_way_;
  std::size_t bytes_on_their_way_ = 0;
};

}  // namespace farcall
