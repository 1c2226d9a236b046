// AES-256-GCM from OpenSSL's libcrypto.
//
// The library is found at run time: a wheel needs no headers and brings no copy, so the system's
// security updates count.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace farcall {

constexpr std::size_t kKeySize = 32;
constexpr std::size_t kTagSize = 16;

using Key = std::array<std::uint8_t, kKeySize>;

// Whether this process has found a libcrypto. Looks for it once.
bool has_crypto();

// Overwrites a secret; the compiler keeps that.
void wipe(void* data, std::size_t size);

// Encrypts, or decrypts, one message after the other. For one thread at a time. Throws LinkFailure
// where the library fails.
class Gcm {
 public:
  enum class Direction { kDecrypt = 0, kEncrypt = 1 };  // as in EVP_CipherInit_ex

  // Throws LinkFailure if there is no libcrypto.
  Gcm(Direction direction, const Key& key);
  ~Gcm();
  Gcm(const Gcm&) = delete;
  Gcm& operator=(const Gcm&) = delete;

  void set_key(const Key& key);
  // Begins a message. No two messages under one key may have the same number.
  void begin(std::uint64_t number);
  // Associated data, before anything is converted.
  void authenticate(const std::uint8_t* data, std::size_t size);
  void convert(const std::uint8_t* from, std::size_t size, std::uint8_t* to);
  void finish(std::uint8_t* tag);
  // Ends a message that was decrypted, and returns whether it is authentic.
  bool finish_and_check(const std::uint8_t* tag);

 private:
  void prefetch(const std::uint8_t* from, const std::uint8_t* to) const;

  void* context_;
  const Direction direction_;
};

}  // namespace farcall
