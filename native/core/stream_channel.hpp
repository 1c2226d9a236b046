// A channel over a socket alone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "channel.hpp"

namespace farcall {

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

}  // namespace farcall
