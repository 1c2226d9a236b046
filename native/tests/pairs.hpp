// Two endpoints in one process, with links between them, and threads that take their events.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "core/endpoint.hpp"
#include "core/ring_channel.hpp"
#include "frames.hpp"
#include "keys.hpp"

namespace farcall {

enum class Kind { kStream, kSealed, kRings };  // a sealed one is a stream with keys
constexpr Kind kKinds[] = {Kind::kStream, Kind::kSealed, Kind::kRings};

inline std::pair<Descriptor, Descriptor> socket_pair() {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

// A deadline that only a test that hangs reaches. One of 0 has always passed: what can be sent
// without waiting is sent, and no more.
inline Nanoseconds patient() { return now() + 60 * kSecond; }

using EndpointRef = std::shared_ptr<Endpoint>;
using LinkRef = std::shared_ptr<Link>;

inline LinkRef link_over(const EndpointRef& endpoint, std::unique_ptr<Channel> channel) {
  static std::atomic<std::uint64_t> links{0};
  return std::make_shared<Link>(endpoint, ++links, std::move(channel), kLimits);
}

// Of two links that are connected with each other.
struct Linked {
  LinkRef left, right;
  // Of rings. Mapped once for both, so that ThreadSanitizer knows that it is the same memory.
  std::shared_ptr<SharedMemory> memory;

  LinkMemory& shared() const { return *reinterpret_cast<LinkMemory*>(memory->data()); }
  // Until a reader of rings wants to hear the bell. Side 0 is the left one. The reader has still to
  // look at the ring once more before it sleeps: `Server::await_rest` waits for that, too.
  void await_sleep(int side) const {
    while (shared().controls[1 - side].reader_sleeps.load() == 0) std::this_thread::yield();
  }
  // Until a writer of rings waits for space, for itself or with the rest of a frame.
  void await_full(int side, std::uint32_t waits = kWriterSleeps) const {
    while (shared().controls[side].writer_waits.load() != waits) std::this_thread::yield();
  }
};

inline Linked linked(Kind kind, const EndpointRef& left, const EndpointRef& right,
                     const RingBounds& bounds = {}) {
  auto [first, second] = socket_pair();
  if (kind != Kind::kRings) {
    const auto stream = [kind](Descriptor socket, bool is_left) {
      const Keys keys = test_keys(is_left);
      return std::make_unique<StreamChannel>(std::move(socket), Striping{},
                                             kind == Kind::kSealed ? &keys : nullptr);
    };
    return {link_over(left, stream(std::move(first), true)),
            link_over(right, stream(std::move(second), false)), nullptr};
  }
  auto memory = SharedMemory::create(sizeof(LinkMemory)).first;
  CHECK(memory);
  return {link_over(left,
                    std::make_unique<RingChannel>(std::move(first), memory, 0, left->memory(), bounds)),
          link_over(right, std::make_unique<RingChannel>(std::move(second), memory, 1, right->memory(),
                                                         bounds)),
          memory};
}

// Two endpoints with a started link; both are closed at the end.
struct Pair : Linked {
  explicit Pair(Kind kind, int spin_threads = 0, const RingBounds& bounds = {})
      : left_home(std::make_shared<Endpoint>(spin_threads)),
        right_home(std::make_shared<Endpoint>(spin_threads)) {
    static_cast<Linked&>(*this) = linked(kind, left_home, right_home, bounds);
    left->start();
    right->start();
  }
  ~Pair() {
    left_home->close();
    right_home->close();
  }
  Pair(const Pair&) = delete;

  EndpointRef left_home, right_home;
};

// A thread that takes an endpoint's events until this ends.
class Server {
 public:
  Server(EndpointRef endpoint, std::function<void(Event&)> handle)
      : endpoint_(std::move(endpoint)), thread_([this, moved = std::move(handle)] { run(moved); }) {}
  ~Server() {
    stop_ = true;
    endpoint_->wake();
    thread_.join();
  }
  Server(const Server&) = delete;

  // Until the thread is blocked in the kernel.
  void await_rest() const {
    while (thread_id_ == 0) std::this_thread::yield();
    const std::string path = "/proc/self/task/" + std::to_string(thread_id_) + "/stat";
    while (true) {
      std::string status;
      std::getline(std::ifstream(path), status);
      const std::size_t name_end = status.rfind(')');  // what follows it is " S" or another state
      CHECK(name_end != std::string::npos && name_end + 2 < status.size());
      if (status[name_end + 2] == 'S') return;
      std::this_thread::yield();
    }
  }

 private:
  void run(const std::function<void(Event&)>& handle) {
    thread_id_ = gettid();
    while (!stop_) {
      if (std::optional<Event> event = endpoint_->next(kNever, no_interrupt)) handle(*event);
    }
  }

  const EndpointRef endpoint_;
  std::atomic<bool> stop_{false};
  std::atomic<pid_t> thread_id_{0};
  std::thread thread_;
};

// Sends what arrived back, as the outcome.
inline void echo(const Event& event, Nanoseconds deadline) {
  const InFrame& frame = *event.frame;
  OutFrame out;
  out.kind = kReply;
  out.call_id = frame.call_id;
  out.meta = {frame.front->data() + frame.meta_offset, frame.meta_size};
  out.body = {frame.front->data() + frame.body_offset, frame.body_size};
  for (const BlockRef& buffer : frame.buffers) out.buffers.push_back({buffer->data(), buffer->size()});
  event.link->send(out, deadline, no_interrupt);
}

// Echoes requests, each in a thread of its own, so that the endpoint is always read.
class EchoServer {
 public:
  explicit EchoServer(const EndpointRef& endpoint)
      : server_(std::in_place, endpoint, [this](Event& event) {
          if (!event.frame || event.frame->kind != kRequest) return;
          std::lock_guard lock(mutex_);
          threads_.emplace_back([moved = std::move(event)] {
            try {
              echo(moved, patient());
            } catch (const LinkFailure&) {
            }
          });
        }) {}
  ~EchoServer() {
    server_.reset();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  std::mutex mutex_;
  std::vector<std::thread> threads_;
  std::optional<Server> server_;
};

inline InFrame call(Link& link, const TestFrame& frame, Nanoseconds deadline = patient()) {
  return link.exchange(frame.out(), deadline, no_interrupt, {});
}

// The next frame or, without a frame, the end of a link.
inline Event next_event(Endpoint& endpoint) {
  while (true) {
    if (auto event = endpoint.next(patient(), no_interrupt)) return std::move(*event);
  }
}

}  // namespace farcall
