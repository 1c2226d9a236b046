// Tensors over received memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plain.hpp"

namespace farcall {

struct Shape {
  int ndim = 0;
  std::int64_t dimensions[2 * kMaxDimensions];  // shape, then strides

  const std::int64_t* strides() const { return dimensions + ndim; }
};

// An invalid object: the tensor asked for does not fit into the memory, or is empty. Without a shape
// the tensor has one dimension.

// A tensor over a copy of these bytes.
nb::object copy_tensor(const Context& context, const std::uint8_t* data, std::size_t size,
                       const Shape* shape, const DType& dtype);
// A tensor over this writable buffer, which is let go when the last tensor over it is gone.
nb::object view_tensor(const Context& context, const nb::object& buffer, const Shape* shape,
                       const DType& dtype);

}  // namespace farcall
