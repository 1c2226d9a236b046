// Names that a pickle may have and call, and their results: functions and classes, tensors, references.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "plain.hpp"

namespace farcall {

// An item on the stack of a reader of a pickle. Functions that only a reduction may use are not
// objects here: no program gets hold of them.
struct Item {
  enum class Kind : std::uint8_t { kObject, kRaw, kRebuild, kLoadReference, kRebuildReference };

  Kind kind = Kind::kObject;
  nb::object object;
  const std::uint8_t* data = nullptr;  // of kRaw: in the pickle
  std::size_t size = 0;
};

inline std::optional<std::string_view> text_of(const Item& item) {
  if (item.kind != Item::Kind::kObject || !PyUnicode_CheckExact(item.object.ptr())) return {};
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(item.object.ptr(), &size);
  if (data == nullptr) throw nb::python_error();
  return std::string_view(data, static_cast<std::size_t>(size));
}

// The result of a call. An invalid object leaves the call to Python.
struct Made {
  nb::object object;
  bool requires_grad = false;
};

// Finds the item of that name. Returns false if none that may be used here has it.
bool look_up(const Name& name, Item& item);

// The tensor of a call of kRebuildTensor.
Made make_tensor(const Context& context, const Item* arguments, std::size_t count);

// `arguments` is a tuple.
Made call(const Context& context, const Item& function, PyObject* arguments, nb::handle references);

}  // namespace farcall
