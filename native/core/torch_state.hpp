// Whether torch's state of a thread has changed: grad mode, inference mode, forward mode, autocast,
// modes, hooks, dispatch keys, the JIT's optimization; and how the thread computes with floats.
//
// farcall puts that state back after each remote function, and mostly there is nothing to put back.
// Asking torch by its Python functions takes microseconds. Here the state is asked for by functions of
// the loaded libraries, found by their names; where a name is missing `is_available` is false, and
// the caller asks as usual. These calls still take a quarter of a microsecond when the processor's caches
// hold other things. So the bytes that the libraries keep for the thread are compared first: those in
// which the state is, and all between them. If the bytes are as noted nothing has changed. If not, the
// functions decide.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "float_control.hpp"
#include "thread_block.hpp"

namespace farcall {

class TorchState {
 public:
  // `autocast_devices`: the device types that have autocast, as torch numbers them.
  // `float_control`: what the calling thread shall have, see `float_control.hpp`.
  TorchState(const std::vector<int>& autocast_devices, std::uint64_t float_control)
      : device_count_(std::min(autocast_devices.size(), kMostDevices)), float_control_(float_control) {
    const Symbols& torch = symbols();
    if (torch.complete)
      mine_ = {torch.autograd(), torch.hooks(), torch.tracing(), dlsym(torch.c10, kDispatchKeys)};
    std::copy_n(autocast_devices.begin(), device_count_, devices_.begin());
    watch();
    note();
  }

  static bool is_available() { return symbols().complete; }

  // Remember the state of the calling thread. How it shall compute with floats does not change.
  void note() {
    noted_ = read();
    noted_.float_control = float_control_;
    for (Watched& one : watched_) one.note();
  }

  // Remember whether anomaly mode is on; that is the process's, so it may have changed since.
  void note_anomaly() { noted_.anomaly = read_anomaly(); }

  void put_back_floats() const { write_float_control(float_control_); }

  bool anomaly_was_enabled() const { return noted_.anomaly != 0; }

  // How many bytes are compared first. 0: where the state is was not found, and torch is asked each time.
  std::size_t watched_bytes() const {
    std::size_t size = 0;
    for (const Watched& one : watched_) size += one.noted.size();
    return size;
  }

  // Whether the state of the calling thread is another one than that which was noted.
  bool has_changed() {
    if (is_certainly_unchanged()) return false;
    const State state = read();
    if (std::memcmp(&noted_, &state, sizeof(State)) != 0) return true;
    for (Watched& one : watched_) one.note();  // something else has changed
    return false;
  }

 private:
  // Of SavedTensorDefaultHooksTLS, those that hold the ends of its stack.
  static constexpr std::size_t kHooksBytes = 80;
  // Of AutogradState: a pointer or so, then one byte of flags.
  static constexpr std::size_t kAutogradBytes = 32;
  static constexpr std::size_t kMostDevices = 24;
  // Of SavedTensorDefaultHooksTLS and PythonTorchFunctionTLS, all.
  static constexpr std::size_t kAllHooksBytes = 128;
  static constexpr std::size_t kFunctionModesBytes = 32;
  // More are not compared each time.
  static constexpr std::size_t kMostWatched = 1024;

  struct State {
    std::array<std::byte, kHooksBytes> hooks{};
    std::array<std::byte, 16> dispatch_keys{};
    std::array<std::byte, kAutogradBytes> autograd{};
    std::int64_t function_modes = 0;
    std::int64_t dispatch_modes = 0;
    std::uint64_t float_control = 0;
    const void* tracing = nullptr;  // torch.jit's, of the function that it traces
    std::array<std::int8_t, kMostDevices> autocast_dtypes{};
    std::int32_t functions_disabled = 0;
    std::int32_t autocast_nesting = 0;
    std::uint8_t caches_casts = 0;
    std::uint8_t hooks_enabled = 0;
    std::uint8_t hooks_tracing = 0;
    std::uint8_t jit_optimizes = 0;
    std::uint8_t anomaly = 0;
    std::array<std::uint8_t, 3> unused{};
  };
  // No padding, which would be compared, too.
  static_assert(std::has_unique_object_representations_v<State>);

  struct Symbols {
    const void* (*autograd)() = nullptr;
    const void* (*hooks)() = nullptr;
    std::int64_t (*function_modes)() = nullptr;
    std::int64_t (*dispatch_modes)() = nullptr;
    int (*functions_disabled)() = nullptr;
    std::int8_t (*autocast_dtype)(std::int8_t) = nullptr;
    int (*increment_nesting)() = nullptr;
    int (*decrement_nesting)() = nullptr;
    void (*set_autocast_dtype)(std::int8_t, std::int8_t) = nullptr;
    bool (*caches_casts)() = nullptr;
    void (*set_caches_casts)(bool) = nullptr;
    bool (*hooks_enabled)() = nullptr;
    bool (*set_hooks_tracing)(bool) = nullptr;
    bool (*jit_optimizes)() = nullptr;
    void (*set_jit_optimizes)(bool) = nullptr;
    const void* (*function_mode_state)() = nullptr;
    const void* const* (*tracing)() = nullptr;  // a std::shared_ptr, which begins with the pointer
    const std::uint8_t* anomaly = nullptr;
    void* c10 = nullptr;
    bool complete = false;
    bool has_places = false;  // so that `watch` can find where the state is
  };

  // Bytes of the thread, and what they were.
  struct Watched {
    const std::byte* data;
    std::vector<std::byte> noted;

    bool is_as_noted() const { return std::memcmp(data, noted.data(), noted.size()) == 0; }
    void note() { std::memcpy(noted.data(), data, noted.size()); }
  };

  static constexpr const char* kDispatchKeys = "_ZN3c104impl26raw_local_dispatch_key_setE";

  template <typename T>
  static bool find(void* library, const char* name, T& symbol) {
    symbol = library == nullptr ? nullptr : reinterpret_cast<T>(dlsym(library, name));
    return symbol != nullptr;
  }

  static Symbols load() {
    Symbols found;
    // Loaded by torch, else not at all. Never closed: what they give is used until the end.
    found.c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    void* cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    found.complete =
        find(found.c10, "_ZN3c1013AutogradState13get_tls_stateEv", found.autograd) &&
        find(found.c10, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", found.dispatch_modes) &&
        dlsym(found.c10, kDispatchKeys) != nullptr &&
        find(cpu, "_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv", found.hooks) &&
        find(cpu, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", found.function_modes) &&
        find(cpu, "_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv",
             found.functions_disabled) &&
        find(cpu, "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE", found.autocast_dtype) &&
        find(cpu, "_ZN2at8autocast17increment_nestingEv", found.increment_nesting) &&
        find(cpu, "_ZN2at8autocast17decrement_nestingEv", found.decrement_nesting) &&
        find(cpu, "_ZN2at8autocast25is_autocast_cache_enabledEv", found.caches_casts) &&
        find(cpu, "_ZN2at23SavedTensorDefaultHooks10is_enabledEv", found.hooks_enabled) &&
        find(cpu, "_ZN2at23SavedTensorDefaultHooks11set_tracingEb", found.set_hooks_tracing) &&
        find(cpu, "_ZN5torch3jit24getGraphExecutorOptimizeEv", found.jit_optimizes) &&
        find(cpu, "_ZN5torch3jit6tracer15getTracingStateEv", found.tracing) &&
        find(cpu, "_ZN5torch8autograd11AnomalyMode8_enabledE", found.anomaly);
    found.has_places =
        found.complete &&
        find(cpu, "_ZN2at8autocast18set_autocast_dtypeEN3c1010DeviceTypeENS1_10ScalarTypeE",
             found.set_autocast_dtype) &&
        find(cpu, "_ZN2at8autocast26set_autocast_cache_enabledEb", found.set_caches_casts) &&
        find(cpu, "_ZN5torch3jit24setGraphExecutorOptimizeEb", found.set_jit_optimizes) &&
        find(cpu, "_ZN2at4impl22PythonTorchFunctionTLS9get_stateEv", found.function_mode_state);
    return found;
  }

  static const Symbols& symbols() {
    static const Symbols found = load();
    return found;
  }

  // Where in the block of libtorch_cpu the state is, which is the same for every thread: it is looked
  // for once. Empty: it was not found.
  Span span_in_cpu(const ThreadBlock& block) const {
    static const Span span = find_span(block, devices_, device_count_);
    return span;
  }

  static Span find_span(const ThreadBlock& block, const std::array<std::int8_t, kMostDevices>& devices,
                        std::size_t count) {
    const Symbols& torch = symbols();
    std::vector<Span> parts{
        block.span_of(torch.hooks(), kAllHooksBytes),
        block.span_of(torch.function_mode_state(), kFunctionModesBytes),
        block.changed_by(torch.increment_nesting, torch.decrement_nesting),
    };
    for (std::size_t i = 0; i < count; ++i) {
      const std::int8_t device = devices[i];
      const std::int8_t dtype = torch.autocast_dtype(device);
      const std::int8_t other = dtype == 0 ? 1 : 0;
      parts.push_back(block.changed_by([&] { torch.set_autocast_dtype(device, other); },
                                       [&] { torch.set_autocast_dtype(device, dtype); }));
    }
    const bool caches = torch.caches_casts();
    parts.push_back(block.changed_by([&] { torch.set_caches_casts(!caches); },
                                     [&] { torch.set_caches_casts(caches); }));
    const bool optimizes = torch.jit_optimizes();
    parts.push_back(block.changed_by([&] { torch.set_jit_optimizes(!optimizes); },
                                     [&] { torch.set_jit_optimizes(optimizes); }));
    Span all;
    for (const Span& part : parts) {
      if (part.is_empty()) return {};
      all = all.with(part);
    }
    return all;
  }

  // All that libc10 keeps (dispatch keys and modes, autograd's modes), and some of libtorch_cpu's.
  void watch() {
    const Symbols& torch = symbols();
    if (!torch.has_places) return;
    read();  // so that the thread has all of it
    const auto c10 = ThreadBlock::of(reinterpret_cast<const void*>(torch.dispatch_modes));
    const auto cpu = ThreadBlock::of(reinterpret_cast<const void*>(torch.hooks));
    if (!c10 || !cpu) return;
    const Span span = span_in_cpu(*cpu);
    if (span.is_empty() || span.size() + c10->size() > kMostWatched) return;
    if (c10->span_of(mine_.dispatch_keys, 1).is_empty() || c10->span_of(mine_.autograd, 1).is_empty())
      return;
    watched_.push_back({c10->data(), std::vector<std::byte>(c10->size())});
    watched_.push_back({cpu->data() + span.begin, std::vector<std::byte>(span.size())});
  }

  bool is_certainly_unchanged() const {
    if (watched_.empty()) return false;
    for (const Watched& one : watched_)
      if (!one.is_as_noted()) return false;
    return *mine_.tracing == noted_.tracing && *symbols().anomaly == noted_.anomaly &&
           read_float_control() == noted_.float_control;
  }

  static std::uint8_t read_anomaly() { return is_available() ? *symbols().anomaly : 0; }

  // torch gives the old value for a new one, and has no other way to ask.
  static bool read_hooks_tracing() {
    const bool value = symbols().set_hooks_tracing(false);
    if (value) symbols().set_hooks_tracing(true);
    return value;
  }

  State read() const {
    State state;
    const Symbols& torch = symbols();
    if (!torch.complete) return state;
    std::memcpy(state.hooks.data(), mine_.hooks, kHooksBytes);
    std::memcpy(state.dispatch_keys.data(), mine_.dispatch_keys, state.dispatch_keys.size());
    state.function_modes = torch.function_modes();
    state.dispatch_modes = torch.dispatch_modes();
    state.functions_disabled = torch.functions_disabled() & 0xff;
    for (std::size_t i = 0; i < device_count_; ++i)
      state.autocast_dtypes[i] = torch.autocast_dtype(devices_[i]);
    torch.increment_nesting();
    state.autocast_nesting = torch.decrement_nesting();
    state.caches_casts = torch.caches_casts();
    state.hooks_enabled = torch.hooks_enabled();
    state.hooks_tracing = read_hooks_tracing();
    state.jit_optimizes = torch.jit_optimizes();
    state.tracing = *mine_.tracing;
    state.float_control = read_float_control();
    std::memcpy(state.autograd.data(), mine_.autograd, kAutogradBytes);
    state.anomaly = *torch.anomaly;
    return state;
  }

  // The state that torch keeps for the thread that made this, and its places: it stays there.
  struct Places {
    const void* autograd = nullptr;
    const void* hooks = nullptr;
    const void* const* tracing = nullptr;
    const void* dispatch_keys = nullptr;
  };

  Places mine_;
  std::array<std::int8_t, kMostDevices> devices_{};
  std::size_t device_count_;
  std::uint64_t float_control_;
  State noted_;
  std::vector<Watched> watched_;  // empty: what would have to be watched was not found
};

}  // namespace farcall
