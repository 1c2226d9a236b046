#include "core/version.hpp"

namespace farcall {

std::uint32_t wire_version() noexcept { return 1; }

}  // namespace farcall
