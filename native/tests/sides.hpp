// One side of a link over rings, without the roles that a link has, and the peer's socket.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "core/ring_channel.hpp"
#include "pairs.hpp"

namespace farcall {

struct Side {
  explicit Side(const RingBounds& bounds = {}) {
    auto [ours, theirs] = socket_pair();
    peer = std::move(theirs);
    channel.emplace(std::move(ours), memory, 0, home, bounds);
  }

  std::shared_ptr<SharedMemory> memory = SharedMemory::create(sizeof(LinkMemory)).first;
  EndpointMemory home;
  Descriptor peer;
  std::optional<RingChannel> channel;
};

}  // namespace farcall
