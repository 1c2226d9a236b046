// The Python module farcall._native: names for what native/core offers, and no logic.
#include <nanobind/nanobind.h>

#include "core/version.hpp"

NB_MODULE(_native, module) {
    module.doc() = "The C++ part of farcall.";
    module.def("wire_version", &farcall::wire_version,
               "The version in the header of every frame.");
}
