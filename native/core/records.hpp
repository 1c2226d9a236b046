// AEAD records: what carries the bytes of a connection that has keys.
//
// A record is the length of its payload (4 bytes, little-endian, 1 to `kMaxPayload`), the payload,
// and a tag. The payload is encrypted with AES-256-GCM, the length is associated data; or, where
// records are authenticated only, both are associated data of an empty message. The records of a
// direction are numbered from 0, which is their nonce: so a record that was changed, dropped,
// repeated or moved is not authentic. The key is replaced by Noise's REKEY after every
// `kRecordsPerKey` records. Borders of records mean nothing. `sockets/records.py` has the same in
// Python. Here is no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "crypto.hpp"
#include "wire.hpp"

namespace farcall {

constexpr std::size_t kMaxPayload = 64 << 10;
constexpr std::size_t kLengthSize = 4;
constexpr std::size_t kMaxRecord = kLengthSize + kMaxPayload + kTagSize;
constexpr std::uint64_t kRecordsPerKey = 1 << 20;
// Records that are sealed, or received, at a time: each send wakes the peer, so one alone is too few;
// many don't stay in the cache.
constexpr std::size_t kBatch = 6;

// Of one connection. Overwritten at the end.
struct Keys {
  Keys(const Key& sending, const Key& receiving, bool encrypts)
      : sending(sending), receiving(receiving), encrypts(encrypts) {}
  Keys(const Keys&) = delete;
  ~Keys() {
    wipe(sending.data(), sending.size());
    wipe(receiving.data(), receiving.size());
  }

  Key sending;
  Key receiving;
  bool encrypts;  // else records are authenticated only
};

// The key of one direction, and the number of its next record.
class RecordKey {
 public:
  RecordKey(Gcm::Direction direction, const Key& key) : gcm(direction, key), key_(key) {}
  ~RecordKey() { wipe(key_.data(), key_.size()); }

  void begin() { gcm.begin(number_); }
  void end() {
    if (++number_ % kRecordsPerKey == 0) replace();
  }

  Gcm gcm;

 private:
  void replace();

  Key key_;
  std::uint64_t number_ = 0;
};

// Used by one thread at a time, as are all that follow.
class Sealer {
 public:
  Sealer(const Key& key, bool encrypts) : key_(Gcm::Direction::kEncrypt, key), encrypts_(encrypts) {}

  // Makes one record of the bytes of `parts` from `offset` in the first one, as many as it takes.
  // Returns the size of its payload; 0: there are none, and there is no record.
  std::size_t seal(const Part* parts, std::size_t count, std::size_t offset, std::uint8_t* record);

 private:
  RecordKey key_;
  const bool encrypts_;
};

class Opener {
 public:
  Opener(const Key& key, bool encrypts) : key_(Gcm::Direction::kDecrypt, key), encrypts_(encrypts) {}

  // Opens the next record, whose payload has that size. Throws BadFrame: it is not authentic, and
  // the contents of `to` are worth nothing.
  void open(const std::uint8_t* record, std::size_t size, std::uint8_t* to);

 private:
  RecordKey key_;
  const bool encrypts_;
};

// The bytes that go out on a connection: a few records, until all of them are sent. Only then do the
// bytes in them count as taken, so the writer offers them again until then.
class RecordsOut {
 public:
  RecordsOut(const Key& key, bool encrypts) : sealer_(key, encrypts) {}

  bool is_empty() const { return left_ == 0; }
  // If it is empty. Stays empty if the parts are.
  void seal(const Part* parts, std::size_t count);
  // The bytes to be sent next.
  Part rest() const { return {records_.get() + size_ - left_, left_}; }
  // So many bytes of it were sent. Returns how many bytes of payload count as taken.
  std::size_t sent(std::size_t count);

 private:
  Sealer sealer_;
  const std::unique_ptr<std::uint8_t[]> records_{new std::uint8_t[kBatch * kMaxRecord]};
  std::size_t payload_ = 0;
  std::size_t size_ = 0;
  std::size_t left_ = 0;
};

// The input of a connection: records, the last one in part, and opened bytes that are not taken yet.
class RecordsIn {
 public:
  struct Room {
    std::uint8_t* data;
    std::size_t size;
  };

  RecordsIn(const Key& key, bool encrypts) : opener_(key, encrypts) {}

  // Whether `take` has something to say.
  bool is_ready() const { return opened_start_ < opened_end_ || is_whole(); }
  // Where what arrives next goes, if it is not ready. There is space for the rest of a record.
  Room room();
  void received(std::size_t count) { end_ += count; }
  // If it is ready: returns how many of the next `size` bytes it has put there, at least one.
  // Throws BadFrame: a record is wrong.
  std::size_t take(std::uint8_t* data, std::size_t size);

 private:
  static constexpr std::size_t kBuffer = kBatch * kMaxRecord;

  bool has_length() const { return end_ - start_ >= kLengthSize; }
  std::uint32_t payload() const;
  bool is_whole() const;

  Opener opener_;
  const std::unique_ptr<std::uint8_t[]> buffer_{new std::uint8_t[kBuffer]};
  std::size_t start_ = 0;
  std::size_t end_ = 0;
  std::unique_ptr<std::uint8_t[]> opened_;  // made when a record does not fit where it is wanted
  std::size_t opened_start_ = 0;
  std::size_t opened_end_ = 0;
};

// Of one connection, both directions.
struct Records {
  explicit Records(const Keys& keys)
      : in(keys.receiving, keys.encrypts), out(keys.sending, keys.encrypts) {}

  RecordsIn in;
  RecordsOut out;
};

}  // namespace farcall
