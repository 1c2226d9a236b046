#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "core/segments.hpp"
#include "frames.hpp"

namespace farcall::test_segments {

namespace {

constexpr std::size_t kSize = kSmallestSegment;

// Both sides, with announcements that arrive at once.
struct Segments {
  std::shared_ptr<SharedMemory> home = SharedMemory::create(sizeof(SegmentStates)).first;
  SegmentStates& states = *reinterpret_cast<SegmentStates*>(home->data());
  SegmentReader reader{home, states};
  bool can_announce = true;
  int made = 0, ended = 0;
  std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>(1 << 30);
  SegmentWriter writer{home, states, budget,
                       [this](SegmentName name, std::size_t size, int descriptor) {
                         if (!can_announce) return false;
                         (size > 0 ? made : ended) += 1;
                         reader.learn(name, size, Descriptor(size > 0 ? dup(descriptor) : -1));
                         return true;
                       }};

  // The block that arrives when a buffer is sent.
  std::pair<SegmentName, BlockRef> send(const Bytes& bytes) {
    const SegmentWriter::Place place = writer.take(bytes.size());
    CHECK(place);
    std::memcpy(place.data(), bytes.data(), bytes.size());
    return {place.name, reader.open(place.name, bytes.size())};
  }
};

std::size_t count_lines(const char* path, const char* having) {
  std::FILE* file = std::fopen(path, "r");
  CHECK(file != nullptr);
  char line[4096];
  std::size_t count = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) count += std::strstr(line, having) != nullptr;
  std::fclose(file);
  return count;
}

std::size_t mapped_segments() { return count_lines("/proc/self/maps", "memfd:farcall"); }

void test_reuse() {
  Segments segments;
  const Bytes bytes = pattern(kSize, 1);
  auto [first, block] = segments.send(bytes);
  CHECK(std::equal(bytes.begin(), bytes.end(), block->data()));
  auto [second, other] = segments.send(bytes);
  CHECK(second.slot != first.slot);
  block.reset();
  const auto [third, again] = segments.send(pattern(kSize - 5, 2));
  CHECK(third.slot == first.slot && third.serial == first.serial);
  CHECK(again->size() == kSize - 5);
  CHECK(segments.made == 2);
}

void test_best_fit() {
  Segments segments;
  auto large = segments.send(Bytes(8 * kSize));
  auto middle = segments.send(Bytes(3 * kSize));
  large.second.reset();
  middle.second.reset();
  CHECK(segments.send(Bytes(2 * kSize + 1)).first.slot == middle.first.slot);
  CHECK(segments.send(Bytes(8 * kSize)).first.slot == large.first.slot);
  CHECK(segments.send(Bytes(kSize)).first.slot == middle.first.slot);
  // One that is far too large is left for what needs it.
  auto held = segments.send(Bytes(3 * kSize));
  CHECK(segments.made == 2);
  segments.send(Bytes(kSize));
  CHECK(segments.made == 3);
}

void test_put_back() {
  Segments segments;
  const SegmentWriter::Place place = segments.writer.take(kSize);
  segments.writer.put_back(place.name.slot);
  CHECK(segments.writer.take(kSize).name.slot == place.name.slot);
  CHECK(segments.made == 1);
}

void test_trim() {
  const std::size_t mapped = mapped_segments();
  Segments segments;
  auto [name, block] = segments.send(Bytes(kSize));
  auto [other, held] = segments.send(Bytes(kSize));
  block.reset();
  CHECK(segments.writer.trim());
  CHECK(segments.ended == 0);
  CHECK(!segments.writer.trim());
  CHECK(segments.ended == 1 && !segments.reader.knows(name) && segments.reader.knows(other));
  CHECK(mapped_segments() == mapped + 2);  // the states, and what the receiver keeps
  held.reset();
  CHECK(!segments.writer.trim());
  CHECK(segments.ended == 1 && mapped_segments() == mapped + 1);
  segments.send(Bytes(kSize));  // as new
  CHECK(segments.made == 3);
}

// A block that the receiver keeps is its own after a while, and the sender has it no longer mapped.
void test_trim_gives_away_what_the_receiver_keeps() {
  const std::size_t mapped = mapped_segments();
  Segments segments;
  std::vector<BlockRef> kept;
  for (std::size_t i = 0; i < 100; ++i) kept.push_back(segments.send(pattern(kSize, i)).second);
  CHECK(mapped_segments() == mapped + 1 + 2 * kept.size());
  CHECK(segments.writer.trim());
  auto [late, fresh] = segments.send(Bytes(kSize));
  CHECK(segments.writer.trim());  // the late one
  CHECK(mapped_segments() == mapped + 1 + kept.size() + 2);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const Bytes bytes = pattern(kSize, i);
    CHECK(std::equal(bytes.begin(), bytes.end(), kept[i]->data()));
  }
  // One that was given away while a thread filled it, and was not sent after all.
  const SegmentWriter::Place place = segments.writer.take(kSize);
  segments.writer.trim();
  segments.writer.trim();
  segments.writer.put_back(place.name.slot);
  kept.clear();
  fresh.reset();
  for (const std::atomic<std::uint32_t>& state : segments.states) CHECK(state == 0);
  CHECK(segments.send(Bytes(kSize)).second);
}

// The receiver keeps more than the sender wants to have mapped: the sender lets go of the oldest,
// and the receiver has them for itself until it drops them.
void test_giving_away() {
  const std::size_t mapped = mapped_segments();
  {
    Segments segments;
    std::vector<BlockRef> kept;
    for (std::size_t i = 0; i < kSegmentSlots; ++i)
      kept.push_back(segments.send(pattern(kSize, i)).second);
    CHECK(mapped_segments() < mapped + 1 + 2 * kSegmentSlots);
    CHECK(!segments.writer.take(kSize));  // no slot is left: the ring has to do
    for (std::size_t i = 0; i < kSegmentSlots; ++i) {
      const Bytes bytes = pattern(kSize, i);
      CHECK(std::equal(bytes.begin(), bytes.end(), kept[i]->data()));
    }
    kept.clear();
    for (const std::atomic<std::uint32_t>& state : segments.states) CHECK(state == 0);
    CHECK(segments.send(Bytes(kSize)).second);
  }
  CHECK(mapped_segments() == mapped);
}

// A thread still fills a segment when others need so many that it is given away.
void test_given_away_while_it_is_filled() {
  Segments segments;
  const SegmentWriter::Place place = segments.writer.take(kSize);
  std::vector<BlockRef> kept;
  for (std::size_t i = 0; i < kSegmentSlots * 3 / 4; ++i)
    kept.push_back(segments.send(Bytes(kSize)).second);
  const Bytes bytes = pattern(kSize, 5);
  std::memcpy(place.data(), bytes.data(), kSize);
  const BlockRef block = segments.reader.open(place.name, kSize);
  CHECK(std::equal(bytes.begin(), bytes.end(), block->data()));
}

void test_announcement_that_fails() {
  const std::size_t mapped = mapped_segments();
  Segments segments;
  segments.can_announce = false;
  CHECK(!segments.writer.take(kSize));
  CHECK(mapped_segments() == mapped + 1);
  segments.can_announce = true;
  CHECK(segments.writer.take(kSize));
  CHECK(!segments.writer.take(std::size_t{5} << 30));  // more than may be mapped
}

void test_names_that_lie() {
  Segments segments;
  auto [name, block] = segments.send(Bytes(kSize));
  CHECK_THROWS(segments.reader.open(name, kSize), BadFrame);  // twice at once
  block.reset();
  CHECK_THROWS(segments.reader.open(name, pooled_size(kSize) + 1), BadFrame);
  CHECK_THROWS(segments.reader.open({name.slot, name.serial + 1}, kSize), BadFrame);
  CHECK_THROWS(segments.reader.open({name.slot + 1, name.serial}, kSize), BadFrame);
  CHECK_THROWS(segments.reader.open({kSegmentSlots, name.serial}, kSize), BadFrame);
  CHECK(segments.reader.open(name, kSize));  // after all that
  CHECK_THROWS(segments.reader.learn({kSegmentSlots, 1}, kSize, Descriptor()), BadFrame);
  CHECK_THROWS(segments.reader.learn({~std::uint32_t{0}, 1}, 0, Descriptor()), BadFrame);
  CHECK_THROWS(segments.reader.learn({3, 1}, kSize, Descriptor()), BadFrame);
  const Descriptor sparse(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(sparse.get(), kSize) == 0 && fcntl(sparse.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK_THROWS(segments.reader.learn({3, 1}, kSize, sparse), BadFrame);
  CHECK_THROWS(segments.reader.open({3, 1}, kSize), BadFrame);
}

// The peer takes a segment back, replaces it and scribbles over its state while we look at it.
void test_states_that_lie() {
  Segments segments;
  const Bytes bytes = pattern(kSize, 1);
  auto [name, block] = segments.send(bytes);
  for (const std::uint32_t state : {0u, 2u, 77u}) {
    segments.states[name.slot] = state;
    segments.reader.learn(name, 0, Descriptor());
    CHECK(std::equal(bytes.begin(), bytes.end(), block->data()));
  }
  block.reset();
  CHECK_THROWS(segments.reader.open(name, kSize), BadFrame);
  Segments more;
  auto [given, other] = more.send(bytes);
  more.states[given.slot] = 2;
  other.reset();
  CHECK(more.states[given.slot] == 0);
  CHECK_THROWS(more.reader.open(given, kSize), BadFrame);  // unmapped already
}

// A block that the parent looks at is not the child's to give back.
void test_fork() {
  Segments segments;
  auto [name, block] = segments.send(pattern(kSize, 1));
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    block.reset();
    _exit(segments.states[name.slot] == 1 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(segments.states[name.slot] == 1);
  block.reset();
  CHECK(segments.states[name.slot] == 0);
}

// Receivers drop in other threads than the one that opens.
void test_threads() {
  Segments segments;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 3; ++i) {
      auto [name, block] = segments.send(pattern(kSize + i, i));
      threads.emplace_back([i, moved = std::move(block)]() mutable {
        const Bytes bytes = pattern(kSize + i, i);
        CHECK(std::equal(bytes.begin(), bytes.end(), moved->data()));
        moved.reset();
      });
    }
    if (round % 20 == 0) segments.writer.trim();
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(segments.made <= 30);
}

const TestFile kFile("test_segments", [] {
  test_reuse();
  test_best_fit();
  test_put_back();
  test_trim();
  test_trim_gives_away_what_the_receiver_keeps();
  test_giving_away();
  test_given_away_while_it_is_filled();
  test_announcement_that_fails();
  test_names_that_lie();
  test_states_that_lie();
  test_fork();
  test_threads();
});

}  // namespace

}  // namespace farcall::test_segments
