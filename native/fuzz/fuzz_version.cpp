#include <cstddef>
#include <cstdint>

#include "core/version.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    (void)data;
    return size == 0 || farcall::wire_version() != 0 ? 0 : -1;
}
