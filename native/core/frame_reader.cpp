#include "frame_reader.hpp"

#include <utility>

#include "errors.hpp"
#include "stripes.hpp"

namespace farcall {

bool FrameReader::fill(Source& source, std::uint8_t* data, std::size_t size) {
  while (filled_ < size) {
    const std::size_t count = source.read(data + filled_, size - filled_);
    if (count == 0) return false;
    filled_ += count;
  }
  filled_ = 0;
  return true;
}

std::optional<InFrame> FrameReader::read(Source& source) {
  std::uint8_t discarded[kAlignment];
  while (true) {
    switch (stage_) {
      case Stage::kHeader:
        if (!fill(source, header_bytes_.data(), kHeaderSize)) return std::nullopt;
        header_ = decode_header(header_bytes_, limits_,
                                static_cast<std::uint8_t>((source.has_segments() ? kInSegments : 0) |
                                                          (source.has_stripes() ? kStriped : 0)));
        frame_ = InFrame{};
        frame_.kind = header_.kind;
        frame_.call_id = header_.call_id;
        frame_.front = pool_.allocate(header_.front_length());
        stage_ = Stage::kFront;
        break;
      case Stage::kFront:
        if (!fill(source, frame_.front->data(), frame_.front->size())) return std::nullopt;
        open_front();
        if (!next_buffer(source)) return finished();
        break;
      case Stage::kPadding:
        if (!fill(source, discarded, padding(offset_))) return std::nullopt;
        offset_ += padding(offset_);
        stage_ = Stage::kBuffer;
        break;
      case Stage::kBuffer:
        if (!fill(source, frame_.buffers[index_]->data(), frame_.buffers[index_]->size())) {
          return std::nullopt;
        }
        offset_ += frame_.buffers[index_]->size();
        ++index_;
        if (!next_buffer(source)) return finished();
        break;
      case Stage::kStriped:
        if (!source.read_striped()) return std::nullopt;
        ++index_;
        if (!next_striped(source)) stage_ = Stage::kEnd;
        break;
      case Stage::kEnd:
        if (!source.end_striped()) return std::nullopt;
        return finished();
    }
  }
}

void FrameReader::open_front() {
  frame_.meta_offset = header_.table_length();
  frame_.meta_size = header_.meta_length;
  frame_.body_offset = frame_.meta_offset + frame_.meta_size;
  frame_.body_size = header_.body_length;
  index_ = 0;
  offset_ = kHeaderSize + header_.front_length();
  if (header_.buffer_count == 0) {
    table_ = Table{};
    return;
  }
  table_ = decode_table(header_, frame_.front->data(), limits_);
  frame_.buffers.reserve(table_.lengths.size());
}

InFrame FrameReader::finished() {
  stage_ = Stage::kHeader;
  return std::exchange(frame_, InFrame{});
}

// Goes on to the next buffer that is in the frame itself, then to those in stripes. Returns
// false if there is none. Memory is taken when the bytes before have arrived, else a peer could make
// us take a lot by claiming a lot.
bool FrameReader::next_buffer(Source& source) {
  for (; index_ < table_.lengths.size(); ++index_) {
    const std::uint64_t place = table_.places.empty() ? 0 : table_.places[index_];
    if (place == 0) {
      frame_.buffers.push_back(pool_.allocate(table_.lengths[index_]));
      stage_ = Stage::kPadding;
      return true;
    }
    frame_.buffers.push_back(header_.flags & kStriped ? nullptr
                                                      : source.segment(place, table_.lengths[index_]));
  }
  index_ = 0;
  return (header_.flags & kStriped) != 0 && next_striped(source);
}

bool FrameReader::next_striped(Source& source) {
  for (; index_ < table_.lengths.size(); ++index_) {
    if (frame_.buffers[index_] != nullptr) continue;
    const std::uint64_t size = table_.lengths[index_], chunk = table_.places[index_];
    count_chunks(size, chunk);  // may throw
    frame_.buffers[index_] = pool_.allocate_for_pieces(size, chunk);
    source.begin_striped(frame_.buffers[index_]->data(), size, chunk);
    stage_ = Stage::kStriped;
    return true;
  }
  return false;
}

}  // namespace farcall
