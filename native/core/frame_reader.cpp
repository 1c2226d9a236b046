#include "frame_reader.hpp"

#include <utility>

#include "errors.hpp"

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
        header_ = decode_header(header_bytes_, limits_, source.has_segments());
        frame_ = InFrame{};
        frame_.kind = header_.kind;
        frame_.call_id = header_.call_id;
        frame_.front = pool_.allocate(header_.front_length());
        stage_ = Stage::kFront;
        break;
      case Stage::kFront:
        if (!fill(source, frame_.front->data(), frame_.front->size())) return std::nullopt;
        open_front(source);
        if (!next_buffer()) {
          stage_ = Stage::kHeader;
          return std::exchange(frame_, InFrame{});
        }
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
        if (!next_buffer()) {
          stage_ = Stage::kHeader;
          return std::exchange(frame_, InFrame{});
        }
        break;
    }
  }
}

void FrameReader::open_front(Source& source) {
  frame_.meta_offset = header_.table_length();
  frame_.meta_size = header_.meta_length;
  frame_.body_offset = frame_.meta_offset + frame_.meta_size;
  frame_.body_size = header_.body_length;
  index_ = 0;
  offset_ = kHeaderSize + header_.front_length();
  if (header_.buffer_count == 0) return;
  table_ = decode_table(header_, frame_.front->data(), limits_);
  frame_.buffers.reserve(table_.lengths.size());
  for (std::size_t i = 0; i < table_.lengths.size(); ++i) {
    const bool in_segment = !table_.places.empty() && table_.places[i] != 0;
    frame_.buffers.push_back(in_segment ? source.segment(table_.places[i], table_.lengths[i])
                                        : pool_.allocate(table_.lengths[i]));
  }
}

// Goes on to the next buffer that is in the frame itself. False: there is none.
bool FrameReader::next_buffer() {
  while (index_ < frame_.buffers.size()) {
    if (table_.places.empty() || table_.places[index_] == 0) {
      stage_ = Stage::kPadding;
      return true;
    }
    ++index_;
  }
  return false;
}

}  // namespace farcall
