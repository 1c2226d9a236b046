#include "stripes.hpp"

#include <cstring>
#include <string>

namespace farcall {

namespace {

constexpr char kStripeMagic[4] = {'f', 'c', 's', 't'};

std::string name_of(const ChunkHeader& header) {
  return "chunk of " + std::to_string(header.length) + " bytes at " + std::to_string(header.offset) +
         " of striped buffer " + std::to_string(header.buffer);
}

}  // namespace

ChunkBytes encode_chunk(const ChunkHeader& header) {
  ChunkBytes bytes;
  std::memcpy(bytes.data(), kStripeMagic, 4);
  std::memcpy(&bytes[4], &header.length, 4);
  std::memcpy(&bytes[8], &header.buffer, 8);
  std::memcpy(&bytes[16], &header.offset, 8);
  return bytes;
}

ChunkHeader decode_chunk(const ChunkBytes& bytes) {
  if (std::memcmp(bytes.data(), kStripeMagic, 4) != 0) {
    throw BadFrame("a striped buffer is not complete, and something else than a chunk of it arrived");
  }
  ChunkHeader header;
  std::memcpy(&header.length, &bytes[4], 4);
  std::memcpy(&header.buffer, &bytes[8], 8);
  std::memcpy(&header.offset, &bytes[16], 8);
  return header;
}

std::uint64_t count_chunks(std::uint64_t size, std::uint64_t chunk) {
  const std::uint64_t count = chunk == 0 ? size : size / chunk + (size % chunk != 0);
  if (chunk == 0 || chunk > UINT32_MAX || count > kMaxChunks) {
    throw BadFrame("frame claims a buffer of " + std::to_string(size) + " bytes in chunks of " +
                   std::to_string(chunk) + "; the limits are " + std::to_string(kMaxChunks) +
                   " chunks, of 1 byte to 4 GiB");
  }
  return count;
}

// Writing.

void StripesOut::begin(std::uint64_t first, std::size_t chunk, std::size_t streams) {
  first_ = first;
  chunk_ = chunk;
  streams_.resize(streams);
}

bool StripesOut::fill(std::size_t index, Part (&parts)[2]) {
  Stream& stream = streams_[index];
  if (!is_pending(index)) {
    while (next_ < rest_.size() && rest_[next_].size == 0) {
      ++next_;
      offset_ = 0;
    }
    ChunkHeader header;
    if (next_ < rest_.size()) {
      Part& rest = rest_[next_];
      stream.data = {rest.data, std::min(chunk_, rest.size)};
      header = {static_cast<std::uint32_t>(stream.data.size), first_ + next_, offset_};
      rest.data += stream.data.size;
      rest.size -= stream.data.size;
      offset_ += stream.data.size;
    } else if (index == 0 && !ended_) {
      ended_ = true;
      header.buffer = first_ + rest_.size() - 1;
    } else {
      return false;
    }
    stream.header = encode_chunk(header);
    stream.header_left = kChunkHeaderSize;
  }
  parts[0] = {stream.header.data() + kChunkHeaderSize - stream.header_left, stream.header_left};
  parts[1] = stream.data;
  return true;
}

void StripesOut::take(std::size_t index, std::size_t count) {
  Stream& stream = streams_[index];
  const std::size_t of_header = std::min(count, stream.header_left);
  stream.header_left -= of_header;
  stream.data.data += count - of_header;
  stream.data.size -= count - of_header;
}

bool StripesOut::is_written() const {
  if (rest_.empty()) return true;
  if (!ended_) return false;  // which comes after the last chunk was given to a stream
  for (std::size_t stream = 0; stream < streams_.size(); ++stream) {
    if (is_pending(stream)) return false;
  }
  return true;
}

std::size_t StripesOut::bytes_left() const {
  std::size_t left = 0;
  for (const Stream& stream : streams_) left += stream.data.size;
  for (const Part& rest : rest_) left += rest.size;
  return left;
}

// Reading.

void StripesIn::begin(std::uint8_t* data, std::uint64_t size, std::uint64_t chunk) {
  ++number_;
  data_ = data;
  size_ = size;
  chunk_ = chunk;
  left_ = count_chunks(size, chunk);
  begun_.assign(left_, false);
}

StripesIn::State StripesIn::check_end(bool is_first) {
  if (!is_first) throw BadFrame("the end of a frame's chunks arrived on a further stream");
  return State::kEnd;
}

// Returns false if the chunk is of a later buffer.
bool StripesIn::start_chunk(Stream& stream) {
  const ChunkHeader& header = *stream.header;
  if (header.buffer < number_) throw BadFrame(name_of(header) + ", which is complete");
  if (header.buffer - number_ > kMaxAhead) {
    throw BadFrame(name_of(header) + ", and number " + std::to_string(number_) + " is not complete");
  }
  if (header.buffer > number_) return false;
  if (header.offset >= size_ || header.offset % chunk_ != 0 ||
      header.length != std::min(chunk_, size_ - header.offset)) {
    throw BadFrame(name_of(header) + ", which has " + std::to_string(size_) + " bytes in chunks of " +
                   std::to_string(chunk_));
  }
  const std::uint64_t index = header.offset / chunk_;
  if (begun_[index]) throw BadFrame(name_of(header) + " arrived twice");
  begun_[index] = true;
  stream.to = data_ + header.offset;
  stream.left = header.length;
  stream.header.reset();
  return true;
}

void StripesIn::check_finished(const ChunkHeader& header) const {
  if (header.length != 0 || header.buffer != number_ || header.offset != 0) {
    throw BadFrame(name_of(header) + " where the chunks of a frame end, with those of buffer " +
                   std::to_string(number_));
  }
}

}  // namespace farcall
