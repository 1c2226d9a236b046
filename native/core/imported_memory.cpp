#include "imported_memory.hpp"

#include <algorithm>
#include <optional>
#include <string>

#include "errors.hpp"

namespace farcall {

namespace {

class ImportedBlock final : public Block {
 public:
  ImportedBlock(std::shared_ptr<SharedMemory> memory, std::size_t offset, std::size_t size)
      : Block(memory->data() + offset, size), memory_(std::move(memory)) {}

 private:
  std::shared_ptr<SharedMemory> memory_;
};

struct stat status_of(const Descriptor& descriptor) {
  if (!descriptor) {
    throw BadFrame("a shared tensor came without its descriptor: too many files are open here");
  }
  const std::optional<struct stat> status = status_in_memory(descriptor);
  if (!status) throw BadFrame("the peer sent a file that is not shared memory");
  return *status;
}

}  // namespace

void ImportedMemory::learn(std::uint64_t number, std::uint64_t offset, const Descriptor& descriptor) {
  if (number <= last_) throw BadFrame("the peer counts zero-copy tensors backwards");
  const struct stat status = status_of(descriptor);
  const bool has_holes = static_cast<std::uint64_t>(status.st_blocks) * 512 <
                         static_cast<std::uint64_t>(status.st_size);
  const auto whole = static_cast<std::size_t>(status.st_size);
  announced_.push_back({number, offset, whole, map(descriptor, status), has_holes});
  last_ = number;
  if (announced_.size() > kMaxImported)
    announced_.pop_front();  // no frame that names it can come any more
}

std::shared_ptr<SharedMemory> ImportedMemory::map(const Descriptor& descriptor,
                                                  const struct stat& status) {
  const auto size = static_cast<std::size_t>(status.st_size);
  MutexLock lock(mutex_);
  mapped_.remove_if([](const Mapped& one) { return one.used.expired(); });
  const auto known = std::find_if(mapped_.begin(), mapped_.end(), [&](const Mapped& one) {
    return one.device == status.st_dev && one.file == status.st_ino;
  });
  std::shared_ptr<SharedMemory> memory;
  if (known != mapped_.end()) {
    memory = known->used.lock();
    mapped_.erase(known);
  }
  if (!memory || memory->size() < size) memory = SharedMemory::map_imported(descriptor, size);
  if (!memory) {
    throw BadFrame("a shared tensor's memory of " + std::to_string(size) + " bytes can't be mapped");
  }
  mapped_.push_front({status.st_dev, status.st_ino, memory, memory, false});
  keep_few();
  return memory;
}

void ImportedMemory::keep_few() {
  std::size_t count = 0, bytes = 0;
  for (Mapped& one : mapped_) {
    if (!one.kept) continue;
    bytes += one.kept->size();
    if (++count > kKept || (count > 1 && bytes > kKeptBytes)) one.kept.reset();
  }
}

bool ImportedMemory::trim() {
  MutexLock lock(mutex_);
  bool any = false;
  for (Mapped& one : mapped_) {
    if (one.rested) one.kept.reset();
    one.rested = true;
    any = any || one.kept != nullptr;
  }
  mapped_.remove_if([](const Mapped& one) { return one.used.expired(); });
  return any;
}

bool ImportedMemory::knows(std::uint64_t number) const { return number <= last_; }

BlockRef ImportedMemory::open(std::uint64_t number, std::size_t size) {
  while (!announced_.empty() && announced_.front().number < number) announced_.pop_front();
  if (announced_.empty() || announced_.front().number != number) {
    throw BadFrame("the peer names a zero-copy tensor that it never sent");
  }
  const Announced announced = std::move(announced_.front());
  announced_.pop_front();
  if (announced.offset > announced.whole || size > announced.whole - announced.offset) {
    throw BadFrame("a zero-copy tensor of " + std::to_string(size) + " bytes at " +
                   std::to_string(announced.offset) + " is not within its shared memory of " +
                   std::to_string(announced.whole) + " bytes");
  }
  if (announced.has_holes && !announced.memory->touch(announced.offset, size)) {
    throw BadFrame("the system has no memory for a zero-copy tensor of " + std::to_string(size) +
                   " bytes, or its file has become smaller");
  }
  return std::make_shared<ImportedBlock>(announced.memory, announced.offset, size);
}

}  // namespace farcall
