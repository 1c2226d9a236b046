#include "ring.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace farcall {

namespace {

// A peer that dies, or lies, must not make a writer sleep for ever.
constexpr Nanoseconds kMaxSleep = 100 * kMillisecond;

}  // namespace

std::uint64_t RingWriter::checked_head() {
  // Sequentially consistent, as in `RingReader::publish`: who has said that it waits, and then
  // sees too little here, is seen by who moves it on.
  const std::uint64_t head = control_.head.load(std::memory_order_seq_cst);
  if (head < head_ || head > published_) throw LinkFailure("the peer damaged the shared memory");
  head_ = head;
  return head;
}

std::size_t RingWriter::space() { return size_ - (tail_ - checked_head()); }

std::size_t RingWriter::write(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;  // `data` may be null
  std::size_t room = size_ - (tail_ - head_);
  if (room < size) room = space();
  const std::size_t count = std::min(size, room);
  const std::size_t start = tail_ & (size_ - 1);
  const std::size_t until_end = std::min(count, size_ - start);
  std::memcpy(data_ + start, data, until_end);
  if (count > until_end) std::memcpy(data_, data + until_end, count - until_end);
  tail_ += count;
  return count;
}

Tell RingWriter::publish(std::uint64_t outcome) {
  published_ = tail_;
  // Sequentially consistent, as in `RingReader::arm`: of the two at least one sees the other.
  control_.tail.store(tail_, std::memory_order_seq_cst);
  if (control_.reader_sleeps.load(std::memory_order_seq_cst) == 0) return Tell::kNobody;
  if (outcome != 0 && control_.awaited.load(std::memory_order_seq_cst) == outcome) {
    return Tell::kNobody;
  }
  return control_.reader_sleeps.exchange(0) != 0 ? Tell::kBell : Tell::kNobody;
}

template <class IsDone>
bool RingWriter::wait(Nanoseconds deadline, Interrupt interrupt, IsDone is_done) {
  const std::uint32_t before = control_.space.load();
  control_.writer_waits.store(kWriterSleeps);
  if (is_done()) return true;
  const Nanoseconds time = now();
  if (time >= deadline) return false;
  futex_wait(control_.space, before, std::min(deadline, time + kMaxSleep), interrupt, true);
  return true;
}

bool RingWriter::wait_for_space(Nanoseconds deadline, Interrupt interrupt) {
  return wait(deadline, interrupt, [this] { return checked_head() + size_ / 2 >= tail_; });
}

bool RingWriter::wait_for_progress(std::uint64_t read, Nanoseconds deadline, Interrupt interrupt) {
  return wait(deadline, interrupt, [this, read] { return checked_head() != read; });
}

bool RingWriter::ask_for_bell() {
  control_.writer_waits.store(kWriterWantsBell);
  return checked_head() + size_ / 2 >= tail_;
}

void RingWriter::wake() {
  control_.space.fetch_add(1);
  futex_wake(control_.space, 1, true);
}

std::size_t RingReader::read(std::uint8_t* data, std::size_t size) {
  const std::uint64_t head = head_.load(std::memory_order_relaxed);
  if (tail_ - head < size) {
    const std::uint64_t tail = control_.tail.load(std::memory_order_acquire);
    if (tail < tail_ || tail - published_ > size_) {
      throw LinkFailure("the peer damaged the shared memory");
    }
    tail_ = tail;
  }
  const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(size, tail_ - head));
  if (count == 0) return 0;  // `data` may be null
  const std::size_t start = head & (size_ - 1);
  const std::size_t until_end = std::min(count, size_ - start);
  std::memcpy(data, data_ + start, until_end);
  if (count > until_end) std::memcpy(data + until_end, data_, count - until_end);
  head_.store(head + count, std::memory_order_relaxed);
  return count;
}

Tell RingReader::publish() {
  const std::uint64_t head = head_.load(std::memory_order_relaxed);
  if (published_ == head) return Tell::kNobody;
  published_ = head;
  control_.head.store(head, std::memory_order_seq_cst);
  const std::uint32_t waits = control_.writer_waits.load(std::memory_order_seq_cst);
  // Half the ring at a time: a wake-up for each frame read would cost more than reading it.
  if (waits == 0 || tail_ - head > size_ / 2) return Tell::kNobody;
  control_.writer_waits.store(0);
  if (waits == kWriterWantsBell) return Tell::kBell;
  control_.space.fetch_add(1);
  futex_wake(control_.space, 1, true);
  return Tell::kNobody;
}

bool RingReader::arm() {
  control_.reader_sleeps.store(1, std::memory_order_seq_cst);
  return control_.tail.load(std::memory_order_seq_cst) == head_.load(std::memory_order_relaxed);
}

}  // namespace farcall
