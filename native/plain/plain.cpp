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
  Plain(nb::object tensor_type, nb::capsule api) {
    if (api.name() == nullptr || std::string_view(api.name()) != dlpack::kExchangeApiName) {
      throw nb::value_error("this capsule is no dlpack_exchange_api");
    }
    kind_.api = static_cast<const dlpack::ExchangeApi*>(api.data());
    if (kind_.api->version.major != dlpack::kMajorVersion ||
        kind_.api->borrow_from_object == nullptr) {
      throw nb::value_error("this version of DLPack's exchange API is not known here");
    }
    kind_.type = std::move(tensor_type);
    const auto interned = [](const char* name) {
      return checked(PyUnicode_InternFromString(name));
    };
    kind_.requires_grad = interned("requires_grad");
    kind_.set_requires_grad = interned("requires_grad_");
    kind_.is_neg = interned("is_neg");
    kind_.untyped_storage = interned("untyped_storage");
    kind_.data_ptr = interned("data_ptr");
  }

  nb::object dump(nb::handle value) const { return dump_plain(kind_, value); }
  nb::object load(nb::handle body, nb::handle buffers, nb::handle attach) const {
    return load_plain(kind_, body, buffers, attach);
  }

 private:
  TensorKind kind_;
};

}  // namespace

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
    if (shape[i] < 0 || strides[i] < 0 ||
        __builtin_mul_overflow(elements, shape[i], &elements) ||
        __builtin_mul_overflow(shape[i] - 1, strides[i], &span) ||
        __builtin_add_overflow(last, span, &last)) {
      return false;
    }
  }
  if (elements == 0) return false;
  return !__builtin_add_overflow(last, 1, &last) &&
         !__builtin_mul_overflow(last, item_size, &bytes);
}

void bind_plain(nb::module_& module) {
  bind_tensor_memory(module);
  nb::class_<Plain>(module, "Plain")
      .def(nb::init<nb::object, nb::capsule>(), nb::arg("tensor_type"), nb::arg("api"))
      .def("dump", &Plain::dump, nb::arg("value").none())
      .def("load", &Plain::load, nb::arg("body"), nb::arg("buffers"), nb::arg("attach").none());
}

}  // namespace farcall
