#include "records.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "errors.hpp"

namespace farcall {

namespace {

constexpr std::uint64_t kRekeyNumber = std::numeric_limits<std::uint64_t>::max();

constexpr std::size_t kLong = kMaxPayload / 4;  // moving less costs less than another system call

bool is_possible(std::uint32_t payload) { return payload > 0 && payload <= kMaxPayload; }

}  // namespace

// REKEY of the Noise Protocol Framework: the first bytes of zeros encrypted under the key. To decrypt
// zeros is the same in counter mode, so either direction has the context for it.
void RecordKey::replace() {
  const Key zeros{};
  gcm.begin(kRekeyNumber);
  gcm.convert(zeros.data(), kKeySize, key_.data());
  gcm.set_key(key_);
}

// Each part is encrypted to where it belongs, so nothing is gathered first.
std::size_t Sealer::seal(const Part* parts, std::size_t count, std::size_t offset,
                         std::uint8_t* record) {
  std::size_t size = 0;
  for (std::size_t i = 0; i < count && size < kMaxPayload; ++i) {
    size += std::min(parts[i].size - (i == 0 ? offset : 0), kMaxPayload - size);
  }
  if (size == 0) return 0;
  const auto length = static_cast<std::uint32_t>(size);
  std::memcpy(record, &length, kLengthSize);
  key_.begin();
  if (encrypts_) key_.gcm.authenticate(record, kLengthSize);
  std::uint8_t* to = record + kLengthSize;
  std::uint8_t* const end = to + size;
  for (; to < end; ++parts, offset = 0) {
    const std::size_t taken = std::min<std::size_t>(parts->size - offset, end - to);
    if (taken == 0) continue;
    if (encrypts_) {
      key_.gcm.convert(parts->data + offset, taken, to);
    } else {
      std::memcpy(to, parts->data + offset, taken);
    }
    to += taken;
  }
  if (!encrypts_) key_.gcm.authenticate(record, kLengthSize + size);
  key_.gcm.finish(end);
  key_.end();
  return size;
}

void Opener::open(const std::uint8_t* record, std::size_t size, std::uint8_t* to) {
  const std::uint8_t* payload = record + kLengthSize;
  key_.begin();
  if (encrypts_) {
    key_.gcm.authenticate(record, kLengthSize);
    key_.gcm.convert(payload, size, to);
  } else {
    key_.gcm.authenticate(record, kLengthSize + size);
  }
  if (!key_.gcm.finish_and_check(payload + size)) {
    throw BadFrame("a record is not authentic: it was changed on its way, or is out of order");
  }
  if (!encrypts_) std::memcpy(to, payload, size);
  key_.end();
}

// Going out.

void RecordsOut::seal(const Part* parts, std::size_t count) {
  payload_ = size_ = 0;
  std::size_t offset = 0;  // in the first part
  for (std::size_t i = 0; i < kBatch && count > 0; ++i) {
    std::size_t size = sealer_.seal(parts, count, offset, records_.get() + size_);
    if (size == 0) break;
    payload_ += size;
    size_ += kLengthSize + size + kTagSize;
    for (; count > 0 && size >= parts->size - offset; ++parts, --count) {
      size -= parts->size - offset;
      offset = 0;
    }
    offset += size;
  }
  left_ = size_;
}

std::size_t RecordsOut::sent(std::size_t count) {
  left_ -= count;
  return left_ == 0 ? payload_ : 0;
}

// Coming in.

std::uint32_t RecordsIn::payload() const {
  std::uint32_t payload;
  std::memcpy(&payload, buffer_.get() + start_, kLengthSize);
  return payload;
}

// Or wrong, which `take` says.
bool RecordsIn::is_whole() const {
  if (!has_length()) return false;
  const std::uint32_t size = payload();
  return !is_possible(size) || end_ - start_ >= kLengthSize + size + kTagSize;
}

// Of a long record its rest, and as many more of that length as there is space for: so a reader of
// long records, which mostly have one length, seldom has to move a part of one.
RecordsIn::Room RecordsIn::room() {
  const bool is_long = has_length() && payload() >= kLong;
  const std::size_t size = is_long ? kLengthSize + payload() + kTagSize : kMaxRecord;
  if (start_ == end_ || kBuffer - start_ < size) {
    if (start_ < end_) std::memmove(buffer_.get(), buffer_.get() + start_, end_ - start_);
    end_ -= start_;
    start_ = 0;
  }
  const std::size_t until = is_long ? start_ + (kBuffer - start_) / size * size : kBuffer;
  return {buffer_.get() + end_, until - end_};
}

std::size_t RecordsIn::take(std::uint8_t* data, std::size_t size) {
  if (opened_start_ == opened_end_) {
    const std::uint32_t length = payload();
    if (!is_possible(length)) {
      throw BadFrame("a record claims " + std::to_string(length) + " bytes; it may have 1 to " +
                     std::to_string(kMaxPayload));
    }
    const bool fits = length <= size;
    if (!fits && !opened_) opened_.reset(new std::uint8_t[kMaxPayload]);
    opener_.open(buffer_.get() + start_, length, fits ? data : opened_.get());
    start_ += kLengthSize + length + kTagSize;
    if (fits) return length;
    opened_start_ = 0;
    opened_end_ = length;
  }
  const std::size_t count = std::min(size, opened_end_ - opened_start_);
  std::memcpy(data, opened_.get() + opened_start_, count);
  opened_start_ += count;
  return count;
}

}  // namespace farcall
