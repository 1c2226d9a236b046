// Plain values as pickle, and back, with next to no Python code run: None, bools, ints of 64 bits,
// floats, strings, bytes, tuples, lists, dicts, dense tensors on the CPU, remote references, and
// functions and classes that are found by name.
//
// This is for speed only. The bytes are those that `farcall/serde` writes for the same value, but for
// memos: any unpickler takes them. A value that is not plain, or unusual (a list that is met twice,
// an empty tensor), is left to Python: then `dump` gives None and `load` NotImplemented, and nothing
// has happened. Tensors are seen through DLPack, so nothing here depends on a version of torch.
//
// Bytes that are loaded may come from a hostile peer. Whatever they say, all that comes of it are
// plain values; functions and classes only where any pickle may be loaded.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>

#include "dlpack.hpp"

namespace farcall {

namespace nb = nanobind;

// How a pickle names a function or a class.
struct Name {
  std::string_view module;
  std::string_view qualname;

  bool operator==(const Name&) const = default;
};

// `rebuild_tensor(data, dtype, shape, stride, requires_grad)` makes a tensor; without a shape it has
// one dimension.
inline constexpr Name kRebuildTensor{"farcall.serde.tensors", "rebuild_tensor"};
// `load_reference(index)` is one of the references beside the pickle, and what users have of it is
// made by `rebuild_reference` of that.
inline constexpr Name kLoadReference{"farcall.serde.loading", "load_reference"};
inline constexpr Name kRebuildReference{"farcall.rref", "rebuild_reference"};
inline constexpr Name kReferenceType{"farcall.rref", "RRef"};

inline constexpr int kMaxDimensions = 32;

// Pickle's protocol and opcodes, as far as they are used.
inline constexpr std::uint8_t kProtocol = 5;
namespace op {
inline constexpr std::uint8_t kProto = 0x80, kFrame = 0x95, kStop = '.';
inline constexpr std::uint8_t kNone = 'N', kTrue = 0x88, kFalse = 0x89;
inline constexpr std::uint8_t kInt1 = 'K', kInt2 = 'M', kInt4 = 'J', kLong1 = 0x8a, kFloat = 'G';
inline constexpr std::uint8_t kUnicode1 = 0x8c, kUnicode4 = 'X', kBytes1 = 'C', kBytes4 = 'B';
inline constexpr std::uint8_t kMark = '(', kTuple = 't', kTuple0 = ')', kTuple1 = 0x85, kTuple2 = 0x86,
                              kTuple3 = 0x87;
inline constexpr std::uint8_t kList = ']', kAppend = 'a', kAppends = 'e';
inline constexpr std::uint8_t kDict = '}', kSetItem = 's', kSetItems = 'u';
inline constexpr std::uint8_t kMemoize = 0x94, kGet1 = 'h', kGet4 = 'j';
inline constexpr std::uint8_t kGlobal = 0x93, kReduce = 'R';
inline constexpr std::uint8_t kByteArray = 0x96, kNextBuffer = 0x97;
}  // namespace op

// A dtype that is written and read here: its name in torch, and in DLPack.
struct DType {
  std::string_view name;
  std::uint8_t code;
  std::uint8_t bits;

  std::int64_t size() const { return bits / 8; }
};

const DType* dtype_of(const dlpack::DataType& type);  // null: none of these
const DType* dtype_of(std::string_view name);

// Elements, and bytes from the first element's to the last one's end. False if that is no tensor,
// or a larger one than memory can be.
struct Extent {
  std::int64_t elements = 1;
  std::int64_t bytes = 0;

  bool measure(const std::int64_t* shape, const std::int64_t* strides, int ndim,
               std::int64_t item_size);
};

// The types and modules that it depends on; constant.
struct Context {
  nb::object tensor_type;
  const dlpack::ExchangeApi* api;
  nb::object handle_type;  // of what stays out of the pickle as a reference, or None
  nb::object check;        // called with each of those
  nb::object file_of;      // gives the file that a storage lies in, if any

  // Interned.
  nb::object requires_grad, set_requires_grad, is_neg, untyped_storage, data_ptr;
  nb::object module, qualname, reduce;

  Context(nb::object tensor_type, const dlpack::ExchangeApi* api, nb::object handle_type,
          nb::object check, nb::object file_of);
};

inline nb::object checked(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

inline nb::object call_method(PyObject* object, const nb::object& name) {
  return checked(PyObject_CallMethodNoArgs(object, name.ptr()));
}

// Names of the program's main module, which differ from worker to worker.
inline bool is_main(std::string_view module) { return module == "__main__" || module == "__mp_main__"; }

// The object with that name in the modules that are loaded, or an invalid object.
nb::object find(const Name& name);

// (pickle, buffers, tensors that require grad, references), only the pickle if there are none, or
// None.
nb::object dump_plain(const Context& context, nb::handle value);

// The value, or NotImplemented. `attach` is called with each tensor that shall require grad.
nb::object load_plain(const Context& context, nb::handle body, nb::handle buffers,
                      nb::handle references, nb::handle attach);

void bind_tensor_memory(nb::module_& module);
void bind_plain(nb::module_& module);

}  // namespace farcall
