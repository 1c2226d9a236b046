#include "segments.hpp"

#include <algorithm>

#include "errors.hpp"
#include "forks.hpp"

namespace farcall {

namespace {

constexpr std::uint32_t kFree = 0, kUsed = 1, kGiven = 2;

}  // namespace

// The sender.

bool SegmentWriter::is_free(std::uint32_t slot) const {
  return states_[slot].load(std::memory_order_acquire) == kFree;
}

SegmentWriter::Place SegmentWriter::take(std::size_t size) {
  MutexLock lock(mutex_);
  std::size_t best = segments_.size();
  for (std::uint32_t slot = 0; slot < segments_.size(); ++slot) {
    const auto& memory = segments_[slot].memory;
    // Not one that is far too large: a later buffer may need it.
    if (!memory || memory->size() < size || memory->size() / 4 > size || !is_free(slot)) continue;
    if (best == segments_.size() || memory->size() < segments_[best].memory->size()) best = slot;
  }
  if (best == segments_.size()) return make(size);
  const auto slot = static_cast<std::uint32_t>(best);
  segments_[slot].used_at = ++uses_;
  segments_[slot].rested = false;
  states_[slot].store(kUsed, std::memory_order_relaxed);
  return {segments_[slot].memory, {slot, segments_[slot].serial}};
}

SegmentWriter::Place SegmentWriter::make(std::size_t size) {
  const std::size_t whole = pooled_size(size);
  if (!make_room(whole) || !keep_to_budget(whole)) return {};
  std::uint32_t slot = 0;
  while (slot < segments_.size() && (segments_[slot].memory || !is_free(slot))) ++slot;
  if (slot == kSegmentSlots) return {};
  auto [memory, descriptor] = SharedMemory::create(whole, {whole, budget_});
  const SegmentName name{slot, made_ + 1};
  if (!memory || !announce_(name, whole, descriptor.get())) return {};
  ++made_;
  if (slot == segments_.size()) segments_.emplace_back();
  segments_[slot] = {memory, name.serial, ++uses_, false};
  mapped_ += whole;
  states_[slot].store(kUsed, std::memory_order_relaxed);
  return {std::move(memory), name};
}

// Drops free segments, then gives away those that the receiver has had for the longest time.
bool SegmentWriter::make_room(std::size_t size) {
  if (size > kMaxMapped) return false;
  std::size_t mapped_slots = 0;
  for (const Segment& segment : segments_) mapped_slots += segment.memory != nullptr;
  while (mapped_ + size > kMaxMapped || mapped_slots > kSegmentSlots / 2) {
    bool is_free = false;
    const std::size_t victim = oldest(is_free);
    if (victim == segments_.size()) return false;
    drop(static_cast<std::uint32_t>(victim));
    --mapped_slots;
  }
  return true;
}

// Drops free segments for as long as the budget has not enough. Those that the receiver keeps are not
// given away: that would free no memory.
bool SegmentWriter::keep_to_budget(std::size_t size) {
  while (!budget_->has(size)) {
    bool is_free = false;
    const std::size_t victim = oldest(is_free);
    if (!is_free) return false;
    drop(static_cast<std::uint32_t>(victim));
  }
  return true;
}

// The segment that was not used for the longest time, of those that are free if there are any; how
// many there are if there is none.
std::size_t SegmentWriter::oldest(bool& is_free) const {
  std::size_t found = segments_.size();
  is_free = false;
  for (std::uint32_t slot = 0; slot < segments_.size(); ++slot) {
    if (!segments_[slot].memory) continue;
    const bool free = this->is_free(slot);
    if (found == segments_.size() || free > is_free ||
        (free == is_free && segments_[slot].used_at < segments_[found].used_at)) {
      found = slot;
      is_free = free;
    }
  }
  return found;
}

void SegmentWriter::drop(std::uint32_t slot) {
  std::uint32_t used = kUsed;
  if (!states_[slot].compare_exchange_strong(used, kGiven)) {
    announce_({slot, segments_[slot].serial}, 0,
              -1);  // if it can't be told, the receiver keeps it mapped until the end
  }
  mapped_ -= segments_[slot].memory->size();
  segments_[slot].memory.reset();
}

void SegmentWriter::put_back(std::uint32_t slot) {
  // No other process has looked at it: it was not sent.
  states_[slot].store(kFree, std::memory_order_relaxed);
}

bool SegmentWriter::trim() {
  MutexLock lock(mutex_);
  bool any = false;
  for (std::uint32_t slot = 0; slot < segments_.size(); ++slot) {
    Segment& segment = segments_[slot];
    if (!segment.memory) continue;
    if (segment.rested) {
      drop(slot);
    } else {
      segment.rested = true;
      any = true;
    }
  }
  return any;
}

// The receiver.

class SegmentReader::Piece final : public Block {
 public:
  Piece(std::shared_ptr<SharedMemory> home, std::shared_ptr<Mapping> mapping,
        std::atomic<std::uint32_t>& state, std::size_t size)
      : Block(mapping->memory->data(), size),
        home_(std::move(home)),
        mapping_(std::move(mapping)),
        state_(state),
        generation_(fork_generation()) {}

  ~Piece() override {
    if (generation_ != fork_generation()) return;  // the parent's
    // Only who has it handed out touches the mapping, so first what needs that.
    bool given = state_.load(std::memory_order_acquire) == kGiven;
    if (given) mapping_->memory.reset();
    mapping_->handed_out.store(false, std::memory_order_release);
    const bool given_now = state_.exchange(kFree, std::memory_order_acq_rel) == kGiven;
    if (given_now && !given && !mapping_->handed_out.exchange(true, std::memory_order_acquire)) {
      mapping_->memory.reset();
      mapping_->handed_out.store(false, std::memory_order_release);
    }
  }

 private:
  std::shared_ptr<SharedMemory> home_;  // the state lies in it
  std::shared_ptr<Mapping> mapping_;
  std::atomic<std::uint32_t>& state_;
  std::uint32_t generation_;
};

void SegmentReader::learn(SegmentName name, std::size_t size, const Descriptor& descriptor) {
  if (name.slot >= kSegmentSlots) throw BadFrame("the peer made a segment in no slot");
  if (name.slot >= mappings_.size()) mappings_.resize(name.slot + 1);
  mappings_[name.slot].reset();
  if (size == 0) return;
  auto memory = SharedMemory::map(descriptor, size);
  if (!memory) {
    throw BadFrame("a shared segment of " + std::to_string(size) + " bytes can't be mapped");
  }
  mappings_[name.slot] = std::make_shared<Mapping>(name.serial, std::move(memory));
}

bool SegmentReader::knows(SegmentName name) const {
  return name.slot < mappings_.size() && mappings_[name.slot] != nullptr &&
         mappings_[name.slot]->serial == name.serial;
}

BlockRef SegmentReader::open(SegmentName name, std::size_t size) {
  if (!knows(name)) throw BadFrame("the peer names a shared segment that it never made");
  const auto& mapping = mappings_[name.slot];
  if (mapping->handed_out.exchange(true, std::memory_order_acquire)) {
    throw BadFrame("the peer uses a shared segment twice");
  }
  if (!mapping->memory || size > mapping->memory->size()) {
    mapping->handed_out.store(false, std::memory_order_release);
    throw BadFrame("a buffer does not fit into its shared segment");
  }
  return std::make_shared<Piece>(home_, mapping, states_[name.slot], size);
}

}  // namespace farcall
