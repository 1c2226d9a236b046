// Which wire format this build speaks.
#pragma once

#include <cstdint>

namespace farcall {

// The version in the header of every frame (src/farcall/wire.py has the same).
std::uint32_t wire_version() noexcept;

}  // namespace farcall
