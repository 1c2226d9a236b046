#include "reductions.hpp"

#include <vector>

#include "tensors.hpp"

namespace farcall {

namespace {

using Kind = Item::Kind;

bool read_shape(const Item& sizes, const Item& strides, Shape& shape) {
  if (sizes.kind != Kind::kObject || !PyTuple_CheckExact(sizes.object.ptr()) ||
      strides.kind != Kind::kObject || !PyTuple_CheckExact(strides.object.ptr())) {
    return false;
  }
  const Py_ssize_t ndim = PyTuple_GET_SIZE(sizes.object.ptr());
  if (ndim > kMaxDimensions || PyTuple_GET_SIZE(strides.object.ptr()) != ndim) return false;
  shape.ndim = static_cast<int>(ndim);
  for (Py_ssize_t i = 0; i < 2 * ndim; ++i) {
    PyObject* number = i < ndim ? PyTuple_GET_ITEM(sizes.object.ptr(), i)
                                : PyTuple_GET_ITEM(strides.object.ptr(), i - ndim);
    int overflow = 0;
    if (!PyLong_CheckExact(number)) return false;
    shape.dimensions[i] = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) return false;
  }
  return true;
}

}  // namespace

bool look_up(const Name& name, Item& item) {
  if (name == kRebuildTensor) {
    item.kind = Kind::kRebuild;
  } else if (name == kLoadReference) {
    item.kind = Kind::kLoadReference;
  } else if (name == kRebuildReference) {
    item.kind = Kind::kRebuildReference;
  } else if (!is_main(name.module)) {
    item.object = find(name);
    return item.object.is_valid();
  } else {
    return false;
  }
  return true;
}

Made make_tensor(const Context& context, const Item* arguments, std::size_t count) {
  if (count != 2 && count != 4 && count != 5) return {};
  const std::optional<std::string_view> name = text_of(arguments[1]);
  const DType* dtype = name ? dtype_of(*name) : nullptr;
  if (dtype == nullptr) return {};
  Made made;
  if (count == 5) {
    PyObject* flag = arguments[4].object.ptr();
    if (arguments[4].kind != Kind::kObject || !PyBool_Check(flag)) return {};
    made.requires_grad = flag == Py_True;
  }
  Shape shape;
  const bool has_shape = count > 2;
  if (has_shape && !read_shape(arguments[2], arguments[3], shape)) return {};
  const Shape* given = has_shape ? &shape : nullptr;
  const Item& data = arguments[0];
  if (data.kind == Kind::kRaw) {
    made.object = copy_tensor(context, data.data, data.size, given, *dtype);
  } else if (data.kind == Kind::kObject) {
    made.object = view_tensor(context, data.object, given, *dtype);
  }
  return made;
}

Made call(const Context& context, const Item& function, PyObject* arguments, nb::handle references) {
  const Py_ssize_t size = PyTuple_GET_SIZE(arguments);
  switch (function.kind) {
    case Kind::kRebuild: {
      std::vector<Item> items;
      for (Py_ssize_t i = 0; i < size; ++i) {
        items.push_back({Kind::kObject, nb::borrow(PyTuple_GET_ITEM(arguments, i))});
      }
      return make_tensor(context, items.data(), items.size());
    }
    case Kind::kLoadReference: {
      if (size != 1 || !PyLong_CheckExact(PyTuple_GET_ITEM(arguments, 0))) return {};
      const Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(arguments, 0));
      if (index < 0) return {};
      return {checked(PySequence_GetItem(references.ptr(), index))};
    }
    case Kind::kRebuildReference: {
      if (size != 1) return {};
      PyObject* handle = PyTuple_GET_ITEM(arguments, 0);
      if (context.handle_type.ptr() != reinterpret_cast<PyObject*>(Py_TYPE(handle))) return {};
      const nb::object rebuild_reference = find(kRebuildReference);
      if (!rebuild_reference.is_valid()) return {};
      return {checked(PyObject_CallOneArg(rebuild_reference.ptr(), handle))};
    }
    default:
      return {};
  }
}

}  // namespace farcall
