#include "core/version.hpp"

#include "tests/check.hpp"

int main() { CHECK(farcall::wire_version() == 1); }
