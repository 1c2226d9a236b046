// The bytes that a library keeps for each thread. A library may have functions to get and set a value
// and not say where it is. Then the value is set, and the bytes that change are the place.
#pragma once

#include <link.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <vector>

namespace farcall {

// Bytes of a block, from `begin` to before `end`.
struct Span {
  std::size_t begin = 0;
  std::size_t end = 0;

  bool is_empty() const { return begin == end; }
  std::size_t size() const { return end - begin; }

  // The smallest one that has both.
  Span with(const Span& other) const {
    if (is_empty() || other.is_empty()) return is_empty() ? other : *this;
    return {std::min(begin, other.begin), std::max(end, other.end)};
  }
};

// Of the calling thread.
class ThreadBlock {
 public:
  // The block of the library that has `function`; nullopt if the thread has not used it, or if the
  // library has no block.
  static std::optional<ThreadBlock> of(const void* function) {
    ThreadBlock found;
    found.function_ = reinterpret_cast<std::uintptr_t>(function);
    dl_iterate_phdr(look, &found);
    if (found.data_ == nullptr) return std::nullopt;
    return found;
  }

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Of an object that lies in it; else empty.
  Span span_of(const void* object, std::size_t size) const {
    const auto* first = static_cast<const std::byte*>(object);
    const std::less<> before;  // also of what lies elsewhere
    if (before(first, data_) || before(data_ + size_, first + size)) return {};
    const auto begin = static_cast<std::size_t>(first - data_);
    return {begin, begin + size};
  }

  // From the first to the last byte that `set` changes, in words; `undo` makes it as it was. Empty:
  // nothing changes, or it does not become as it was.
  template <class Set, class Undo>
  Span changed_by(Set set, Undo undo) const {
    const std::vector<std::byte> before(data_, data_ + size_);
    set();
    Span span;
    for (std::size_t i = 0; i < size_; ++i) {
      if (data_[i] != before[i]) span = span.with({i / kWord * kWord, (i / kWord + 1) * kWord});
    }
    undo();
    span.end = std::min(span.end, size_);
    return std::memcmp(before.data(), data_, size_) == 0 ? span : Span{};
  }

 private:
  static constexpr std::size_t kWord = 8;

  // Not `dladdr`: it goes through all symbols of the library, which are half a million in torch's.
  static int look(dl_phdr_info* info, std::size_t, void* data) {
    auto& block = *static_cast<ThreadBlock*>(data);
    if (!has(*info, block.function_)) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
      block.data_ = static_cast<const std::byte*>(info->dlpi_tls_data);
      block.size_ = info->dlpi_phdr[i].p_memsz;
    }
    return 1;
  }

  // Whether an address lies in a loaded segment of a library.
  static bool has(const dl_phdr_info& library, std::uintptr_t address) {
    const auto* end = library.dlpi_phdr + library.dlpi_phnum;
    return std::any_of(library.dlpi_phdr, end, [&](const auto& segment) {
      const std::uintptr_t begin = library.dlpi_addr + segment.p_vaddr;
      return segment.p_type == PT_LOAD && address >= begin && address - begin < segment.p_memsz;
    });
  }

  std::uintptr_t function_ = 0;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace farcall
