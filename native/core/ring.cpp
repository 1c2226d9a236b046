#include "ring.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace farcall {

namespace {

// A peer that dies, or lies, must not make a writer sleep forever.
constexpr Nanoseconds kMaxFutexSleep = 100 * kMillisecond;

constexpr char kDamaged[] = "the peer damaged the shared memory";

}  // namespace

std::uint64_t RingWriter::checked_head() {
  // Sequentially consistent, as in `RingReader::publish`: a writer that has said that it waits, and
  // then sees too little here, is seen by the reader that moves it on.
  const std::uint64_t head = control_.head.load(std::memory_order_seq_cst);
  if (head < head_ || head > published_) throw LinkFailure(kDamaged);
  head_ = head;
  return head;
}

std::size_t RingWriter::space() {
  checked_head();
  return room();
}

std::size_t RingWriter::write(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;  // `data` may be null
  std::size_t room = this->room();
  if (room < size) room = space();
  if (room < size && grow(size)) room = this->room();
  const std::size_t count = std::min(size, room);
  const std::size_t start = tail_ & (this->size() - 1);
  const std::size_t until_end = std::min(count, this->size() - start);
  std::memcpy(this->data() + start, data, until_end);
  if (count > until_end) std::memcpy(this->data(), data + until_end, count - until_end);
  tail_ += count;
  return count;
}

// Go on in a larger window, if there is memory for one: the next one, or one that holds `size` bytes.
// Not before the reader has read beyond the last change, and so has seen it; but a change
// behind which nothing was written is seen by no reader.
bool RingWriter::grow(std::size_t size) {
  unsigned next = window_ + 1;
  if (next == kWindows || (has_turned_ && head_ <= from_ && tail_ != from_)) return false;
  while (next + 1 < kWindows && windows_[next].size < size) ++next;
  for (; next > window_; --next) {
    if (!keeper_.take(next)) continue;
    turn(next);
    return true;
  }
  return false;
}

void RingWriter::turn(unsigned window) {
  has_turned_ = true;
  window_ = window;
  from_ = tail_;
  // Seen with the next `tail`, whose bytes lie in that window.
  control_.turn.store(tail_ << 2 | window, std::memory_order_relaxed);
}

bool RingWriter::shrink() {
  if (window_ > 0) {
    if (checked_head() != tail_ || head_ <= from_) return true;
    turn(0);
  }
  for (unsigned window = 1; window < kWindows; ++window) keeper_.give_back(window);
  return false;
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
  futex_wait(control_.space, before, std::min(deadline, time + kMaxFutexSleep), interrupt, true);
  return true;
}

bool RingWriter::wait_for_space(Nanoseconds deadline, Interrupt interrupt) {
  return wait(deadline, interrupt, [this] { return space() >= size() / 2; });
}

bool RingWriter::wait_for_progress(std::uint64_t read, Nanoseconds deadline, Interrupt interrupt) {
  return wait(deadline, interrupt, [this, read] { return checked_head() != read; });
}

bool RingWriter::ask_for_bell() {
  control_.writer_waits.store(kWriterWantsBell);
  return space() >= size() / 2;
}

void RingWriter::wake() {
  control_.space.fetch_add(1);
  futex_wake(control_.space, 1, true);
}

std::size_t RingReader::read(std::uint8_t* data, std::size_t size) {
  std::uint64_t head = head_.load(std::memory_order_relaxed);
  if (tail_ - head < size) look();
  std::size_t done = 0;
  while (done < size) {
    if (head == next_from_) enter_next_window();
    const auto count = static_cast<std::size_t>(
        std::min<std::uint64_t>(size - done, std::min(tail_, next_from_) - head));
    if (count == 0) break;  // `data` may be null
    const RingWindow& window = windows_[window_];
    const std::size_t start = head & (window.size - 1);
    const std::size_t until_end = std::min(count, window.size - start);
    std::memcpy(data + done, window.data + start, until_end);
    if (count > until_end) std::memcpy(data + done + until_end, window.data, count - until_end);
    done += count;
    head += count;
    head_.store(head, std::memory_order_relaxed);
  }
  return done;
}

void RingReader::look() {
  const std::uint64_t tail = control_.tail.load(std::memory_order_acquire);
  // All changes before `tail` are seen, and maybe one that comes later.
  const std::uint64_t turn = control_.turn.load(std::memory_order_relaxed);
  if (tail < tail_) throw LinkFailure(kDamaged);
  if (turn != turn_ && turn >> 2 < tail) note_turn(turn, tail);
  const std::uint64_t start = std::max(published_, from_);
  const std::uint64_t end = std::min(tail, next_from_);
  if (end - start > size() || tail - end > windows_[next_window_].size) throw LinkFailure(kDamaged);
  tail_ = tail;
}

void RingReader::note_turn(std::uint64_t turn, std::uint64_t tail) {
  const std::uint64_t position = turn >> 2;
  const auto window = static_cast<unsigned>(turn & 3);
  // Everything seen before lies in the old window, and one change comes after the other.
  if (window >= kWindows || position < tail_ || position >= tail || next_from_ != kNowhere) {
    throw LinkFailure(kDamaged);
  }
  turn_ = turn;
  next_from_ = position;
  next_window_ = window;
}

void RingReader::enter_next_window() {
  window_ = next_window_;
  from_ = next_from_;
  next_from_ = kNowhere;
  if (window_ > 0 && !keeper_.touch(window_)) {
    throw LinkFailure("there is no memory for what the peer sent over shared memory");
  }
}

Tell RingReader::publish() {
  const std::uint64_t head = head_.load(std::memory_order_relaxed);
  if (published_ == head) return Tell::kNobody;
  published_ = head;
  control_.head.store(head, std::memory_order_seq_cst);
  const std::uint32_t waits = control_.writer_waits.load(std::memory_order_seq_cst);
  // Half the ring at a time: a wake-up for each frame read would cost more than reading it.
  if (waits == 0 || tail_ - head > size() / 2) return Tell::kNobody;
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
