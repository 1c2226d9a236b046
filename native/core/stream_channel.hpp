// A channel over sockets alone, its streams: the first carries frames in order, and further streams, if
// any, carry chunks of large buffers (`stripes.hpp`). Each may have keys: then what it carries goes as
// records (`records.hpp`), sealed where it is written and opened where it is read.
#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "channel.hpp"
#include "records.hpp"

namespace farcall {

constexpr char kStreamClosed[] = "a further stream of the link was closed";

// Streams are numbered: 0 is the first, others count from 1 in the order in which they joined.
class StreamChannel final : public Channel {
 public:
  // `keys`: of the first stream, or null. Throws LinkFailure: there is no crypto.
  explicit StreamChannel(Descriptor socket, const Striping& striping = {}, const Keys* keys = nullptr);

  std::size_t read(std::uint8_t* data, std::size_t size) override REQUIRES(reading);
  BlockRef segment(std::uint64_t place, std::size_t size) override REQUIRES(reading);
  bool has_segments() const override { return false; }
  bool has_stripes() const override { return striping_.streams > 1; }
  void begin_striped(std::uint8_t* data, std::uint64_t size, std::uint64_t chunk) override
      REQUIRES(reading);
  bool read_striped() override REQUIRES(reading);
  bool end_striped() override REQUIRES(reading);
  bool may_have_input() const override;
  bool look() override REQUIRES(reading);
  void on_readable() override REQUIRES(reading) { look(); }
  bool arm() override { return !may_have_input(); }
  nfds_t wait_set(pollfd* waited) const override REQUIRES(reading);

  void compose(const OutFrame& frame, Composed& composed) override;
  std::size_t write(const Part* parts, std::size_t count) override REQUIRES(writing) {
    return write_to(0, parts, count).taken;
  }
  bool write_some(Composed& composed) override REQUIRES(writing);
  bool wait_for_space(Nanoseconds deadline, Interrupt interrupt) override REQUIRES(writing);
  bool ask_for_space() override REQUIRES(writing) { return false; }
  bool is_stream() const override { return true; }
  void shut_down() override;
  void close() override;

  // Further streams. Any thread, but where something else is said.

  const Striping& striping() const { return striping_; }
  // One thread at a time. Throws LinkFailure: there are as many as there may be, or no crypto.
  void join(Descriptor socket, const Keys* keys = nullptr);
  unsigned further_streams() const { return joined_.load(std::memory_order_seq_cst); }
  int stream_fd(unsigned stream) const {
    return stream == 0 ? socket_.get() : further_[stream - 1]->socket.get();
  }
  void mark_ready(unsigned stream) { further_[stream - 1]->ready.store(true); }
  // Its end was noticed, and is no news any more.
  void mark_ending(unsigned stream) { further_[stream - 1]->ending.store(true); }
  bool is_ending(unsigned stream) const { return further_[stream - 1]->ending.load(); }

  // Whether reading goes on when there is input on a stream.
  bool wants(unsigned stream) const {
    return within_stripes_.load(std::memory_order_seq_cst)
               ? wanted_.load(std::memory_order_seq_cst) >> stream & 1
               : stream == 0;
  }
  bool is_within_stripes() const { return within_stripes_.load(std::memory_order_seq_cst); }
  // Whether reading may have to wait for a stream that is still to join.
  bool may_wait_for_streams() const {
    return is_within_stripes() && further_streams() + 1 < striping_.streams;
  }
  // Whether writing goes on when there is space on a stream.
  bool is_blocked(unsigned stream) const { return blocked_.load() >> stream & 1; }
  // Whether the peer has closed the first stream, though there may be more to read.
  bool has_first_ended() const;
  // The end that will be found on the first stream is due to a further one.
  void blame_further() { further_closed_.store(true); }
  const char* why_closed() const { return further_closed_.load() ? kStreamClosed : kClosed; }

  std::uint64_t striped_buffers() const { return striped_out_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kBuffer = 64 << 10;
  static constexpr std::uint32_t kAll = ~std::uint32_t{0};

  using RecordsRef = std::unique_ptr<Records>;

  struct FurtherStream {
    FurtherStream(Descriptor socket, RecordsRef records)
        : socket(std::move(socket)), records(std::move(records)) {}

    Descriptor socket;
    RecordsRef records;  // null without keys
    StripesIn::Stream in;
    bool ended = false;  // the reader has found the end
    std::atomic<bool> ready{true};  // there may be input
    std::atomic<bool> ending{false};
  };

  // The result of writing: how many bytes count as written, and whether anything happened: then a frame
  // can't be abandoned any more. With keys they count when the kernel has their records.
  struct Written {
    std::size_t taken;
    bool any;
  };

  Records* records_of(unsigned stream) const {
    return (stream == 0 ? records_ : further_[stream - 1]->records).get();
  }
  std::size_t receive(std::uint8_t* data, std::size_t size) REQUIRES(reading);
  std::size_t receive_further(FurtherStream& further, std::uint8_t* data, std::size_t size)
      REQUIRES(reading);
  std::size_t read_further(FurtherStream& further, std::uint8_t* data, std::size_t size)
      REQUIRES(reading);
  std::size_t read_records(std::uint8_t* data, std::size_t size) REQUIRES(reading);
  bool has_bytes() const REQUIRES(reading) {
    return records_ ? records_->in.is_ready() : start_ < end_;
  }
  bool look_first() REQUIRES(reading);
  Written write_to(unsigned stream, const Part* parts, std::size_t count) REQUIRES(writing);
  Written write_records(RecordsOut& records, int fd, const Part* parts, std::size_t count)
      REQUIRES(writing);

  const Striping striping_;
  RecordsRef records_;  // of the first stream; null without keys
  std::vector<std::uint8_t> buffer_ GUARDED_BY(reading);  // without keys
  std::size_t start_ GUARDED_BY(reading) = 0;
  std::size_t end_ GUARDED_BY(reading) = 0;
  std::string failure_ GUARDED_BY(reading);  // why nothing comes any more
  std::atomic<bool> buffered_{false};  // or it failed

  std::array<std::unique_ptr<FurtherStream>, kMaxStreams - 1> further_;
  std::atomic<unsigned> joined_{0};  // how many of them are there
  std::atomic<bool> further_closed_{false};

  StripesIn in_ GUARDED_BY(reading);
  StripesIn::Stream first_ GUARDED_BY(reading);
  std::atomic<bool> within_stripes_{false};
  // Within stripes: on which streams; a bit each. Of those that the reader has not seen yet, all.
  std::atomic<std::uint32_t> wanted_{kAll};

  std::uint64_t striped_so_far_ GUARDED_BY(writing) = 0;
  std::atomic<std::uint64_t> striped_out_{0};  // the same, for others
  std::atomic<std::uint32_t> blocked_{1};  // which streams the writer waits for; a bit each
};

}  // namespace farcall
