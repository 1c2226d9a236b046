// A ring in plain memory, with windows as small as a test wants them.
#pragma once

#include <algorithm>
#include <semaphore>

#include "check.hpp"
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
  const RingWindows windows{
      {{data, kSizes[0]}, {data + kSizes[0], kSizes[1]}, {data + kSizes[0] + kSizes[1], kSizes[2]}}};
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

// Reads what another thread writes, at most as much at once as `most` says each time. Sleeps at the
// bell, which the writer rings, whenever it may.
template <class Most>
Bytes read_all(Ring& ring, std::counting_semaphore<>& bell, std::size_t total, Most most) {
  Bytes arrived(total);
  std::size_t read = 0;
  while (read < total) {
    const std::size_t count = ring.reader.read(arrived.data() + read,
                                               std::min<std::size_t>(most(), total - read));
    read += count;
    CHECK(ring.reader.publish() == Tell::kNobody);
    if (count == 0 && ring.reader.arm()) bell.acquire();
    if (count == 0) ring.reader.disarm();
  }
  return arrived;
}

}  // namespace farcall
