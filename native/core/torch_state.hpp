// Whether torch's state of a thread has changed: grad mode, inference mode, autocast, modes, hooks.
//
// farcall puts that state back after each remote function, and mostly there is nothing to put back.
// Asking torch by its Python functions takes a microsecond; this takes some ten nanoseconds. What is
// compared are bytes that this file does not interpret, found by their names in the libraries that
// are loaded. Where a name is missing `is_available` is false, and the caller asks as usual.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace farcall {

class TorchState {
 public:
  TorchState() { note(); }

  static bool is_available() { return symbols().complete; }

  // Remember the state of the calling thread.
  void note() { noted_ = read(); }

  // Remember whether anomaly mode is on; that is the process's, so it may have changed since.
  void begin() { noted_.anomaly = read_anomaly(); }

  bool anomaly_was_enabled() const { return noted_.anomaly != 0; }

  // Whether the state of the calling thread is another one than that which was noted.
  bool has_changed() const {
    const State state = read();
    return std::memcmp(&noted_, &state, sizeof(State)) != 0;
  }

 private:
  // Of SavedTensorDefaultHooksTLS, those that hold the ends of its stack.
  static constexpr std::size_t kHooksBytes = 80;
  // Of AutogradState: a pointer or so, then one byte of flags.
  static constexpr std::size_t kAutogradBytes = 32;

  struct State {
    std::array<std::byte, kHooksBytes> hooks{};
    std::array<std::byte, 16> dispatch_keys{};
    std::array<std::byte, kAutogradBytes> autograd{};
    std::int64_t function_modes = 0;
    std::int64_t dispatch_modes = 0;
    std::int32_t functions_disabled = 0;
    std::int8_t autocast_dtype = 0;
    std::uint8_t anomaly = 0;
    std::uint16_t unused = 0;  // no padding, which would be compared, too
  };

  struct Symbols {
    const void* (*autograd)() = nullptr;
    const void* (*hooks)() = nullptr;
    std::int64_t (*function_modes)() = nullptr;
    std::int64_t (*dispatch_modes)() = nullptr;
    int (*functions_disabled)() = nullptr;
    std::int8_t (*autocast_dtype)(std::int8_t) = nullptr;
    const std::uint8_t* anomaly = nullptr;
    void* c10 = nullptr;
    bool complete = false;
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
        find(cpu, "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE",
             found.autocast_dtype) &&
        find(cpu, "_ZN5torch8autograd11AnomalyMode8_enabledE", found.anomaly);
    return found;
  }

  static const Symbols& symbols() {
    static const Symbols found = load();
    return found;
  }

  static const void* dispatch_keys() {
    // Of this thread, and it stays where it is.
    thread_local const void* keys = dlsym(symbols().c10, kDispatchKeys);
    return keys;
  }

  static std::uint8_t read_anomaly() { return is_available() ? *symbols().anomaly : 0; }

  static State read() {
    State state;
    const Symbols& torch = symbols();
    if (!torch.complete) return state;
    std::memcpy(state.hooks.data(), torch.hooks(), kHooksBytes);
    std::memcpy(state.dispatch_keys.data(), dispatch_keys(), state.dispatch_keys.size());
    state.function_modes = torch.function_modes();
    state.dispatch_modes = torch.dispatch_modes();
    state.functions_disabled = torch.functions_disabled() & 0xff;
    state.autocast_dtype = torch.autocast_dtype(0);  // of the CPU
    std::memcpy(state.autograd.data(), torch.autograd(), kAutogradBytes);
    state.anomaly = *torch.anomaly;
    return state;
  }

  State noted_;
};

}  // namespace farcall
