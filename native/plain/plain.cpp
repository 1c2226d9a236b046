#include "plain.hpp"

#include <nanobind/stl/string.h>

#include <array>

namespace farcall {

namespace {

constexpr std::array<DType, 13> kTypes{{
    {"float32", dlpack::kFloat, 32},
    {"float64", dlpack::kFloat, 64},
    {"int64", dlpack::kInt, 64},
    {"float16", dlpack::kFloat, 16},
    {"bfloat16", dlpack::kBfloat, 16},
    {"int32", dlpack::kInt, 32},
    {"int16", dlpack::kInt, 16},
    {"int8", dlpack::kInt, 8},
    {"uint8", dlpack::kUInt, 8},
    {"bool", dlpack::kBool, 8},
    {"uint16", dlpack::kUInt, 16},
    {"uint32", dlpack::kUInt, 32},
    {"uint64", dlpack::kUInt, 64},
}};

// The accelerator as Python sees it.
class Plain {
 public:
  Plain(nb::object tensor_type, nb::capsule api, nb::object handle_type, nb::object check,
        nb::object file_of)
      : context_(std::move(tensor_type), table_of(api), std::move(handle_type), std::move(check),
                 std::move(file_of)) {}

  nb::object dump(nb::handle value) const { return dump_plain(context_, value); }
  nb::object load(nb::handle body, nb::handle buffers, nb::handle references, nb::handle attach) const {
    return load_plain(context_, body, buffers, references, attach);
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<Plain>(self)->context_.check.ptr());
    return 0;
  }

  static int clear(PyObject* self) {
    nb::inst_ptr<Plain>(self)->context_.check = nb::none();
    return 0;
  }

 private:
  static const dlpack::ExchangeApi* table_of(const nb::capsule& capsule) {
    if (capsule.name() == nullptr || std::string_view(capsule.name()) != dlpack::kExchangeApiName) {
      throw nb::value_error("this capsule is no dlpack_exchange_api");
    }
    const auto* api = static_cast<const dlpack::ExchangeApi*>(capsule.data());
    if (api->version.major != dlpack::kMajorVersion || api->borrow_from_object == nullptr) {
      throw nb::value_error("this version of DLPack's exchange API is not known here");
    }
    return api;
  }

  Context context_;
};

// It refers to an agent's references by `check`, and those to their serializer.
PyType_Slot plain_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(Plain::traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(Plain::clear)},
    {0, nullptr},
};

}  // namespace

Context::Context(nb::object tensor_type, const dlpack::ExchangeApi* api, nb::object handle_type,
                 nb::object check, nb::object file_of)
    : tensor_type(std::move(tensor_type)),
      api(api),
      handle_type(std::move(handle_type)),
      check(std::move(check)),
      file_of(std::move(file_of)) {
  const auto interned = [](const char* name) { return checked(PyUnicode_InternFromString(name)); };
  requires_grad = interned("requires_grad");
  set_requires_grad = interned("requires_grad_");
  is_neg = interned("is_neg");
  untyped_storage = interned("untyped_storage");
  data_ptr = interned("data_ptr");
  module = interned("__module__");
  qualname = interned("__qualname__");
  reduce = interned("__reduce__");
}

nb::object find(const Name& name) {
  const auto text = [](std::string_view part) {
    return checked(PyUnicode_FromStringAndSize(part.data(), static_cast<Py_ssize_t>(part.size())));
  };
  nb::object found = nb::steal(PyImport_GetModule(text(name.module).ptr()));
  std::string_view path = name.qualname;
  while (found.is_valid()) {
    const std::size_t dot = path.find('.');
    found = nb::steal(PyObject_GetAttr(found.ptr(), text(path.substr(0, dot)).ptr()));
    if (dot == path.npos) break;
    path.remove_prefix(dot + 1);
  }
  if (!found.is_valid() && PyErr_Occurred()) throw nb::python_error();
  return found;
}

const DType* dtype_of(const dlpack::DataType& type) {
  if (type.lanes != 1) return nullptr;
  for (const DType& known : kTypes) {
    if (known.code == type.code && known.bits == type.bits) return &known;
  }
  return nullptr;
}

const DType* dtype_of(std::string_view name) {
  for (const DType& known : kTypes) {
    if (known.name == name) return &known;
  }
  return nullptr;
}

bool Extent::measure(const std::int64_t* shape, const std::int64_t* strides, int ndim,
                     std::int64_t item_size) {
  std::int64_t last = 0;
  for (int i = 0; i < ndim; ++i) {
    std::int64_t span;
    if (shape[i] < 0 || strides[i] < 0 || __builtin_mul_overflow(elements, shape[i], &elements) ||
        __builtin_mul_overflow(shape[i] - 1, strides[i], &span) ||
        __builtin_add_overflow(last, span, &last)) {
      return false;
    }
  }
  if (elements == 0) return false;
  return !__builtin_add_overflow(last, 1, &last) && !__builtin_mul_overflow(last, item_size, &bytes);
}

void bind_plain(nb::module_& module) {
  bind_tensor_memory(module);
  nb::class_<Plain>(module, "Plain", nb::type_slots(plain_slots))
      .def(nb::init<nb::object, nb::capsule, nb::object, nb::object, nb::object>(),
           nb::arg("tensor_type"), nb::arg("api"), nb::arg("handle_type").none(),
           nb::arg("check").none(), nb::arg("file_of"))
      .def("dump", &Plain::dump, nb::arg("value").none())
      .def("load", &Plain::load, nb::arg("body"), nb::arg("buffers"), nb::arg("references"),
           nb::arg("attach").none());
}

}  // namespace farcall
