// A ring in plain memory, with windows as small as a test wants them.
#pragma once

#include "core/ring.hpp"
#include "frames.hpp"

namespace farcall {

constexpr std::size_t kSize = 256;

constexpr std::size_t kSizes[kWindows] = {kSize, 4 * kSize, 16 * kSize};

// There is memory for so many windows.
struct Keeper : WindowKeeper {
  explicit Keeper(unsigned windows) : windows(windows) {}
  bool take(unsigned window) override {
    if (window < windows) taken[window] = true;
    return window < windows;
  }
  void give_back(unsigned window) override { taken[window] = false; }
  bool touch(unsigned window) override { return window < windows; }
  unsigned windows;
  bool taken[kWindows] = {true};
};

struct Ring {
  explicit Ring(unsigned count = 1) : keeper(count) {}

  RingControl control{};
  std::uint8_t data[kSizes[0] + kSizes[1] + kSizes[2]] = {};
  const RingWindows windows{{{data, kSizes[0]},
                             {data + kSizes[0], kSizes[1]},
                             {data + kSizes[0] + kSizes[1], kSizes[2]}}};
  Keeper keeper;
  RingWriter writer{control, windows, keeper};
  RingReader reader{control, windows, keeper};

  std::size_t write(const Bytes& bytes) {
    const std::size_t count = writer.write(bytes.data(), bytes.size());
    writer.publish();
    return count;
  }
  Bytes read(std::size_t size) {
    Bytes bytes(size);
    bytes.resize(reader.read(bytes.data(), size));
    reader.publish();
    return bytes;
  }
};

}  // namespace farcall
