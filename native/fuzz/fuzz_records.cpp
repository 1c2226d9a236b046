// A connection whose peer has the keys of another side of it, or none: its bytes are cut, changed,
// dropped, repeated and moved on the way. The reader gets a beginning of them, and no other byte.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/errors.hpp"
#include "core/records.hpp"

using namespace farcall;

namespace {

using Bytes = std::vector<std::uint8_t>;

void require(bool condition) {
  if (!condition) std::abort();
}

// The fuzzer's bytes, one at a time; zeros at the end.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}

  bool are_left() const { return data_ < end_; }
  std::uint8_t byte() { return are_left() ? *data_++ : 0; }
  // Mostly small, at times about as large as a record may be.
  std::size_t size() {
    const std::uint8_t chosen = byte();
    return chosen < 0xf0 ? chosen : kMaxPayload - 8 + chosen % 16;
  }

 private:
  const std::uint8_t* data_;
  const std::uint8_t* const end_;
};

class Wire {
 public:
  explicit Wire(bool encrypts) : out_(kKey, encrypts), in_(kKey, encrypts) {}

  // The peer sends bytes, all different, in up to three parts.
  void send(Choices& choices) {
    Bytes bytes(1 + choices.size());
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(sent_.size() + ++count_ * 7);
    const std::size_t first = choices.byte() % bytes.size();
    const std::size_t second = choices.byte() % (bytes.size() - first);
    const Part parts[] = {{bytes.data(), first},
                          {bytes.data() + first, second},
                          {bytes.data() + first + second, bytes.size() - first - second}};
    out_.seal(parts, 3);
    const Part rest = out_.rest();
    const std::size_t before = way_.size();
    way_.insert(way_.end(), rest.data, rest.data + rest.size);
    require(out_.sent(rest.size) == bytes.size() && way_.size() - before == rest.size);
    sent_.insert(sent_.end(), bytes.begin(), bytes.end());
  }

  void alter(Choices& choices) {
    if (way_.empty()) return;
    const std::size_t at = choices.size() % way_.size();
    const std::size_t size = std::min<std::size_t>(choices.byte(), way_.size() - at);
    const auto from = way_.begin() + static_cast<std::ptrdiff_t>(at);
    const auto to = from + static_cast<std::ptrdiff_t>(size);
    switch (choices.byte() % 4) {
      case 0:
        *from = choices.byte();
        break;
      case 1:
        way_.erase(from, to);
        break;
      case 2: {
        const Bytes copy(from, to);
        const std::size_t where = choices.size() % (way_.size() + 1);
        way_.insert(way_.begin() + static_cast<std::ptrdiff_t>(where), copy.begin(), copy.end());
        break;
      }
      case 3:
        std::reverse(from, to);
        break;
    }
  }

  // Throws BadFrame.
  void arrive(Choices& choices) {
    const std::size_t size = std::min(choices.size(), way_.size());
    for (std::size_t arrived = 0; arrived < size;) {
      const RecordsIn::Room room = in_.room();
      require(room.size > 0);
      const std::size_t count = std::min(room.size, size - arrived);
      std::memcpy(room.data, way_.data() + arrived, count);
      in_.received(count);
      arrived += count;
      while (in_.is_ready()) take(1 + choices.size());
    }
    way_.erase(way_.begin(), way_.begin() + static_cast<std::ptrdiff_t>(size));
  }

 private:
  void take(std::size_t size) {
    Bytes taken(size);  // a piece of the heap of its own
    const std::size_t count = in_.take(taken.data(), size);
    require(count > 0 && count <= size && taken_ + count <= sent_.size());
    require(std::memcmp(taken.data(), sent_.data() + taken_, count) == 0);
    taken_ += count;
  }

  static constexpr Key kKey{1, 2, 3};

  RecordsOut out_;
  RecordsIn in_;
  Bytes sent_;
  Bytes way_;  // bytes on their way
  std::size_t taken_ = 0;
  std::uint8_t count_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* input, std::size_t size) {
  Choices choices(input, size);
  Wire wire(choices.byte() % 2 == 0);
  try {
    for (unsigned steps = 0; choices.are_left() && steps < 200; ++steps) {
      switch (choices.byte() % 4) {
        case 0:
        case 1:
          wire.send(choices);
          break;
        case 2:
          wire.alter(choices);
          break;
        case 3:
          wire.arrive(choices);
          break;
      }
    }
  } catch (const BadFrame&) {
  }
  return 0;
}
