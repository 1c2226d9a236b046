#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <vector>

#include "plain.hpp"

namespace farcall {

namespace {

// As in farcall/serde/tensors.py.
constexpr std::int64_t kInlineBytes = 16 << 10;
constexpr std::int64_t kHolesAllowedBytes = 8 << 10;

// Larger values are left to Python before much work was done in vain.
constexpr int kMaxDepth = 16;
constexpr int kMaxValues = 1024;
constexpr std::size_t kMaxMutable = 64;
constexpr Py_ssize_t kMaxText = 16 << 10;
constexpr std::size_t kMaxName = 200;

// The memory of a tensor that goes out of band, and the tensor with it.
class TensorMemory {
 public:
  TensorMemory(const Context& context, nb::object tensor, void* data, std::int64_t size)
      : tensor_(std::move(tensor)),
        untyped_storage_(context.untyped_storage),
        file_of_(context.file_of),
        data_(data),
        size_(size) {}

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const TensorMemory* memory = nb::inst_ptr<TensorMemory>(self);
    return PyBuffer_FillInfo(view, self, memory->data_, static_cast<Py_ssize_t>(memory->size_), 0,
                             flags);
  }

  // For transports with zero-copy: see `farcall/serde/shared.py`.
  nb::object file_and_address() const { return file_of_(call_method(tensor_.ptr(), untyped_storage_)); }

 private:
  nb::object tensor_;
  nb::object untyped_storage_;
  nb::object file_of_;
  void* data_;
  std::int64_t size_;
};

PyType_Slot tensor_memory_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(TensorMemory::get_buffer)},
    {0, nullptr},
};

class Writer {
 public:
  explicit Writer(const Context& context) : context_(context) { out_.reserve(512); }

  nb::object dump(PyObject* value) {
    put(op::kProto);
    put(kProtocol);
    if (!write(value, 0)) return nb::none();
    put(op::kStop);
    if (handles_.is_valid() && !context_.check.is_none()) {
      for (nb::handle handle : nb::borrow<nb::list>(handles_)) context_.check(handle);
    }
    nb::object body = checked(
        PyBytes_FromStringAndSize(out_.data(), static_cast<Py_ssize_t>(out_.size())));
    if (!buffers_.is_valid() && !tensors_.is_valid() && !handles_.is_valid()) return body;
    const auto or_none = [](const nb::object& list) { return list.is_valid() ? list : nb::tuple(); };
    return nb::make_tuple(body, or_none(buffers_), or_none(tensors_), or_none(handles_));
  }

 private:
  // Returns whether the value is plain.
  bool write(PyObject* value, int depth) {
    if (++values_ > kMaxValues || depth > kMaxDepth) return false;
    PyTypeObject* type = Py_TYPE(value);
    if (value == Py_None) return put(op::kNone);
    if (value == Py_True) return put(op::kTrue);
    if (value == Py_False) return put(op::kFalse);
    if (type == &PyTuple_Type) return write_tuple(value, depth);
    if (type == reinterpret_cast<PyTypeObject*>(context_.tensor_type.ptr())) return write_tensor(value);
    if (type == &PyLong_Type) return write_int(value);
    if (type == &PyUnicode_Type) return write_text(value);
    if (type == &PyFloat_Type) return write_float(PyFloat_AS_DOUBLE(value));
    if (type == &PyDict_Type) return write_dict(value, depth);
    if (type == &PyList_Type) return write_list(value, depth);
    if (type == &PyBytes_Type) return write_bytes(value);
    if (type == &PyFunction_Type || type == &PyType_Type) return write_name(value);
    if (context_.handle_type.ptr() == reinterpret_cast<PyObject*>(type)) return write_handle(value);
    if (std::string_view(type->tp_name) == kReferenceType.qualname) return write_reference(value);
    return false;
  }

  bool write_tuple(PyObject* tuple, int depth) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
    if (size == 0) return put(op::kTuple0);
    if (size > 3) put(op::kMark);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!write(PyTuple_GET_ITEM(tuple, i), depth + 1)) return false;
    }
    return end_tuple(size);
  }

  bool end_tuple(Py_ssize_t size) {
    constexpr std::uint8_t ends[] = {op::kTuple0, op::kTuple1, op::kTuple2, op::kTuple3};
    return put(size > 3 ? op::kTuple : ends[size]);
  }

  // Asking a tensor may run Python (a torch function mode), which may change lists and dicts.
  bool write_list(PyObject* list, int depth) {
    if (!is_new(list)) return false;
    put(op::kList);
    if (PyList_GET_SIZE(list) == 0) return true;
    put(op::kMark);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      const nb::object item = nb::borrow(PyList_GET_ITEM(list, i));
      if (!write(item.ptr(), depth + 1)) return false;
    }
    return put(op::kAppends);
  }

  bool write_dict(PyObject* dict, int depth) {
    if (!is_new(dict)) return false;
    put(op::kDict);
    if (PyDict_GET_SIZE(dict) == 0) return true;
    put(op::kMark);
    Py_ssize_t position = 0;
    for (PyObject *key, *value; PyDict_Next(dict, &position, &key, &value);) {
      const nb::object kept_key = nb::borrow(key);
      const nb::object kept_value = nb::borrow(value);
      if (!write(key, depth + 1) || !write(value, depth + 1)) return false;
    }
    return put(op::kSetItems);
  }

  // An object that can be changed must arrive as one if it is met twice; Python's pickler sees to that.
  bool is_new(PyObject* object) {
    for (const PyObject* known : seen_) {
      if (known == object) return false;
    }
    if (seen_.size() == kMaxMutable) return false;
    seen_.push_back(object);
    return true;
  }

  bool write_int(PyObject* value) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0 && write_int(number);
  }

  bool write_int(std::int64_t number) {
    if (number >= 0 && number < 256) {
      put(op::kInt1);
      return put(static_cast<std::uint8_t>(number));
    }
    if (number >= 0 && number < 65536) {
      put(op::kInt2);
      return put_little(static_cast<std::uint64_t>(number), 2);
    }
    if (number >= INT32_MIN && number <= INT32_MAX) {
      put(op::kInt4);
      return put_little(static_cast<std::uint64_t>(number), 4);
    }
    put(op::kLong1);
    put(8);
    return put_little(static_cast<std::uint64_t>(number), 8);
  }

  bool write_float(double value) {
    put(op::kFloat);
    const auto bits = std::bit_cast<std::uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) put(static_cast<std::uint8_t>(bits >> shift));
    return true;
  }

  bool write_text(PyObject* text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) throw nb::python_error();  // half of a surrogate pair
    if (size > kMaxText) return false;
    return write_text(std::string_view(data, static_cast<std::size_t>(size)));
  }

  bool write_text(std::string_view text) {
    put_sized(op::kUnicode1, op::kUnicode4, text.size());
    return put(text.data(), text.size());
  }

  bool write_bytes(PyObject* bytes) {
    const Py_ssize_t size = PyBytes_GET_SIZE(bytes);
    if (size > kMaxText) return false;
    put_sized(op::kBytes1, op::kBytes4, static_cast<std::size_t>(size));
    return put(PyBytes_AS_STRING(bytes), static_cast<std::size_t>(size));
  }

  bool write_tensor(PyObject* tensor) {
    if (!is_new(tensor) || has_attributes(tensor)) return false;
    dlpack::Tensor seen;
    if (context_.api->borrow_from_object(tensor, &seen) != 0) throw nb::python_error();
    const DType* dtype = seen.device.type == dlpack::kCpu ? dtype_of(seen.dtype) : nullptr;
    if (dtype == nullptr || seen.ndim > kMaxDimensions || seen.strides == nullptr) return false;
    Extent extent;
    if (!extent.measure(seen.shape, seen.strides, seen.ndim, dtype->size())) return false;
    const std::int64_t length = extent.elements * dtype->size();
    if (extent.bytes < length) return false;  // expanded, or overlapping otherwise
    if (extent.bytes > std::max(2 * length, kHolesAllowedBytes)) return false;
    auto* data = static_cast<std::uint8_t*>(seen.data) + seen.byte_offset;
    if (!owns(tensor, data, extent.bytes)) return false;
    if (call_method(tensor, context_.is_neg).ptr() != Py_False) return false;
    const nb::object wants = checked(PyObject_GetAttr(tensor, context_.requires_grad.ptr()));
    const bool requires_grad = wants.ptr() == Py_True;

    write_rebuild();
    if (requires_grad || seen.ndim != 1 || seen.strides[0] != 1) {
      put(op::kMark);
      write_data(tensor, data, extent.bytes);
      write_text(dtype->name);
      write_ints(seen.shape, seen.ndim);
      write_ints(seen.strides, seen.ndim);
      if (requires_grad) put(op::kTrue);
      put(op::kTuple);
    } else {
      write_data(tensor, data, extent.bytes);
      write_text(dtype->name);
      put(op::kTuple2);
    }
    if (requires_grad) append(tensors_, nb::borrow(tensor));
    return put(op::kReduce);
  }

  // Python's picklers carry the attributes.
  static bool has_attributes(PyObject* tensor) {
    PyObject** const dict = _PyObject_GetDictPtr(tensor);
    return dict != nullptr && *dict != nullptr && PyDict_GET_SIZE(*dict) != 0;
  }

  // Whether the storage is as large as the tensor says, since FSDP and others free it behind the
  // tensor's back; and no other tensor of the message has it, since Python's picklers send a shared
  // storage once.
  bool owns(PyObject* tensor, const std::uint8_t* data, std::int64_t size) {
    const nb::object storage = call_method(tensor, context_.untyped_storage);
    const Py_ssize_t bytes = PyObject_Size(storage.ptr());
    if (bytes < 0) throw nb::python_error();
    const auto start = nb::cast<std::uintptr_t>(call_method(storage.ptr(), context_.data_ptr));
    const auto first = reinterpret_cast<std::uintptr_t>(data);
    // At most `kMaxMutable`, since each tensor is in `seen_`.
    const auto end = storages_.begin() + storage_count_;
    if (std::find(storages_.begin(), end, start) != end) return false;
    storages_[static_cast<std::size_t>(storage_count_++)] = start;
    return start != 0 && first >= start &&
           first - start + static_cast<std::uint64_t>(size) <= static_cast<std::uint64_t>(bytes);
  }

  void write_rebuild() {
    if (names_rebuild_) {
      put(op::kGet1);
      put(0);
      return;
    }
    names_rebuild_ = true;
    write(kRebuildTensor);
    put(op::kMemoize);
  }

  // A function or a class, if its name leads back to it on any worker with the same code.
  bool write_name(PyObject* named) {
    const nb::object module = checked(PyObject_GetAttr(named, context_.module.ptr()));
    const nb::object qualname = checked(PyObject_GetAttr(named, context_.qualname.ptr()));
    const Name name{text_of(module), text_of(qualname)};
    if (name.module.empty() || is_main(name.module) || name.module.size() > kMaxName ||
        name.qualname.size() > kMaxName || find(name).ptr() != named) {
      return false;
    }
    return write(name);
  }

  bool write(const Name& name) {
    write_text(name.module);
    write_text(name.qualname);
    return put(op::kGlobal);
  }

  // The object that users have of a reference; it reduces to its handle.
  bool write_reference(PyObject* reference) {
    const nb::object module = checked(
        PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(reference)), context_.module.ptr()));
    if (text_of(module) != kReferenceType.module || !is_new(reference)) return false;
    const nb::object reduced = call_method(reference, context_.reduce);
    const nb::object handle = nb::borrow(nb::handle(reduced)[1][0]);
    if (context_.handle_type.ptr() != reinterpret_cast<PyObject*>(Py_TYPE(handle.ptr()))) {
      return false;
    }
    write(kRebuildReference);
    if (!write_handle(handle.ptr())) return false;
    put(op::kTuple1);
    return put(op::kReduce);
  }

  bool write_handle(PyObject* handle) {
    if (!is_new(handle)) return false;
    write(kLoadReference);
    write_int(static_cast<std::int64_t>(handles_.is_valid() ? PyList_GET_SIZE(handles_.ptr()) : 0));
    append(handles_, nb::borrow(handle));
    put(op::kTuple1);
    return put(op::kReduce);
  }

  static std::string_view text_of(const nb::object& text) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (data == nullptr) throw nb::python_error();
    return {data, static_cast<std::size_t>(size)};
  }

  void write_data(PyObject* tensor, std::uint8_t* data, std::int64_t size) {
    if (size >= kInlineBytes) {
      put(op::kNextBuffer);
      const nb::object memory = nb::cast(TensorMemory(context_, nb::borrow(tensor), data, size));
      append(buffers_, checked(PyMemoryView_FromObject(memory.ptr())));
      return;
    }
    put(op::kByteArray);
    put_little(static_cast<std::uint64_t>(size), 8);
    put(reinterpret_cast<const char*>(data), static_cast<std::size_t>(size));
  }

  void write_ints(const std::int64_t* numbers, int count) {
    if (count > 3) put(op::kMark);
    for (int i = 0; i < count; ++i) write_int(numbers[i]);
    end_tuple(count);
  }

  static void append(nb::object& list, const nb::object& item) {
    if (!list.is_valid()) list = nb::list();
    if (PyList_Append(list.ptr(), item.ptr()) != 0) throw nb::python_error();
  }

  bool put(std::uint8_t byte) {
    out_.push_back(static_cast<char>(byte));
    return true;
  }
  bool put(const char* data, std::size_t size) {
    out_.append(data, size);
    return true;
  }
  bool put_little(std::uint64_t number, int bytes) {
    for (int i = 0; i < bytes; ++i) put(static_cast<std::uint8_t>(number >> (8 * i)));
    return true;
  }
  void put_sized(std::uint8_t small, std::uint8_t large, std::size_t size) {
    put(size < 256 ? small : large);
    put_little(size, size < 256 ? 1 : 4);
  }

  const Context& context_;
  std::string out_;
  nb::object buffers_, tensors_, handles_;  // lists, if there are any
  std::vector<const PyObject*> seen_;
  std::array<std::uintptr_t, kMaxMutable> storages_;  // where each one begins
  int storage_count_ = 0;
  int values_ = 0;
  bool names_rebuild_ = false;
};

}  // namespace

nb::object dump_plain(const Context& context, nb::handle value) {
  try {
    return Writer(context).dump(value.ptr());
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return nb::none();  // Python knows better what to say of it, or how to send it
  }
}

void bind_tensor_memory(nb::module_& module) {
  nb::class_<TensorMemory>(module, "TensorMemory", nb::type_slots(tensor_memory_slots))
      .def("file_and_address", &TensorMemory::file_and_address);
}

}  // namespace farcall
