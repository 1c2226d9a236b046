// Records: what they look like, which ones are refused, and links over them.
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <random>
#include <string>

#include "descriptors.hpp"
#include "pairs.hpp"

namespace farcall::test_records {

namespace {

Bytes from_hex(const std::string& hex) {
  Bytes bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// Records of these payloads.
std::vector<Bytes> sealed(const std::vector<Bytes>& payloads, bool encrypts, const Key& key) {
  Sealer sealer(key, encrypts);
  std::vector<Bytes> records;
  for (const Bytes& payload : payloads) {
    Bytes record(kMaxRecord);
    const Part part = part_of(payload);
    CHECK(sealer.seal(&part, 1, 0, record.data()) == payload.size());
    record.resize(kLengthSize + payload.size() + kTagSize);
    records.push_back(record);
  }
  return records;
}

// As much as arrives at a time.
void give(RecordsIn& in, const Bytes& bytes) {
  std::size_t given = 0;
  while (given < bytes.size() && !in.is_ready()) {
    const RecordsIn::Room room = in.room();
    const std::size_t count = std::min(room.size, bytes.size() - given);
    CHECK(count > 0);
    std::memcpy(room.data, bytes.data() + given, count);
    in.received(count);
    given += count;
  }
}

// The bytes of records that arrive one after the other, `size` bytes taken at a time, up to the
// first that is wrong, which `is_wrong` tells of.
Bytes opened(const std::vector<Bytes>& records, bool encrypts, const Key& key, bool& is_wrong,
             std::size_t size = kMaxPayload) {
  RecordsIn in(key, encrypts);
  Bytes all, taken(size);
  is_wrong = false;
  for (const Bytes& record : records) {
    give(in, record);
    try {
      while (in.is_ready()) {
        const std::size_t count = in.take(taken.data(), size);
        CHECK(count > 0 && count <= size);
        all.insert(all.end(), taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(count));
      }
    } catch (const BadFrame&) {
      is_wrong = true;
      return all;
    }
  }
  return all;
}

// Made with Python's `cryptography`.
void test_vectors() {
  Key key;
  for (std::size_t i = 0; i < kKeySize; ++i) key[i] = static_cast<std::uint8_t>(i);
  const char text[] = "farcall record";
  const Part payload{reinterpret_cast<const std::uint8_t*>(text), sizeof text - 1};
  struct Vector {
    bool encrypts;
    std::string first, second, after_rekeying;
  };
  for (const Vector& vector :
       {Vector{true, "0e00000068ddc7bdd440ef9d7acdca5a6a48114e70e0d5bd2c6a5e4b8ea59113fb6c",
               "0e00000073b7cd9f25985c3e7c4b32569ec2490ce6149333bd12b6e6ee11da9673ed",
               "0e000000be8901f5d547017143df521668babe8c9baed66e63c86426e00bd454727f"},
        Vector{false, "0e00000066617263616c6c207265636f7264f8beea8db0e2b21cbd362fe6a59521bf",
               "0e00000066617263616c6c207265636f72643e9d640b726a788d1321b642e741f5e8",
               "0e00000066617263616c6c207265636f7264fc29339e37f2eeb91d10c13d0fa9aeb2"}}) {
    Sealer sealer(key, vector.encrypts);
    Opener opener(key, vector.encrypts);
    std::uint8_t record[kMaxRecord], out[kMaxPayload];
    const std::size_t size = kLengthSize + payload.size + kTagSize;
    for (std::uint64_t number = 0; number <= kRecordsPerKey; ++number) {
      CHECK(sealer.seal(&payload, 1, 0, record) == payload.size);
      opener.open(record, payload.size, out);
      CHECK(std::memcmp(out, payload.data, payload.size) == 0);
      if (number == 0) CHECK(Bytes(record, record + size) == from_hex(vector.first));
      if (number == 1) CHECK(Bytes(record, record + size) == from_hex(vector.second));
    }
    CHECK(Bytes(record, record + size) == from_hex(vector.after_rekeying));
  }
}

void test_a_changed_bit_is_found(bool encrypts) {
  const Key key = test_key(1);
  const std::vector<Bytes> records = sealed({pattern(9, 1), pattern(40, 2), pattern(5000, 3)}, encrypts,
                                            key);
  bool is_wrong;
  CHECK(opened(records, encrypts, key, is_wrong).size() == 9 + 40 + 5000 && !is_wrong);
  for (std::size_t bit = 0; bit < records[1].size() * 8; ++bit) {
    std::vector<Bytes> changed = records;
    changed[1][bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    const Bytes before = opened(changed, encrypts, key, is_wrong, bit % 3 == 0 ? 7 : kMaxPayload);
    CHECK(before == pattern(9, 1));
    // Or the length says that there is more to come.
    CHECK(is_wrong || bit < 32);
  }
}

void test_records_have_their_place(bool encrypts) {
  const Key key = test_key(1);
  const std::vector<Bytes> payloads{pattern(9, 1), pattern(9, 2), pattern(9, 3)};
  const std::vector<Bytes> good = sealed(payloads, encrypts, key);
  bool is_wrong;
  const auto check_wrong_after = [&](std::size_t first, const std::vector<Bytes>& records) {
    Bytes expected;
    for (std::size_t i = 0; i < first; ++i) {
      expected.insert(expected.end(), payloads[i].begin(), payloads[i].end());
    }
    CHECK(opened(records, encrypts, key, is_wrong) == expected && is_wrong);
  };
  check_wrong_after(0, {good[1], good[0], good[2]});           // in another order
  check_wrong_after(1, {good[0], good[2], good[1]});
  check_wrong_after(1, {good[0], good[0], good[1]});           // repeated
  check_wrong_after(2, {good[0], good[1], good[1]});
  check_wrong_after(0, {good[1]});                             // left out
  check_wrong_after(1, {good[0], good[2]});
  check_wrong_after(1, {good[0], sealed(payloads, encrypts, test_key(2))[1]});  // another direction's
  check_wrong_after(1, {good[0], sealed(payloads, !encrypts, key)[1]});  // of the other kind
  // Cut short: nothing is taken, with or without what follows.
  for (std::size_t size = 0; size < good[1].size(); ++size) {
    const Bytes cut(good[1].begin(), good[1].begin() + static_cast<std::ptrdiff_t>(size));
    CHECK(opened({good[0], cut}, encrypts, key, is_wrong) == payloads[0] && !is_wrong);
    // With a part of a length, the next bytes give a longer one.
    CHECK(opened({good[0], cut, good[2]}, encrypts, key, is_wrong) == payloads[0]);
    if (size == 0 || size >= kLengthSize) CHECK(is_wrong);
  }
}

void test_wrong_lengths() {
  for (const std::uint32_t length : {0u, 65'537u, 1u << 24, ~0u}) {
    RecordsIn in(test_key(1), true);
    Bytes bytes(kLengthSize);
    std::memcpy(bytes.data(), &length, kLengthSize);
    give(in, bytes);
    CHECK(in.is_ready());
    std::uint8_t byte;
    CHECK_THROWS(in.take(&byte, 1), BadFrame);
  }
}

// However the bytes are cut: by the writer, on the way, and by the reader.
void test_bytes_stay_the_same(bool encrypts) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    RecordsOut out(test_key(1), encrypts);
    RecordsIn in(test_key(1), encrypts);
    const bool is_small = round % 8 != 0;
    std::vector<Bytes> pieces;
    Bytes all, sent, taken;
    for (int i = 0; i < 20; ++i) {
      pieces.push_back(pattern(random() % 4 == 0 ? 0 : random() % (is_small ? 50 : 400'000), random()));
      all.insert(all.end(), pieces.back().begin(), pieces.back().end());
    }
    Composed composed;
    for (const Bytes& piece : pieces) composed.parts.push_back(part_of(piece));
    const auto arrive = [&] {
      for (std::size_t arrived = 0; arrived < sent.size();) {
        const RecordsIn::Room room = in.room();
        const std::size_t count = std::min<std::size_t>(
            {room.size, sent.size() - arrived, 1 + random() % 300'000});
        std::memcpy(room.data, sent.data() + arrived, count);
        in.received(count);
        arrived += count;
        while (in.is_ready()) {
          Bytes some(1 + random() % (is_small ? 60 : 200'000));
          some.resize(in.take(some.data(), some.size()));
          taken.insert(taken.end(), some.begin(), some.end());
        }
      }
      sent.clear();
    };
    while (!composed.parts.empty()) {
      const std::size_t count_of_parts = composed.parts.size();
      if (out.is_empty()) {
        out.seal(composed.parts.data(), is_small ? 1 + random() % count_of_parts : count_of_parts);
      }
      const Part rest = out.rest();
      const std::size_t count = random() % (rest.size + 1);
      sent.insert(sent.end(), rest.data, rest.data + count);
      composed.take(out.sent(count));
      if (random() % 4 == 0) arrive();
    }
    arrive();
    CHECK(taken == all);
  }
}

// Short records fill the buffer, and the last of them has its rest still to come.
void test_record_at_the_end_of_the_buffer(bool encrypts) {
  std::vector<Bytes> payloads;
  Bytes all, sent, taken;
  for (unsigned i = 0; i < 1000; ++i) {
    payloads.push_back(pattern(1 + 37 * i % 3000, i));
    all.insert(all.end(), payloads.back().begin(), payloads.back().end());
  }
  for (const Bytes& record : sealed(payloads, encrypts, test_key(1))) {
    sent.insert(sent.end(), record.begin(), record.end());
  }
  RecordsIn in(test_key(1), encrypts);
  for (std::size_t arrived = 0; arrived < sent.size();) {
    const RecordsIn::Room room = in.room();
    const std::size_t count = std::min(room.size, sent.size() - arrived);
    std::memcpy(room.data, sent.data() + arrived, count);
    in.received(count);
    arrived += count;
    while (in.is_ready()) {
      Bytes some(kMaxPayload);
      some.resize(in.take(some.data(), some.size()));
      taken.insert(taken.end(), some.begin(), some.end());
    }
  }
  CHECK(taken == all);
}

// No byte counts as written before the kernel has all records that were made at a time.
void test_bytes_count_when_their_records_are_sent() {
  RecordsOut out(test_key(1), true);
  const Bytes bytes = pattern(kMaxPayload + 10, 1);
  const Part parts[] = {{bytes.data(), 100}, {bytes.data() + 100, bytes.size() - 100}};
  const std::size_t size = bytes.size() + 2 * (kLengthSize + kTagSize);
  out.seal(parts, 2);
  CHECK(out.rest().size == size && !out.is_empty());
  CHECK(out.sent(kMaxRecord) == 0);
  CHECK(out.sent(size - kMaxRecord - 1) == 0 && out.rest().size == 1 && !out.is_empty());
  CHECK(out.sent(1) == bytes.size() && out.is_empty());
}

void test_keys_are_overwritten() {
  alignas(Keys) std::uint8_t memory[sizeof(Keys)];
  const Keys* keys = new (memory) Keys(test_key(1), test_key(2), true);
  keys->~Keys();
  CHECK(std::all_of(memory, memory + 2 * kKeySize, [](std::uint8_t byte) { return byte == 0; }));
}

// A link with keys, and a peer that says what it likes.
struct RawPeer {
  explicit RawPeer(bool encrypts) : keys(test_keys(true, encrypts)) {
    auto [ours, theirs] = socket_pair();
    socket = std::move(ours);
    const Keys mirrored = test_keys(false, encrypts);
    link = home->open_stream(std::move(theirs), kLimits, {}, &mirrored);
    link->start();
  }
  ~RawPeer() { home->close(); }
  void say(const Bytes& bytes) const {
    CHECK(send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
  }
  Bytes heard() const {
    Bytes bytes(1 << 20);
    const ssize_t count = recv(socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    CHECK(count > 0);
    bytes.resize(static_cast<std::size_t>(count));
    return bytes;
  }

  const Keys keys;
  Descriptor socket;
  EndpointRef home = std::make_shared<Endpoint>(0);
  LinkRef link;
};

bool contains(const Bytes& all, const Bytes& part) {
  return std::search(all.begin(), all.end(), part.begin(), part.end()) != all.end();
}

void test_what_goes_over_the_wire(bool encrypts) {
  RawPeer peer(encrypts);
  const TestFrame frame = test_frame(kOneWay, 1, 20, 30, {4000});
  peer.link->send(frame.out(), patient(), no_interrupt);
  const Bytes heard = peer.heard();
  CHECK(heard.size() == frame.encoded().size() + kLengthSize + kTagSize);
  for (const Bytes& part : {frame.meta, frame.body, frame.buffers[0]}) {
    CHECK(contains(heard, part) == !encrypts);
  }
  bool is_wrong;
  CHECK(opened({heard}, encrypts, peer.keys.receiving, is_wrong) == frame.encoded() && !is_wrong);
}

// A frame whose record was altered, and what comes after it, is never seen; callers hear why.
void test_altered_record_costs_the_link(bool encrypts) {
  const TestFrame first = test_frame(kOneWay, 1, 3, 5), reply = test_frame(kReply, 2, 3, 100);
  for (const std::size_t at : {0, 1, 2, 3, 4, 40, 150}) {
    RawPeer peer(encrypts);
    std::thread caller([&] {
      try {
        call(*peer.link, test_frame(kRequest, 2, 1, 1));
        CHECK(false);
      } catch (const LinkFailure&) {
      }
    });
    pollfd waited{peer.socket.get(), POLLIN, 0};
    CHECK(::poll(&waited, 1, -1) == 1);
    std::vector<Bytes> records = sealed(
        {first.encoded(), reply.encoded(), test_frame(kOneWay, 3, 0, 7000).encoded()}, encrypts,
        peer.keys.sending);
    records[1][at] ^= 1;
    Bytes all;
    for (const Bytes& record : records) all.insert(all.end(), record.begin(), record.end());
    peer.say(all);  // at once: the link may be lost before the last one is sent
    caller.join();
    CHECK(first == *next_event(*peer.home).frame);
    const Event end = next_event(*peer.home);
    CHECK(!end.frame && end.cause.find("record") != std::string::npos);
    CHECK(!peer.home->next(0, no_interrupt));
  }
}

// The end of a connection in the middle of a record, or of a frame, is an end.
void test_cut_connection() {
  const TestFrame frame = test_frame(kOneWay, 1, 3, 5);
  for (const std::size_t missing : {1, 16, 30}) {
    RawPeer peer(true);
    Bytes record = sealed({frame.encoded()}, true, peer.keys.sending)[0];
    record.resize(record.size() - missing);
    peer.say(record);
    CHECK(!peer.home->next(0, no_interrupt));
    peer.socket.reset();
    const Event end = next_event(*peer.home);
    CHECK(!end.frame && end.cause == kClosed);
  }
}

// A part of a record is no input: a thread that waits for the rest sleeps.
void test_waiting_for_the_rest_of_a_record() {
  RawPeer peer(true);
  const TestFrame frame = test_frame(kOneWay, 1, 3, 5);
  const Bytes record = sealed({frame.encoded()}, true, peer.keys.sending)[0];
  for (const std::uint8_t byte : record) {
    int returns = 0;
    for (const Nanoseconds end = now() + 5 * kMillisecond; now() < end; ++returns) {
      CHECK(!peer.home->next(end, no_interrupt));
    }
    CHECK(returns < 20);
    peer.say({byte});
  }
  CHECK(frame == *next_event(*peer.home).frame);
}

// Several frames in one record: none is left behind when nothing more arrives.
void test_record_with_several_frames() {
  RawPeer peer(true);
  Bytes bytes;
  for (std::uint64_t id = 1; id <= 5; ++id) {
    const Bytes encoded = test_frame(kOneWay, id, 3, 5, {70}).encoded();
    bytes.insert(bytes.end(), encoded.begin(), encoded.end());
  }
  peer.say(sealed({bytes}, true, peer.keys.sending)[0]);
  for (std::uint64_t id = 1; id <= 5; ++id) {
    CHECK(test_frame(kOneWay, id, 3, 5, {70}) == *next_event(*peer.home).frame);
  }
}

// A frame is begun when a record of it is sealed, though the kernel took nothing: its number is used.
void test_sealed_frame_is_sent_later() {
  Pair pair(Kind::kSealed);
  const TestFrame small = test_frame(kOneWay, 1, 3, 5), large = test_frame(kOneWay, 2, 3, 8 << 20);
  CHECK_THROWS(pair.left->send(large.out(), 0, no_interrupt), TimedOut);
  CHECK_THROWS(pair.left->send(small.out(), 0, no_interrupt), NotSent);
  Server writer(pair.left_home, [](Event&) {});
  CHECK(large == *next_event(*pair.right_home).frame);
  pair.left->send(small.out(), patient(), no_interrupt);
  CHECK(small == *next_event(*pair.right_home).frame);
}

const TestFile kFile("test_records", [] {
  if (!has_crypto()) std::_Exit(kSkipped);
  test_vectors();
  test_wrong_lengths();
  test_bytes_count_when_their_records_are_sent();
  test_keys_are_overwritten();
  for (const bool encrypts : {false, true}) {
    test_a_changed_bit_is_found(encrypts);
    test_records_have_their_place(encrypts);
    test_bytes_stay_the_same(encrypts);
    test_record_at_the_end_of_the_buffer(encrypts);
    test_what_goes_over_the_wire(encrypts);
    test_altered_record_costs_the_link(encrypts);
  }
  test_cut_connection();
  test_waiting_for_the_rest_of_a_record();
  test_record_with_several_frames();
  test_sealed_frame_is_sent_later();
});

}  // namespace

}  // namespace farcall::test_records
