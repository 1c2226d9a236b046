// The parts that only a link itself needs, where it reads (`link_reading.cpp`), writes
// (`link_writing.cpp`) and ends (`link.cpp`).
#pragma once

#include <atomic>
#include <cstdint>

#include "endpoint.hpp"
#include "link.hpp"

namespace farcall {

// One caller waits for one outcome.
struct Link::Waiter {
  static constexpr std::uint32_t kWaiting = 0, kDelivered = 1, kFailed = 2;

  explicit Waiter(std::uint64_t call_id) : call_id(call_id) {}

  const std::uint64_t call_id;
  InFrame frame;
  std::atomic<std::uint32_t> state{kWaiting};

  bool is_set() const { return state.load(std::memory_order_acquire) != kWaiting; }
};

// A thread is inside: the socket stays open.
class Link::Use {
 public:
  explicit Use(Link& link) : link_(link) {
    if (!link.enter()) throw LinkFailure(link.loss_cause());
  }
  ~Use() { link_.leave(); }
  Use(const Use&) = delete;

 private:
  Link& link_;
};

// A caller's role of reading, while it sends. It takes the role before its request goes, if that is
// free, and gives it back when it has to wait for the peer: only the run of the program decides. So
// this keeps the role, and the compiler takes it for not held. A caller that is about to read says
// `start_reading` with it; from there on the compiler looks.
class Link::Reading {
 public:
  explicit Reading(Link& link) : link_(link) {}
  ~Reading() { stop(); }
  Reading(const Reading&) = delete;

  void start() {
    if (has_role_ || !link_.start_reading()) return;
    has_role_ = true;
    link_.channel_->reading.end();  // this has it
  }
  void stop() {
    if (!has_role_) return;
    has_role_ = false;
    link_.channel_->reading.begin();
    link_.stop_reading();
  }
  bool has_role() const { return has_role_; }

 private:
  Link& link_;
  bool has_role_ = false;
};

}  // namespace farcall
