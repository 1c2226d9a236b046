// How a link or a call on it can fail.
#pragma once

#include <stdexcept>
#include <string>

namespace farcall {

// The bytes that arrived break the protocol. Costs their link and nothing else.
struct BadFrame : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The link is lost, for the reason that `what` gives.
struct LinkFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The deadline passed before the first byte of a frame was written.
struct NotSent : std::runtime_error {
  NotSent() : std::runtime_error("not sent by the deadline") {}
};

// The deadline passed later.
struct TimedOut : std::runtime_error {
  TimedOut() : std::runtime_error("the deadline passed") {}
};

// A signal arrived while a thread slept, and its handler raised.
struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted by a signal") {}
};

}  // namespace farcall
