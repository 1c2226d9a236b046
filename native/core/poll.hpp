// Sleeping until a descriptor is ready.
#pragma once

#include <poll.h>

#include <algorithm>

#include "futex.hpp"

namespace farcall {

// How many of `waited` are ready; 0: the deadline passed.
inline int poll_until(pollfd* waited, nfds_t count, Nanoseconds deadline, Interrupt interrupt) {
  while (true) {
    const Nanoseconds left = deadline == kNever ? kNever : std::max<Nanoseconds>(deadline - now(), 0);
    const Nanoseconds piece = piece_of(left, interrupt);
    const timespec timeout = timespec_of(piece);
    const int ready = ppoll(waited, count, piece == kNever ? nullptr : &timeout, nullptr);
    if (ready > 0) return ready;
    interrupt();
    if (ready == 0 && piece == left) return 0;
  }
}

}  // namespace farcall
