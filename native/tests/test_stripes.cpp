// Buffers in chunks over several streams: cut and put together, wrong ones, and links over them.
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>

#include "descriptors.hpp"
#include "pairs.hpp"

namespace farcall::test_stripes {

namespace {

constexpr Striping kFew{4, 1000, 300, false};

// The bytes that were written on each stream.
using Streams = std::vector<Bytes>;

// Writes up to `most` bytes on a stream. Returns false if there is nothing to write.
bool write_on(StripesOut& out, Streams& streams, std::size_t stream, std::size_t most) {
  Part parts[2];
  if (!out.fill(stream, parts)) return false;
  std::size_t written = 0;
  for (const Part& part : parts) {
    const std::size_t count = std::min(part.size, most - written);
    streams[stream].insert(streams[stream].end(), part.data, part.data + count);
    written += count;
  }
  out.take(stream, written);
  return true;
}

// Reads from the streams, of each at most up to `ends`.
struct Reader {
  explicit Reader(const Streams& streams)
      : streams(streams), positions(streams.size()), ends(streams.size()) {
    states.resize(streams.size());
  }

  std::size_t read(std::size_t stream, std::uint8_t* data, std::size_t size) {
    CHECK(size > 0);
    const std::size_t count = std::min(size, ends[stream] - positions[stream]);
    if (count > 0) std::memcpy(data, streams[stream].data() + positions[stream], count);
    positions[stream] += count;
    return count;
  }
  StripesIn::State advance(std::size_t stream) {
    return in.advance(states[stream], stream == 0,
                      [&](std::uint8_t* data, std::size_t size) { return read(stream, data, size); });
  }
  bool finish() {
    return in.finish(states[0],
                     [&](std::uint8_t* data, std::size_t size) { return read(0, data, size); });
  }

  const Streams& streams;
  std::vector<std::size_t> positions, ends;
  std::vector<StripesIn::Stream> states;
  StripesIn in;
};

void test_what_is_cut_comes_together() {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const std::size_t count = 2 + random() % 4;
    const std::size_t chunk = 1 + random() % 200;
    Streams streams(count);
    std::vector<Bytes> all;
    std::vector<std::size_t> of_frames;
    for (std::size_t frame = 0, number = 1; frame < 3; ++frame) {
      StripesOut out;
      std::vector<Bytes> buffers;
      const std::size_t buffer_count = 1 + random() % 3;
      for (std::size_t i = 0; i < buffer_count; ++i) {
        buffers.push_back(pattern(1 + random() % 1000, random()));
      }
      for (const Bytes& buffer : buffers) out.add(part_of(buffer));
      all.insert(all.end(), buffers.begin(), buffers.end());
      of_frames.push_back(buffer_count);
      out.begin(number, chunk, count);
      number += buffer_count;
      Composed rest;  // copied in the middle, as what a deadline leaves is
      std::size_t steps = 0;
      bool copied = false;
      StripesOut* writing = &out;
      while (!writing->is_written()) {
        write_on(*writing, streams, random() % count, 1 + random() % 300);
        if (!copied && ++steps > random() % 20) {
          copied = true;
          rest.stripes = std::move(out);
          rest.own();
          for (Bytes& buffer : buffers) std::fill(buffer.begin(), buffer.end(), 0xee);
          writing = &rest.stripes;
        }
      }
      for (std::size_t stream = 0; stream < count; ++stream)
        CHECK(!write_on(*writing, streams, stream, 1));
    }
    Reader reader(streams);
    std::size_t number = 0;
    for (const std::size_t buffer_count : of_frames) {
      for (std::size_t i = 0; i < buffer_count; ++i, ++number) {
        Bytes buffer(all[number].size());
        reader.in.begin(buffer.data(), buffer.size(), chunk);
        while (!reader.in.is_complete()) {
          const std::size_t stream = random() % count;
          reader.ends[stream] = std::min(streams[stream].size(), reader.ends[stream] + random() % 300);
          reader.advance(stream);
        }
        CHECK(buffer == all[number]);
      }
      while (!reader.finish()) reader.ends[0] = std::min(streams[0].size(), reader.ends[0] + 1);
    }
    for (std::size_t stream = 0; stream < count; ++stream) {
      CHECK(reader.positions[stream] == streams[stream].size());
    }
  }
}

template <class Work>
std::string cause_of(Work work) {
  try {
    work();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "it did not fail";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Bytes chunk_bytes(std::uint64_t buffer, std::uint64_t offset, std::uint32_t length) {
  const ChunkBytes header = encode_chunk({length, buffer, offset});
  Bytes bytes(kChunkHeaderSize + length, 7);
  std::memcpy(bytes.data(), header.data(), kChunkHeaderSize);
  return bytes;
}

// Buffer 1 is complete and 2, of 1000 bytes in chunks of 300, is being read.
std::string cause_on(std::size_t stream, const std::vector<Bytes>& pieces) {
  Streams streams{chunk_bytes(1, 0, 10), {}};
  for (const Bytes& piece : pieces) {
    streams[stream].insert(streams[stream].end(), piece.begin(), piece.end());
  }
  Reader reader(streams);
  for (std::size_t i = 0; i < streams.size(); ++i) reader.ends[i] = streams[i].size();
  Bytes first(10), guarded(1200, 0xee);
  reader.in.begin(first.data(), 10, 300);
  reader.advance(0);
  CHECK(reader.in.is_complete());
  reader.in.begin(guarded.data() + 100, 1000, 300);
  const std::string cause = cause_of([&] { reader.advance(stream); });
  for (std::size_t i = 0; i < 100; ++i) CHECK(guarded[i] == 0xee && guarded[1100 + i] == 0xee);
  return cause;
}

void test_wrong_chunks() {
  for (const std::size_t stream : {0, 1}) {
    CHECK(has(cause_on(stream, {chunk_bytes(2, 0, 300), chunk_bytes(2, 900, 100)}), "did not fail"));
    CHECK(has(cause_on(stream, {chunk_bytes(3, 77, 5)}), "did not fail"));  // later
    CHECK(has(cause_on(stream, {chunk_bytes(1, 0, 10)}), "which is complete"));
    CHECK(has(cause_on(stream, {chunk_bytes(0, 0, 10)}), "which is complete"));
    CHECK(has(cause_on(stream, {chunk_bytes(3 + kMaxAhead, 0, 9)}), "number 2 is not complete"));
    CHECK(has(cause_on(stream, {chunk_bytes(~std::uint64_t{0}, 0, 9)}), "number 2 is not complete"));
    for (const std::uint64_t offset : {std::uint64_t{1}, std::uint64_t{299}, std::uint64_t{1000},
                                       std::uint64_t{1200}, ~std::uint64_t{0}, ~std::uint64_t{299}}) {
      CHECK(has(cause_on(stream, {chunk_bytes(2, offset, 300)}), "has 1000 bytes in chunks of 300"));
    }
    for (const std::uint32_t length : {1u, 299u, 301u}) {
      CHECK(has(cause_on(stream, {chunk_bytes(2, 300, length)}), "has 1000 bytes in chunks of 300"));
    }
    CHECK(has(cause_on(stream, {chunk_bytes(2, 900, 300)}), "has 1000 bytes in chunks of 300"));
    CHECK(has(cause_on(stream, {chunk_bytes(2, 300, 300), chunk_bytes(2, 300, 300)}), "twice"));
    CHECK(has(cause_on(stream, {Bytes(24, 1)}), "something else than a chunk"));
  }
  CHECK(has(cause_on(0, {chunk_bytes(2, 0, 0)}), "did not fail"));
  CHECK(has(cause_on(1, {chunk_bytes(2, 0, 0)}), "on a further stream"));
}

void test_wrong_ends() {
  for (const Bytes& end : {chunk_bytes(1, 0, 5), chunk_bytes(2, 0, 0), chunk_bytes(1, 1, 0)}) {
    Streams streams{end};
    Reader reader(streams);
    reader.ends[0] = end.size();
    reader.in.begin(nullptr, 0, 1);
    CHECK(has(cause_of([&] { reader.finish(); }), "where the chunks of a frame end"));
  }
}

void test_too_many_chunks() {
  CHECK(count_chunks(0, 1) == 0 && count_chunks(1, 5) == 1 && count_chunks(10, 5) == 2);
  CHECK(count_chunks(11, 5) == 3 && count_chunks(kMaxChunks, 1) == kMaxChunks);
  CHECK_THROWS(count_chunks(1, 0), BadFrame);
  CHECK_THROWS(count_chunks(kMaxChunks + 1, 1), BadFrame);
  CHECK_THROWS(count_chunks(5, std::uint64_t{1} << 32), BadFrame);
}

// How the streams of a pair go.
enum class Wire { kPlain, kAuthenticated, kEncrypted } wire = Wire::kPlain;

// Two endpoints with a link over several streams.
struct StripedPair {
  explicit StripedPair(unsigned further = kFew.streams - 1, Striping left_striping = kFew)
      : left_home(std::make_shared<Endpoint>(0)), right_home(std::make_shared<Endpoint>(0)) {
    auto [first, second] = socket_pair();
    const Ends ends(0);
    left = left_home->open_stream(std::move(first), kLimits, left_striping, ends.left());
    right = right_home->open_stream(std::move(second), kLimits, kFew, ends.right());
    left->start();
    right->start();
    for (unsigned i = 1; i <= further; ++i) {
      auto [one, other] = socket_pair();
      left_fds.push_back(one.get());
      join_left(std::move(one), i);
      join_right(std::move(other), i);
    }
  }
  // The keys of the stream of that number, if it has any.
  struct Ends {
    explicit Ends(unsigned number)
        : left_keys(test_keys(true, wire == Wire::kEncrypted, number)),
          right_keys(test_keys(false, wire == Wire::kEncrypted, number)) {}
    const Keys* left() const { return wire == Wire::kPlain ? nullptr : &left_keys; }
    const Keys* right() const { return wire == Wire::kPlain ? nullptr : &right_keys; }

    Keys left_keys, right_keys;
  };
  void join_left(Descriptor socket, unsigned number) const {
    left->join(std::move(socket), Ends(number).left());
  }
  void join_right(Descriptor socket, unsigned number) const {
    right->join(std::move(socket), Ends(number).right());
  }
  ~StripedPair() {
    left_home->close();
    right_home->close();
  }
  StripedPair(const StripedPair&) = delete;

  EndpointRef left_home, right_home;
  LinkRef left, right;
  std::vector<int> left_fds;  // of the further streams
};

void test_frames_stay_in_order() {
  StripedPair pair;
  std::vector<TestFrame> frames;
  for (std::uint64_t i = 1; i <= 60; ++i) {
    frames.push_back(i % 3 == 0 ? test_frame(kOneWay, i, 3, 10)
                                : test_frame(kOneWay, i, i, 0, {5000 + 999 * i, 7, 1000, 999, 0}));
  }
  std::thread sender([&] {
    for (const TestFrame& frame : frames) pair.left->send(frame.out(), patient(), no_interrupt);
  });
  for (const TestFrame& frame : frames) CHECK(frame == *next_event(*pair.right_home).frame);
  sender.join();
  CHECK(pair.left->streams() == 4 && pair.left->striped_buffers() == 80);
}

void test_calls_both_ways() {
  StripedPair pair;
  EchoServer left(pair.left_home), right(pair.right_home);
  std::vector<std::thread> callers;
  for (std::uint64_t caller = 1; caller <= 6; ++caller) {
    callers.emplace_back([&pair, caller] {
      Link& link = caller % 2 == 0 ? *pair.left : *pair.right;
      for (std::uint64_t i = 0; i < 30; ++i) {
        const TestFrame request = test_frame(kRequest, caller << 32 | i, 5, 20, {300'000, 1000});
        TestFrame reply = request;
        reply.kind = kReply;
        CHECK(reply == call(link, request));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(pair.left->striped_buffers() == 360 && pair.right->striped_buffers() == 360);
}

void test_deadline_leaves_the_rest_for_the_endpoint() {
  StripedPair pair;
  const TestFrame large = test_frame(kOneWay, 1, 3, 5, {8 << 20, 3 << 20, 10});
  CHECK_THROWS(pair.left->send(large.out(), 0, no_interrupt), TimedOut);
  CHECK_THROWS(pair.left->send(large.out(), 0, no_interrupt), NotSent);
  Server writes(pair.left_home, [](Event&) { CHECK(false); });
  CHECK(large == *next_event(*pair.right_home).frame);
  const TestFrame more = test_frame(kOneWay, 2, 3, 5, {5000});
  pair.left->send(more.out(), patient(), no_interrupt);
  CHECK(more == *next_event(*pair.right_home).frame);
}

// A caller reads a buffer, a part of which comes by a stream that is not there yet.
void test_stream_that_joins_late() {
  StripedPair pair(1);
  Server reads(pair.left_home, [](Event&) { CHECK(false); });
  auto [one, other] = socket_pair();
  pair.join_right(std::move(other), 2);
  const TestFrame reply = test_frame(kReply, 9, 0, 0, {5 << 20});
  std::thread caller([&] { CHECK(reply == call(*pair.left, test_frame(kRequest, 9, 1, 1))); });
  CHECK(next_event(*pair.right_home).frame);
  std::thread sender([&] { pair.right->send(reply.out(), patient(), no_interrupt); });
  // Until nothing moves but on the new one, which is never read: it is full.
  pollfd waited{one.get(), POLLIN, 0};
  CHECK(::poll(&waited, 1, -1) == 1);
  pair.join_left(std::move(one), 2);
  caller.join();
  sender.join();
}

void test_wish_for_streams() {
  Striping dialled = kFew;
  dialled.dialled = true;
  StripedPair pair(0, dialled);
  pair.left->send(test_frame(kOneWay, 1, 1, 1, {999}).out(), patient(), no_interrupt);
  CHECK(!pair.left_home->poll());
  CHECK(next_event(*pair.right_home).frame);
  pair.right->send(test_frame(kOneWay, 1, 1, 1, {1000}).out(), patient(), no_interrupt);
  Event event = next_event(*pair.left_home);
  if (event.frame) event = next_event(*pair.left_home);
  CHECK(event.wants_streams && event.link == pair.left);
  pair.left->send(test_frame(kOneWay, 1, 1, 1, {1000}).out(), patient(), no_interrupt);
  CHECK(next_event(*pair.right_home).frame);
  while (auto more = pair.left_home->next(0, no_interrupt)) CHECK(more->frame);  // asked once
}

void test_too_many_streams() {
  StripedPair pair;
  auto [one, other] = socket_pair();
  CHECK_THROWS(pair.left->join(std::move(one)), LinkFailure);
  CHECK(!pair.left->is_lost());
}

// Whatever the link does meanwhile, it ends at both sides, once, and says why.
void test_end_of_a_stream_ends_the_link(bool busy, unsigned stream) {
  const std::size_t before = count_descriptors();
  {
    StripedPair pair;
    const TestFrame large = test_frame(kOneWay, 1, 3, 5, {16 << 20});
    std::optional<std::thread> sender;
    if (busy) {
      sender.emplace(
          [&] { CHECK_THROWS(pair.left->send(large.out(), patient(), no_interrupt), LinkFailure); });
      // Something has arrived on a further stream, and much is to come.
      pollfd waited{pair.right->stream_fd(1), POLLIN, 0};
      CHECK(::poll(&waited, 1, -1) == 1);
    }
    CHECK(shutdown(pair.left_fds[stream - 1], SHUT_RDWR) == 0);
    for (const auto& [home, link] :
         {std::pair(pair.right_home, pair.right), {pair.left_home, pair.left}}) {
      const Event event = next_event(*home);
      CHECK(!event.frame && event.link == link && link->is_lost());
      CHECK(event.cause == kStreamClosed || event.cause == "the peer closed the connection" ||
            event.cause == "the connection broke: Connection reset by peer");
      CHECK(!home->next(0, no_interrupt));
    }
    if (sender) sender->join();
  }
  CHECK(count_descriptors() == before);
}

void test_caller_learns_of_the_end_of_a_stream() {
  StripedPair pair;
  Server serves(pair.left_home, [](Event&) {});
  std::thread caller(
      [&] { CHECK_THROWS(call(*pair.left, test_frame(kRequest, 1, 1, 1)), LinkFailure); });
  CHECK(next_event(*pair.right_home).frame);
  CHECK(shutdown(pair.right->stream_fd(2), SHUT_RDWR) == 0);
  caller.join();
}

// Frames that were sent whole before the peer went arrive, then the end.
void test_frames_before_the_end() {
  for (int round = 0; round < 20; ++round) {
    StripedPair pair;
    const TestFrame large = test_frame(kOneWay, 1, 3, 5, {100'000, 2000});
    const TestFrame goodbye = test_frame(kOneWay, 2, 3, 5);
    pair.left->send(large.out(), patient(), no_interrupt);
    pair.left->send(goodbye.out(), patient(), no_interrupt);
    pair.left_home->close();
    CHECK(large == *next_event(*pair.right_home).frame);
    CHECK(goodbye == *next_event(*pair.right_home).frame);
    CHECK(next_event(*pair.right_home).cause == "the peer closed the connection");
  }
}

// A peer that says what it likes.
struct RawPeer {
  RawPeer() : home(std::make_shared<Endpoint>(0)) {
    for (unsigned stream = 0; stream < 2; ++stream) {
      auto [one, other] = socket_pair();
      ours.push_back(std::move(other));
      if (stream == 0) {
        link = home->open_stream(std::move(one), kLimits, {2, 1000, 300, false});
        link->start();
      } else {
        link->join(std::move(one));
      }
    }
  }
  ~RawPeer() { home->close(); }
  void say(unsigned stream, const Bytes& bytes) {
    CHECK(send(ours[stream].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
  }
  // A frame with a buffer of 1000 bytes in chunks of that size.
  void begin(std::uint64_t chunk) {
    Header header;
    header.kind = kOneWay;
    header.flags = kStriped;
    header.buffer_count = 1;
    const HeaderBytes encoded = encode_header(header);
    Bytes bytes(encoded.begin(), encoded.end());
    bytes.resize(bytes.size() + 16);
    const std::uint64_t table[2] = {1000, chunk};
    std::memcpy(bytes.data() + kHeaderSize, table, sizeof table);
    say(0, bytes);
  }

  EndpointRef home;
  LinkRef link;
  std::vector<Descriptor> ours;
};

void test_hostile_peer_loses_the_link() {
  const auto cause = [](auto speak) {
    RawPeer peer;
    speak(peer);
    const Event event = next_event(*peer.home);
    CHECK(!event.frame);
    return event.cause;
  };
  CHECK(has(cause([](RawPeer& peer) { peer.begin(std::uint64_t{1} << 32); }), "chunks of 4294967296"));
  CHECK(has(cause([](RawPeer& peer) {
              peer.begin(300);
              peer.say(1, chunk_bytes(1, 5, 300));
            }),
            "has 1000 bytes in chunks of 300"));
  CHECK(has(cause([](RawPeer& peer) {
              peer.begin(300);
              peer.say(0, chunk_bytes(1, 0, 300));
              peer.say(1, chunk_bytes(1, 0, 300));
            }),
            "twice"));
  CHECK(has(cause([](RawPeer& peer) {
              peer.begin(300);
              peer.say(0, chunk_bytes(1, 0, 0));
              peer.say(1, chunk_bytes(2, 0, 300));
            }),
            "no stream brings the rest"));
  CHECK(has(cause([](RawPeer& peer) {
              peer.begin(1000);
              peer.say(1, chunk_bytes(1, 0, 1000));
              peer.say(0, test_frame(kOneWay, 1, 1, 1).encoded());
            }),
            "something else than a chunk"));
}

// Nothing is wanted from the first stream, on which more waits; no thread spins meanwhile.
void test_slow_stream_costs_nothing() {
  RawPeer peer;
  peer.begin(300);
  peer.say(0, chunk_bytes(1, 0, 300));
  peer.say(0, chunk_bytes(1, 0, 0));
  const TestFrame next = test_frame(kOneWay, 2, 1, 1);
  peer.say(0, next.encoded());
  for (const std::uint64_t offset : {300, 600, 900}) {
    int returns = 0;
    for (const Nanoseconds end = now() + 100 * kMillisecond; now() < end; ++returns) {
      CHECK(!peer.home->next(end, no_interrupt));
    }
    CHECK(returns < 100);
    peer.say(1, chunk_bytes(1, offset, offset == 900 ? 100 : 300));
  }
  CHECK(next_event(*peer.home).frame->buffers.size() == 1);
  CHECK(next == *next_event(*peer.home).frame);
}

// The end of a further stream overtakes what the first one has: that still counts.
void test_what_has_arrived_counts() {
  for (const bool is_read : {false, true}) {
    RawPeer peer;
    const TestFrame goodbye = test_frame(kOneWay, 2, 1, 1);
    peer.begin(300);
    peer.say(0, chunk_bytes(1, 0, 300));
    peer.say(0, chunk_bytes(1, 0, 0));
    peer.say(0, goodbye.encoded());
    if (is_read) CHECK(!peer.home->next(0, no_interrupt));  // nothing is wanted from the first
    for (const std::uint64_t offset : {300, 600, 900}) {
      peer.say(1, chunk_bytes(1, offset, offset == 900 ? 100 : 300));
    }
    peer.ours[1].reset();
    CHECK(next_event(*peer.home).frame->buffers.size() == 1);
    CHECK(goodbye == *next_event(*peer.home).frame);
    CHECK(next_event(*peer.home).cause == kStreamClosed);
  }
}

// The missing bytes do not come any more, and the first stream is still open, or not.
void test_end_in_the_middle_of_a_buffer() {
  for (const bool is_first_open : {false, true}) {
    RawPeer peer;
    peer.begin(300);
    peer.say(0, chunk_bytes(1, 0, 300));
    peer.say(0, chunk_bytes(1, 0, 0));
    peer.say(1, chunk_bytes(1, 300, 300));
    CHECK(!peer.home->next(0, no_interrupt));
    if (!is_first_open) peer.ours[0].reset();
    peer.ours[1].reset();
    const Event event = next_event(*peer.home);
    CHECK(!event.frame);
    CHECK(event.cause == (is_first_open ? kStreamClosed : "the peer closed the connection"));
  }
}

const TestFile kFile("test_stripes", [] {
  test_what_is_cut_comes_together();
  test_wrong_chunks();
  test_wrong_ends();
  test_too_many_chunks();
  for (const Wire each : {Wire::kPlain, Wire::kAuthenticated, Wire::kEncrypted}) {
    wire = each;
    test_frames_stay_in_order();
    test_calls_both_ways();
    test_deadline_leaves_the_rest_for_the_endpoint();
    test_stream_that_joins_late();
    test_wish_for_streams();
    test_too_many_streams();
    for (const bool busy : {false, true}) {
      for (const unsigned stream : {1u, 3u}) test_end_of_a_stream_ends_the_link(busy, stream);
    }
    test_caller_learns_of_the_end_of_a_stream();
    test_frames_before_the_end();
  }
  test_hostile_peer_loses_the_link();
  test_slow_stream_costs_nothing();
  test_what_has_arrived_counts();
  test_end_in_the_middle_of_a_buffer();
});

}  // namespace

}  // namespace farcall::test_stripes
