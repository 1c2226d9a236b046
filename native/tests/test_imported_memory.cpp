// Memory of a program that its peer maps, too: what each side sees, refuses, and leaves behind.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "core/imported_memory.hpp"
#include "descriptors.hpp"
#include "pairs.hpp"

namespace farcall::test_imported_memory {

namespace {

constexpr std::size_t kSize = kSmallestZeroCopy;
constexpr std::uint64_t kMost = ~std::uint64_t{0};

RingBounds zero_copy() {
  RingBounds bounds;
  bounds.zero_copy = true;
  return bounds;
}

Descriptor file_of(std::size_t size) {
  Descriptor file(memfd_create("test", MFD_CLOEXEC));
  CHECK(file && ftruncate(file.get(), static_cast<off_t>(size)) == 0);
  return file;
}

// Shared memory of a program, as torch has it.
struct File {
  explicit File(std::size_t size)
      : descriptor(file_of(size)), memory(SharedMemory::map_imported(descriptor, size)) {
    CHECK(memory);
    const Bytes bytes = pattern(size, size);
    std::memcpy(memory->data(), bytes.data(), size);
  }
  OutBuffer buffer(std::size_t offset, std::size_t size) const {
    return {Part{memory->data() + offset, size}, descriptor.get(), offset};
  }
  std::uint8_t* data() const { return memory->data(); }

  Descriptor descriptor;
  std::shared_ptr<SharedMemory> memory;
};

OutFrame frame_of(std::vector<OutBuffer> buffers) {
  OutFrame frame;
  frame.kind = kOneWay;
  frame.buffers = std::move(buffers);
  return frame;
}

std::vector<BlockRef> pass(Pair& pair, const std::vector<OutBuffer>& buffers) {
  pair.left->send(frame_of(buffers), patient(), no_interrupt);
  return next_event(*pair.right_home).frame->buffers;
}

void test_both_see_what_either_writes() {
  Pair pair(Kind::kRings, 0, zero_copy());
  const File file(3 * kSize);
  const std::size_t offset = kSize + 12;  // not at a page
  const auto blocks = pass(pair, {file.buffer(offset, kSize)});
  CHECK(blocks[0]->size() == kSize && blocks[0]->data() != file.data() + offset);
  CHECK(std::memcmp(blocks[0]->data(), file.data() + offset, kSize) == 0);
  file.data()[offset] = 1;
  CHECK(blocks[0]->data()[0] == 1);
  blocks[0]->data()[kSize - 1] = 2;
  CHECK(file.data()[offset + kSize - 1] == 2);
}

void test_one_file_is_mapped_once() {
  Pair pair(Kind::kRings, 0, zero_copy());
  const File file(3 * kSize);
  const std::size_t before = SharedMemory::count();
  const auto blocks = pass(pair, {file.buffer(0, kSize), file.buffer(2 * kSize, kSize)});
  CHECK(blocks[1]->data() == blocks[0]->data() + 2 * kSize);
  CHECK(pass(pair, {file.buffer(0, 3 * kSize)})[0]->data() == blocks[0]->data());
  CHECK(SharedMemory::count() == before + 1);
}

void test_other_buffers_are_copied() {
  const File file(2 * kSize);
  const auto is_copied = [&](Pair& pair, std::size_t size) {
    const auto blocks = pass(pair, {file.buffer(0, size)});
    file.data()[0] ^= 1;
    return blocks[0]->data()[0] != file.data()[0];
  };
  Pair stream(Kind::kStream), rings(Kind::kRings), shares(Kind::kRings, 0, zero_copy());
  CHECK(is_copied(stream, kSize));
  CHECK(is_copied(rings, kSize));
  CHECK(is_copied(shares, kSize - 1));
  CHECK(is_copied(shares, kSmallestSegment - 1));
  CHECK(!is_copied(shares, kSize));
}

// Among buffers of every other kind, more of them than go at a time.
void test_frame_of_many() {
  Pair pair(Kind::kRings, 0, zero_copy());
  const File file(2 * kSize);
  const Bytes small = pattern(100, 1), large = pattern(kSmallestSegment, 2);
  std::vector<OutBuffer> buffers;
  for (std::size_t i = 0; i < kMaxImported + 10; ++i) {
    buffers.push_back(file.buffer(i, kSize));
    if (i % 100 == 0) buffers.push_back(part_of(small));
    if (i % 100 == 50) buffers.push_back(part_of(large));
  }
  std::thread sender([&] { pair.left->send(frame_of(buffers), patient(), no_interrupt); });
  const Event event = next_event(*pair.right_home);
  sender.join();
  const auto& blocks = event.frame->buffers;
  CHECK(blocks.size() == buffers.size());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    CHECK(blocks[i]->size() == buffers[i].size);
    CHECK(std::memcmp(blocks[i]->data(), buffers[i].data, buffers[i].size) == 0);
  }
  file.data()[5] ^= 1;
  CHECK(blocks.front()->data()[5] == file.data()[5]);
}

// A peer that does not read is told of so many, and no more.
void test_peer_that_does_not_read() {
  Pair pair(Kind::kRings, 0, zero_copy());
  const File file(2 * kSize);
  std::size_t sent = 0;
  const auto send = [&] {
    for (;; ++sent) pair.left->send(frame_of({file.buffer(sent, kSize)}), 0, no_interrupt);
  };
  CHECK_THROWS(send(), NotSent);
  CHECK(sent > 10 && sent <= kMaxImported);
  const TestFrame other = test_frame(kOneWay, 7, 3, 3, {kSmallestSegment});
  pair.left->send(other.out(), 0, no_interrupt);
  std::thread waiting(
      [&] { pair.left->send(frame_of({file.buffer(sent, kSize)}), patient(), no_interrupt); });
  const auto check = [&](std::size_t offset) {
    const Event event = next_event(*pair.right_home);
    CHECK(std::memcmp(event.frame->buffers[0]->data(), file.data() + offset, kSize) == 0);
  };
  for (std::size_t i = 0; i < sent; ++i) check(i);
  CHECK(other == *next_event(*pair.right_home).frame);
  check(sent);
  waiting.join();
}

// The peer is told of what lies in a frame before that is sent; then it may not be sent.
void test_frames_that_are_not_sent() {
  Pair pair(Kind::kRings, 0, zero_copy());
  const File file(2 * kSize);
  std::size_t sent = 0;
  try {
    const TestFrame filler = test_frame(kOneWay, 1, 10, 10);
    for (;; ++sent) pair.left->send(filler.out(), 0, no_interrupt);
  } catch (const NotSent&) {
  } catch (const TimedOut&) {
    ++sent;
  }
  for (int i = 0; i < 50; ++i) {
    CHECK_THROWS(pair.left->send(frame_of({file.buffer(1, kSize)}), 0, no_interrupt), NotSent);
  }
  Server writer(pair.left_home, [](Event&) {});  // of what may be left of the last one
  for (std::size_t i = 0; i < sent; ++i) next_event(*pair.right_home);
  const auto blocks = pass(pair, {file.buffer(2, kSize), file.buffer(3, kSize)});
  CHECK(std::memcmp(blocks[0]->data(), file.data() + 2, kSize) == 0);
  CHECK(std::memcmp(blocks[1]->data(), file.data() + 3, kSize) == 0);
}

void test_nothing_is_left() {
  const std::size_t descriptors = count_descriptors(), mapped = SharedMemory::count();
  {
    std::vector<BlockRef> kept;
    const File file(2 * kSize);
    {
      Pair pair(Kind::kRings, 0, zero_copy());
      for (int i = 0; i < 10; ++i) kept = pass(pair, {file.buffer(0, kSize), file.buffer(5, kSize)});
      pair.left->send(frame_of({file.buffer(0, kSize)}), patient(), no_interrupt);  // it is never read
      CHECK(count_descriptors() == descriptors + 9);  // of the pair eight, and of the file
    }
    CHECK(kept[1]->data()[0] == file.data()[5]);
  }
  CHECK(count_descriptors() == descriptors);
  CHECK(SharedMemory::count() == mapped);
}

// Imported memory is kept mapped for a while, for it may come again, but not much of it.
void test_few_are_kept() {
  ImportedMemory reader;
  const std::size_t before = SharedMemory::count();
  std::vector<Descriptor> files;
  for (std::uint64_t i = 0; i < 20; ++i) files.push_back(file_of(kSize));
  std::uint64_t number = 0;
  const auto take = [&](const Descriptor& file) {
    reader.learn(++number, 0, file);
    return reader.open(number, kSize);
  };
  BlockRef used = take(files[0]);
  const std::uint8_t* place = used->data();
  for (const Descriptor& file : files) take(file);
  for (std::size_t i = 1; i < files.size(); ++i) take(files[i]);
  CHECK(SharedMemory::count() == before + 9);  // and the one that is used
  CHECK(take(files[0])->data() == place);
  CHECK(reader.trim());
  take(files[19]);
  CHECK(reader.trim());
  CHECK(SharedMemory::count() == before + 2);
  CHECK(!reader.trim());
  CHECK(SharedMemory::count() == before + 1);
  CHECK(take(files[0])->data() == place);
  used.reset();
  CHECK(reader.trim() && !reader.trim());
  CHECK(SharedMemory::count() == before);
}

// The mapping is kept, and what it had beyond the end of the file is gone: to read it is SIGBUS.
void test_file_that_became_smaller_is_refused() {
  ImportedMemory reader;
  const Descriptor file = file_of(2 * kSize);
  reader.learn(1, kSize, file);
  BlockRef whole = reader.open(1, kSize);
  CHECK(ftruncate(file.get(), static_cast<off_t>(kSize)) == 0);
  reader.learn(2, kSize, file);
  CHECK_THROWS(reader.open(2, kSize), BadFrame);
  reader.learn(3, 0, file);
  CHECK(reader.open(3, kSize)->data() + kSize == whole->data());
}

void test_lies() {
  ImportedMemory reader;
  const Descriptor file = file_of(kSize);
  const auto refused = [&](const Descriptor& descriptor) {
    CHECK_THROWS(reader.learn(1, 0, descriptor), BadFrame);
  };
  refused(Descriptor());
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  refused(Descriptor(ends[0]));
  refused(Descriptor(ends[1]));
  refused(Descriptor(open("/dev/null", O_RDWR | O_CLOEXEC)));
  refused(Descriptor(open("/dev/shm", O_RDONLY | O_CLOEXEC | O_DIRECTORY)));
  refused(Descriptor(open("/proc/self/status", O_RDONLY | O_CLOEXEC)));
  refused(file_of(0));
  refused(file_of(std::size_t{1} << 60));
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  refused(Descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC)));  // both sides may write
  CHECK_THROWS(reader.open(1, kSize), BadFrame);
  reader.learn(1, 0, file);
  CHECK_THROWS(reader.learn(1, 0, file), BadFrame);
  CHECK_THROWS(reader.learn(0, 0, file), BadFrame);
  CHECK(reader.open(1, kSize));
  CHECK_THROWS(reader.open(1, kSize), BadFrame);  // twice
  std::uint64_t number = 1;
  const auto misfit = [&](std::uint64_t offset, std::size_t size) {
    reader.learn(++number, offset, file);
    CHECK_THROWS(reader.open(number, size), BadFrame);
  };
  misfit(0, kSize + 1);
  misfit(1, kSize);
  misfit(kSize, 1);
  misfit(kMost, 2);
  misfit(1, kMost);
  misfit(kMost, kMost);
  reader.learn(++number, kSize - 1, file);
  CHECK(reader.open(number, 1));
  for (std::size_t i = 0; i < 2 * kMaxImported; ++i) reader.learn(++number, 0, file);
  CHECK_THROWS(reader.open(number - kMaxImported, 1), BadFrame);
  reader.learn(++number, 0, file);
  CHECK(reader.open(number, 1));
  CHECK_THROWS(reader.open(number + 1, 1), BadFrame);
}

// The file changes its size after it was mapped.
void test_files_that_change() {
  ImportedMemory reader;
  const Descriptor file = file_of(kSize);
  reader.learn(1, 0, file);
  const BlockRef before = reader.open(1, kSize);
  CHECK(ftruncate(file.get(), 3 * kSize) == 0);
  reader.learn(2, 2 * kSize, file);
  const BlockRef after = reader.open(2, kSize);
  before->data()[0] = 1;
  after->data()[0] = 2;
  reader.learn(3, 0, file);
  const BlockRef whole = reader.open(3, 3 * kSize);
  CHECK(whole->data()[0] == 1 && whole->data()[2 * kSize] == 2);
  // One with holes that has become smaller is found out when its pages are taken.
  const Descriptor sparse = file_of(kSize);
  reader.learn(4, 0, sparse);
  CHECK(ftruncate(sparse.get(), 4096) == 0);
  CHECK_THROWS(reader.open(4, kSize), BadFrame);
}

// A descriptor of memory that a worker has not asked for ends the link, with an error that says so.
void test_peer_that_shares_unasked() {
  auto left_home = std::make_shared<Endpoint>(0), right_home = std::make_shared<Endpoint>(0);
  auto [first, second] = socket_pair();
  auto memory = SharedMemory::create(sizeof(LinkMemory)).first;
  const LinkRef left = link_over(
      left_home,
      std::make_unique<RingChannel>(std::move(first), memory, 0, left_home->memory(), zero_copy()));
  const LinkRef right = link_over(
      right_home, std::make_unique<RingChannel>(std::move(second), memory, 1, right_home->memory()));
  left->start();
  right->start();
  const File file(kSize);
  left->send(frame_of({file.buffer(0, kSize)}), patient(), no_interrupt);
  const Event event = next_event(*right_home);
  CHECK(!event.frame &&
        event.cause == "the peer sent a shared tensor, which this worker does not take");
  left_home->close();
  right_home->close();
}

const TestFile kFile("test_imported_memory", [] {
  test_both_see_what_either_writes();
  test_one_file_is_mapped_once();
  test_other_buffers_are_copied();
  test_frame_of_many();
  test_peer_that_does_not_read();
  test_frames_that_are_not_sent();
  test_nothing_is_left();
  test_few_are_kept();
  test_file_that_became_smaller_is_refused();
  test_lies();
  test_files_that_change();
  test_peer_that_shares_unasked();
});

}  // namespace

}  // namespace farcall::test_imported_memory
