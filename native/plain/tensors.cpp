#include "tensors.hpp"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace farcall {

namespace {

constexpr std::size_t kAlignment = 64;

constexpr std::size_t rounded(std::size_t size) {
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}

// A tensor as DLPack describes it: description, shape and strides, and the owner of its memory.
struct TensorBlock {
  dlpack::ManagedTensor managed;
  Py_buffer view;
  std::int64_t dimensions[2 * kMaxDimensions];

  static void free(dlpack::ManagedTensor* managed) { std::free(managed); }

  static void release(dlpack::ManagedTensor* managed) {
    TensorBlock* block = reinterpret_cast<TensorBlock*>(managed);
    if (Py_IsInitialized()) {
      const PyGILState_STATE state = PyGILState_Ensure();
      PyBuffer_Release(&block->view);
      PyGILState_Release(state);
    }
    std::free(block);
  }
};
static_assert(offsetof(TensorBlock, managed) == 0);

struct Free {
  void operator()(TensorBlock* block) const { std::free(block); }
};
using BlockPtr = std::unique_ptr<TensorBlock, Free>;

// With room for `extra` aligned bytes behind it.
BlockPtr make_block(std::size_t extra) {
  void* memory = std::aligned_alloc(kAlignment, rounded(sizeof(TensorBlock)) + rounded(extra));
  if (memory == nullptr) throw std::bad_alloc();
  return BlockPtr(new (memory) TensorBlock);
}

// Gives shape and extent of a tensor in `size` bytes. Returns false if it does not fit there.
bool fit(const Shape* given, std::size_t size, const DType& dtype, Shape& flat, const Shape*& shape,
         Extent& extent) {
  shape = given;
  if (given == nullptr) {
    if (size % static_cast<std::size_t>(dtype.size()) != 0) return false;
    flat.ndim = 1;
    flat.dimensions[0] = static_cast<std::int64_t>(size) / dtype.size();
    flat.dimensions[1] = 1;
    shape = &flat;
  }
  return extent.measure(shape->dimensions, shape->strides(), shape->ndim, dtype.size()) &&
         static_cast<std::uint64_t>(extent.bytes) <= size;
}

// The tensor has the block from now on.
nb::object finish(const Context& context, BlockPtr block, void* data, const Shape& shape,
                  const DType& dtype, void (*deleter)(dlpack::ManagedTensor*)) {
  std::memcpy(block->dimensions, shape.dimensions,
              2 * static_cast<std::size_t>(shape.ndim) * sizeof(std::int64_t));
  block->managed = {
      {dlpack::kMajorVersion, 0},
      nullptr,
      deleter,
      0,
      {data,
       {dlpack::kCpu, 0},
       shape.ndim,
       {dtype.code, dtype.bits, 1},
       block->dimensions,
       block->dimensions + shape.ndim,
       0},
  };
  void* made = nullptr;
  if (context.api->object_from_managed(&block.release()->managed, &made) != 0) {
    throw nb::python_error();
  }
  return nb::steal(static_cast<PyObject*>(made));
}

}  // namespace

nb::object copy_tensor(const Context& context, const std::uint8_t* data, std::size_t size,
                       const Shape* given, const DType& dtype) {
  Shape flat;
  const Shape* shape;
  Extent extent;
  if (!fit(given, size, dtype, flat, shape, extent)) return {};
  const auto length = static_cast<std::size_t>(extent.bytes);
  BlockPtr block = make_block(length);
  void* copy = reinterpret_cast<std::uint8_t*>(block.get()) + rounded(sizeof(TensorBlock));
  std::memcpy(copy, data, length);
  return finish(context, std::move(block), copy, *shape, dtype, TensorBlock::free);
}

nb::object view_tensor(const Context& context, const nb::object& buffer, const Shape* given,
                       const DType& dtype) {
  BlockPtr block = make_block(0);
  if (PyObject_GetBuffer(buffer.ptr(), &block->view, PyBUF_WRITABLE) != 0) throw nb::python_error();
  Shape flat;
  const Shape* shape;
  Extent extent;
  if (!fit(given, static_cast<std::size_t>(block->view.len), dtype, flat, shape, extent)) {
    PyBuffer_Release(&block->view);
    return {};
  }
  void* data = block->view.buf;
  return finish(context, std::move(block), data, *shape, dtype, TensorBlock::release);
}

}  // namespace farcall
