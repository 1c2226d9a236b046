// A two-way connection to one worker: which thread may read, which may write, and how it ends.
//
// Reading is a role, held by one thread at a time: the endpoint's `next`, or a caller inside
// `exchange`, which takes its own reply off the channel. Writing is a role, too: a frame is written
// by one thread from its first byte to its last. A writer whose deadline passes in the middle of a
// frame leaves a copy of the rest, which `next` writes when the peer reads again; the role stays
// taken until then.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "channel.hpp"
#include "errors.hpp"
#include "frame_reader.hpp"
#include "futex.hpp"
#include "rundown.hpp"
#include "spin.hpp"
#include "stream_channel.hpp"
#include "thread_safety.hpp"

namespace farcall {

class Endpoint;
class Link;

// A frame that no caller waits for, or the end of a link, or the request to open its further
// streams.
struct Event {
  std::shared_ptr<Link> link;
  std::optional<InFrame> frame;
  std::string cause;  // without a frame: why the link ended
  bool wants_streams = false;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(std::shared_ptr<Endpoint> home, std::uint64_t id, std::unique_ptr<Channel> channel,
       const Limits& limits);
  ~Link();

  std::uint64_t id() const { return id_; }
  // Whether the link has ended: nothing can be sent or received on it any more.
  bool is_lost() const { return lost_.load(std::memory_order_seq_cst); }
  // Why it is lost, or "".
  std::string loss_cause() EXCLUDES(state_);

  // Whether receivers take a frame of this size. If not, it must not be sent.
  bool may_send(const OutFrame& frame) const;

  // All of these are for any thread. They throw NotSent, TimedOut, LinkFailure, Interrupted.
  void send(const OutFrame& frame, Nanoseconds deadline, Interrupt interrupt);
  // Sends a small frame if that does not block. Returns whether it was sent. Does not throw.
  bool send_at_once(const OutFrame& frame);
  // Sends a request and waits for its outcome. `meanwhile` is called when it was sent.
  InFrame exchange(const OutFrame& frame, Nanoseconds deadline, Interrupt interrupt,
                   const std::function<void()>& meanwhile);
  // Reads until a frame of one of these kinds (a bit each) arrives. Returns nullopt if `alarm`
  // can be read, the deadline passed, the link was lost, or another thread reads.
  std::optional<InFrame> receive(std::uint64_t kinds, int alarm, Nanoseconds deadline,
                                 Interrupt interrupt);
  // Let the endpoint read. Throws LinkFailure if that is closed.
  void start() EXCLUDES(state_, interest_);
  // Whether the endpoint's thread takes frames off this link from now on. Callers inside `exchange` and
  // `receive` do in any case. When the peer closes the connection, the endpoint reads up to its end.
  void set_reading(bool is_on) EXCLUDES(interest_);
  // Use one more stream for large buffers: the socket, which this takes over. `keys`: of its records, or
  // null. Throws LinkFailure: the link is lost, may have no more streams, or there is no crypto.
  void join(Descriptor socket, const Keys* keys = nullptr) EXCLUDES(interest_, state_);
  // How many streams there are, and how many buffers were sent in stripes.
  unsigned streams() const { return streams_ ? streams_->further_streams() + 1 : 1; }
  std::uint64_t striped_buffers() const { return streams_ ? streams_->striped_buffers() : 0; }
  // End the link for this cause: all that wait on it fail, and it is reported once, if it was started.
  void fail(const std::string& cause) EXCLUDES(state_, interest_);
  // In a forked child: close its copy of the socket, the parent's connection lives on.
  void close_after_fork();

  // For the endpoint: its thread, where that is required.

  int fd() const { return channel_->fd(); }
  int stream_fd(unsigned stream) const { return streams_->stream_fd(stream); }
  // The next frame that no caller waits for, if there is input and no other thread reads.
  std::optional<Event> take_event() REQUIRES(endpoint_thread);
  // The socket can be read: find out why, and wake the thread that has to act on it.
  void on_readable() REQUIRES(endpoint_thread);
  // The socket is closed for good in both directions: the same.
  void on_hang_up() REQUIRES(endpoint_thread);
  // epoll told of a further stream, what it was asked for, once.
  void on_stream(unsigned stream, std::uint32_t events) REQUIRES(endpoint_thread) EXCLUDES(interest_);
  bool has_residue() const { return has_residue_.load(std::memory_order_seq_cst); }
  void write_residue() REQUIRES(endpoint_thread);
  // Called before the endpoint's thread sleeps. Returns false if there is something to do.
  bool prepare_sleep() REQUIRES(endpoint_thread);
  bool may_have_input() const {
    return !reading_.load(std::memory_order_relaxed) && !paused_.load(std::memory_order_relaxed) &&
           channel_->may_have_input();
  }
  bool is_stream() const { return channel_->is_stream(); }
  bool trim() REQUIRES(endpoint_thread);

 private:
  struct Waiter;
  class Use;      // keeps the socket open
  class Reading;  // has the role of reading, or not

  bool enter() { return users_.enter(); }
  void leave();

  // The role of writing: these alone touch `writing_` and `residue_waits_`.
  bool try_to_write() TRY_ACQUIRE(true, channel_->writing) {
    if (!writing_.try_take()) return false;
    channel_->writing.begin();
    return true;
  }
  // Returns whether the role was free before the deadline.
  bool wait_to_write(Nanoseconds deadline, Interrupt interrupt) TRY_ACQUIRE(true, channel_->writing);
  void stop_writing() RELEASE(channel_->writing) {
    channel_->writing.end();
    writing_.give_back();
  }
  // The thread that takes the flag away has the role.
  bool take_residue() TRY_ACQUIRE(true, channel_->writing) {
    if (!residue_waits_.exchange(false)) return false;
    channel_->writing.begin();
    return true;
  }
  void offer_residue() RELEASE(channel_->writing);
  void end_residue() RELEASE(channel_->writing);

  void send_entered(const OutFrame& frame, Reading& reading, Nanoseconds deadline, Interrupt interrupt);
  bool write_at_once(const OutFrame& frame);
  void write(const OutFrame& frame, Composed& composed, Reading& reading, Nanoseconds deadline,
             Interrupt interrupt) RELEASE(channel_->writing);
  void leave_residue(Composed& composed) RELEASE(channel_->writing);
  LinkFailure broken(const LinkFailure& error);

  void arm_streams() EXCLUDES(interest_);
  void on_stream_end(unsigned stream);
  void note_buffer(std::size_t size) {
    if (asks_for_streams_.load(std::memory_order_relaxed)) ask_for_streams(size);
  }
  void ask_for_streams(std::size_t size) EXCLUDES(state_);

  // The role of reading: these alone touch `reading_`, but for those that only look who reads.
  bool take_role() TRY_ACQUIRE(true, channel_->reading) {
    if (reading_.exchange(true, std::memory_order_seq_cst)) return false;
    channel_->reading.begin();
    return true;
  }
  void give_role_back() RELEASE(channel_->reading) EXCLUDES(interest_);
  // Wakes no thread: for the endpoint's own, which looks at all links next.
  void drop_role() RELEASE(channel_->reading) REQUIRES(endpoint_thread) {
    channel_->reading.end();
    reading_.store(false, std::memory_order_seq_cst);
  }
  bool start_reading() TRY_ACQUIRE(true, channel_->reading);
  void stop_reading() RELEASE(channel_->reading);
  bool start_reading(Reading& reading) TRY_ACQUIRE(true, channel_->reading);
  void stop_reading(Reading& reading) RELEASE(channel_->reading);

  std::optional<InFrame> read_one() REQUIRES(channel_->reading);
  void read_socket() REQUIRES(channel_->reading);
  void pass_bell_on();
  bool deliver(InFrame& frame) EXCLUDES(state_);
  void route(InFrame frame) EXCLUDES(state_);
  void read_all();
  void wait_reading(Waiter& waiter, Nanoseconds deadline, Interrupt interrupt)
      REQUIRES(channel_->reading) EXCLUDES(state_);
  std::optional<InFrame> receive_reading(std::uint64_t kinds, int alarm, Nanoseconds deadline,
                                         Interrupt interrupt) REQUIRES(channel_->reading);
  static void wait_delivered(Waiter& waiter, Nanoseconds deadline, Interrupt interrupt);
  bool sleep_until_readable(int alarm, Nanoseconds deadline, Interrupt interrupt)
      REQUIRES(channel_->reading);
  bool waits_for_streams() const;
  void set_watched(bool watched) EXCLUDES(interest_);
  void update_interest() EXCLUDES(interest_);

  const std::shared_ptr<Endpoint> home_;
  const std::uint64_t id_;
  const std::unique_ptr<Channel> channel_;
  StreamChannel* const streams_;  // the same, or null
  std::atomic<bool> asks_for_streams_;  // when a buffer is large enough; once

  Rundown users_;  // of the socket, which is there while the link is not lost
  std::atomic<bool> lost_{false};
  std::atomic<bool> cut_{false};  // writing failed: lost once everything is read

  std::atomic<bool> reading_{false};
  std::atomic<bool> paused_{false};  // see `set_reading`
  FrameReader reader_ GUARDED_BY(channel_->reading);
  Spinner spinner_ GUARDED_BY(channel_->reading);

  Role writing_;
  Composed residue_ GUARDED_BY(channel_->writing);
  std::atomic<bool> has_residue_{false};
  // For the thread that takes `residue_`, and the role of writing with it.
  std::atomic<bool> residue_waits_{false};

  Mutex interest_;  // guards what epoll is asked to watch for, and `join`
  std::uint32_t asked_[kMaxStreams] GUARDED_BY(interest_) = {};  // of the further streams
  std::atomic<bool> watched_{true};  // by the endpoint

  Mutex state_;  // guards what follows, and the change of `lost_`
  std::vector<Waiter*> waiters_ GUARDED_BY(state_);
  std::string loss_cause_ GUARDED_BY(state_);
  bool started_ GUARDED_BY(state_) = false;
};

}  // namespace farcall
