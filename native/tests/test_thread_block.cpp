// Finding where a library keeps what it has only functions for.
#include <cstring>
#include <thread>

#include "check.hpp"
#include "core/thread_block.hpp"

namespace farcall::test_thread_block {

namespace {

struct Kept {
  alignas(8) unsigned char first[8] = {};
  alignas(8) unsigned char gap[64] = {};
  alignas(8) unsigned char last[8] = {};
};

thread_local Kept kept;

void set_first(unsigned char value) { kept.first[3] = value; }
void set_last(unsigned char value) { kept.last[0] = value; }

ThreadBlock block_of_this_thread() {
  set_first(0);
  const auto block = ThreadBlock::of(reinterpret_cast<const void*>(&set_first));
  CHECK(block.has_value());
  return *block;
}

void test_words_that_change_are_found() {
  const ThreadBlock block = block_of_this_thread();
  const Span first = block.changed_by([] { set_first(1); }, [] { set_first(0); });
  const Span last = block.changed_by([] { set_last(1); }, [] { set_last(0); });
  CHECK(block.data() + first.begin == reinterpret_cast<const std::byte*>(kept.first));
  CHECK(first.size() == 8);
  CHECK(block.data() + last.begin == reinterpret_cast<const std::byte*>(kept.last));
  const Span both = first.with(last);
  CHECK(both.begin == first.begin && both.end == last.end);
  CHECK(Span{}.with(first).begin == first.begin && first.with(Span{}).end == first.end);
}

void test_what_changes_nothing_is_nowhere() {
  const ThreadBlock block = block_of_this_thread();
  CHECK(block.changed_by([] { set_first(0); }, [] {}).is_empty());
}

void test_what_cannot_be_undone_is_nowhere() {
  const ThreadBlock block = block_of_this_thread();
  CHECK(block.changed_by([] { set_first(1); }, [] {}).is_empty());
  set_first(0);
}

void test_objects_elsewhere_have_no_span() {
  const ThreadBlock block = block_of_this_thread();
  static int elsewhere = 0;
  CHECK(block.span_of(&elsewhere, sizeof(elsewhere)).is_empty());
  CHECK(block.span_of(block.data() + block.size() - 1, 2).is_empty());
  CHECK(block.span_of(kept.gap, 64).size() == 64);
}

void test_a_span_is_the_same_in_every_thread() {
  const Span here = block_of_this_thread().span_of(kept.last, 8);
  std::thread([here] {
    const ThreadBlock block = block_of_this_thread();
    const Span there = block.span_of(kept.last, 8);
    CHECK(here.begin == there.begin && here.end == there.end);
  }).join();
}

const TestFile kFile("test_thread_block", [] {
  test_words_that_change_are_found();
  test_what_changes_nothing_is_nowhere();
  test_what_cannot_be_undone_is_nowhere();
  test_objects_elsewhere_have_no_span();
  test_a_span_is_the_same_in_every_thread();
});

}  // namespace

}  // namespace farcall::test_thread_block
