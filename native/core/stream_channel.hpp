// A channel over sockets alone: one, which carries frames in order, and others beside it, if any,
// which carry chunks of large buffers (`stripes.hpp`). Each may have keys: then what it carries goes as
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

constexpr char kSideClosed[] = "a connection beside the first one of the link was closed";

// Connections are numbered: 0 is the first, others count from 1 in the order in which they joined.
class StreamChannel final : public Channel {
 public:
  // `keys`: of the first connection, or null. Throws LinkFailure: there is no crypto.
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

  // Connections beside the first. Any thread, but where something else is said.

  const Striping& striping() const { return striping_; }
  // One thread at a time. Throws LinkFailure: there are as many as there may be, or no crypto.
  void join(Descriptor socket, const Keys* keys = nullptr);
  unsigned sides() const { return joined_.load(std::memory_order_seq_cst); }
  int side_fd(unsigned lane) const { return sides_[lane - 1]->socket.get(); }
  void mark_ready(unsigned lane) { sides_[lane - 1]->ready.store(true); }
  // Its end was noticed, and is no news any more.
  void mark_ending(unsigned lane) { sides_[lane - 1]->ending.store(true); }
  bool is_ending(unsigned lane) const { return sides_[lane - 1]->ending.load(); }

  // Whether reading goes on when there is input on a connection.
  bool wants(unsigned lane) const {
    return within_stripes_.load(std::memory_order_seq_cst)
               ? wanted_.load(std::memory_order_seq_cst) >> lane & 1
               : lane == 0;
  }
  bool is_within_stripes() const { return within_stripes_.load(std::memory_order_seq_cst); }
  // Whether reading may have to wait for a connection that is still to join.
  bool may_wait_for_sides() const { return is_within_stripes() && sides() + 1 < striping_.streams; }
  // Whether writing goes on when there is space on a connection.
  bool is_blocked(unsigned lane) const { return blocked_.load() >> lane & 1; }
  // Whether the peer has closed the first connection, though there may be more to read.
  bool has_first_ended() const;
  // The end that will be found on the first connection is due to one beside it.
  void blame_side() { side_closed_.store(true); }
  const char* why_closed() const { return side_closed_.load() ? kSideClosed : kClosed; }

  std::uint64_t striped_buffers() const { return striped_out_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kBuffer = 64 << 10;
  static constexpr std::uint32_t kAll = ~std::uint32_t{0};

  using RecordsRef = std::unique_ptr<Records>;

  struct Side {
    Side(Descriptor socket, RecordsRef records)
        : socket(std::move(socket)), records(std::move(records)) {}

    Descriptor socket;
    RecordsRef records;  // null without keys
    StripesIn::Lane in;
    bool ended = false;  // the reader has found the end
    std::atomic<bool> ready{true};  // there may be input
    std::atomic<bool> ending{false};
  };

  // What came of writing: how many bytes count as written, and whether anything happened: then a frame
  // can't be abandoned any more. With keys they count when the kernel has their records.
  struct Written {
    std::size_t taken;
    bool any;
  };

  int fd_of(unsigned lane) const { return lane == 0 ? socket_.get() : side_fd(lane); }
  Records* records_of(unsigned lane) const {
    return (lane == 0 ? records_ : sides_[lane - 1]->records).get();
  }
  std::size_t receive(std::uint8_t* data, std::size_t size) REQUIRES(reading);
  std::size_t receive_side(Side& side, std::uint8_t* data, std::size_t size) REQUIRES(reading);
  std::size_t read_side(Side& side, std::uint8_t* data, std::size_t size) REQUIRES(reading);
  std::size_t read_records(std::uint8_t* data, std::size_t size) REQUIRES(reading);
  bool has_bytes() const REQUIRES(reading) {
    return records_ ? records_->in.is_ready() : start_ < end_;
  }
  bool look_first() REQUIRES(reading);
  Written write_to(unsigned lane, const Part* parts, std::size_t count) REQUIRES(writing);
  Written write_records(RecordsOut& records, int fd, const Part* parts, std::size_t count)
      REQUIRES(writing);

  const Striping striping_;
  RecordsRef records_;  // of the first connection; null without keys
  std::vector<std::uint8_t> buffer_ GUARDED_BY(reading);  // without keys
  std::size_t start_ GUARDED_BY(reading) = 0;
  std::size_t end_ GUARDED_BY(reading) = 0;
  std::string failure_ GUARDED_BY(reading);  // why nothing comes any more
  std::atomic<bool> buffered_{false};  // or it failed

  std::array<std::unique_ptr<Side>, kMaxStreams - 1> sides_;
  std::atomic<unsigned> joined_{0};  // how many of them are there
  std::atomic<bool> side_closed_{false};

  StripesIn in_ GUARDED_BY(reading);
  StripesIn::Lane first_ GUARDED_BY(reading);
  std::atomic<bool> within_stripes_{false};
  // Within stripes: on which connections; a bit each. Of those that the reader has not seen yet, all.
  std::atomic<std::uint32_t> wanted_{kAll};

  std::uint64_t striped_so_far_ GUARDED_BY(writing) = 0;
  std::atomic<std::uint64_t> striped_out_{0};  // the same, for others
  std::atomic<std::uint32_t> blocked_{1};  // which connections the writer waits for; a bit each
};

}  // namespace farcall
