#include "crypto.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "errors.hpp"

namespace farcall {

namespace {

constexpr const char* kNames[] = {"libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1"};
// EVP_CTRL_AEAD_GET_TAG, EVP_CTRL_AEAD_SET_TAG.
constexpr int kGetTag = 0x10, kSetTag = 0x11;
constexpr int kSameDirection = -1;

// AES-GCM computes so much between two memory accesses that the processor's own prefetching does not
// keep up. So a few lines at a time are fetched ahead: about as many as a core can wait for, and a
// multiple of what OpenSSL's loop takes per round (96 bytes).
constexpr std::size_t kSlice = 1152;
constexpr std::size_t kAhead = 4 * kSlice;
constexpr std::size_t kLine = 64;

// The functions of it that are used. Contexts, ciphers and engines are only ever pointers here.
struct Library {
  void* (*new_context)();
  void (*free_context)(void* context);
  const void* (*aes_256_gcm)();
  int (*init)(void* context, const void* cipher, void* engine, const unsigned char* key,
              const unsigned char* iv, int encrypts);
  int (*update)(void* context, unsigned char* out, int* out_size, const unsigned char* in, int size);
  int (*final)(void* context, unsigned char* out, int* out_size);
  int (*ctrl)(void* context, int type, int argument, void* pointer);
};

template <class Function>
bool find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

// Stays loaded: contexts may be in use until the process ends. When `exit` has cleaned the library up,
// those that are there go on working, and no new one can be made.
std::optional<Library> load() {
  for (const char* name : kNames) {
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) continue;
    Library found{};
    if (find(handle, "EVP_CIPHER_CTX_new", found.new_context) &&
        find(handle, "EVP_CIPHER_CTX_free", found.free_context) &&
        find(handle, "EVP_aes_256_gcm", found.aes_256_gcm) &&
        find(handle, "EVP_CipherInit_ex", found.init) &&
        find(handle, "EVP_CipherUpdate", found.update) &&
        find(handle, "EVP_CipherFinal_ex", found.final) &&
        find(handle, "EVP_CIPHER_CTX_ctrl", found.ctrl)) {
      return found;
    }
  }
  return std::nullopt;
}

const std::optional<Library>& library() {
  static const std::optional<Library> found = load();
  return found;
}

void require(bool done) {
  if (!done) throw LinkFailure("AES-256-GCM of libcrypto failed");
}

}  // namespace

bool has_crypto() { return library().has_value(); }

void wipe(void* data, std::size_t size) {
  auto* bytes = static_cast<volatile std::uint8_t*>(data);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = 0;
}

Gcm::Gcm(Direction direction, const Key& key) : direction_(direction) {
  if (!has_crypto()) throw LinkFailure("there is no libcrypto of OpenSSL to encrypt with");
  context_ = library()->new_context();
  if (context_ != nullptr && library()->init(context_, library()->aes_256_gcm(), nullptr, key.data(),
                                             nullptr, static_cast<int>(direction)) == 1) {
    return;
  }
  library()->free_context(context_);
  require(false);
}

// Overwrites the key schedule.
Gcm::~Gcm() { library()->free_context(context_); }

void Gcm::set_key(const Key& key) {
  require(library()->init(context_, nullptr, nullptr, key.data(), nullptr, kSameDirection) == 1);
}

// The nonce of the Noise Protocol Framework: 4 zero bytes, then the number, big-endian.
void Gcm::begin(std::uint64_t number) {
  std::uint8_t nonce[12] = {};
  const std::uint64_t big_endian = __builtin_bswap64(number);
  std::memcpy(nonce + 4, &big_endian, sizeof big_endian);
  require(library()->init(context_, nullptr, nullptr, nullptr, nonce, kSameDirection) == 1);
}

void Gcm::authenticate(const std::uint8_t* data, std::size_t size) {
  int written = 0;
  require(library()->update(context_, nullptr, &written, data, static_cast<int>(size)) == 1);
}

// Of the two memories the plaintext's is the cold one: the records lie in a small buffer that is used
// again and again. The fetched bytes may lie beyond the end: a prefetch reads nothing and can't fail.
void Gcm::convert(const std::uint8_t* from, std::size_t size, std::uint8_t* to) {
  while (size > 0) {
    const std::size_t slice = std::min(size, kSlice);
    if (size > kSlice) prefetch(from, to);
    int written = 0;
    require(library()->update(context_, to, &written, from, static_cast<int>(slice)) == 1);
    from += slice;
    to += slice;
    size -= slice;
  }
}

void Gcm::prefetch(const std::uint8_t* from, const std::uint8_t* to) const {
  for (std::size_t i = kAhead; i < kAhead + kSlice; i += kLine) {
    if (direction_ == Direction::kEncrypt) {
      __builtin_prefetch(from + i, 0);
    } else {
      __builtin_prefetch(to + i, 1);
    }
  }
}

void Gcm::finish(std::uint8_t* tag) {
  std::uint8_t none[kTagSize];
  int written = 0;
  require(library()->final(context_, none, &written) == 1);
  require(library()->ctrl(context_, kGetTag, kTagSize, tag) == 1);
}

bool Gcm::finish_and_check(const std::uint8_t* tag) {
  std::uint8_t none[kTagSize];
  int written = 0;
  return library()->ctrl(context_, kSetTag, kTagSize, const_cast<std::uint8_t*>(tag)) == 1 &&
         library()->final(context_, none, &written) == 1;
}

}  // namespace farcall
