// The part of DLPack 1.x that is needed: how libraries hand tensors to each other in C. The layouts are
// those of dlpack.h (github.com/dmlc/dlpack, version 1.3), where they are documented.
#pragma once

#include <cstdint>

namespace farcall::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr const char* kExchangeApiName = "dlpack_exchange_api";
inline constexpr std::int32_t kCpu = 1;

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;  // ndim numbers of elements
  std::int64_t* strides;  // ndim of them, in elements
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // DLManagedTensorVersioned
  Version version;
  void* context;
  void (*deleter)(ManagedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  Version version;
  const void* previous;
  void* allocate;
  void* managed_from_object;
  // Takes over the tensor. 0, or -1 with a Python exception.
  int (*object_from_managed)(ManagedTensor*, void** object);
  // The tensor goes on owning its memory. 0, or -1 with a Python exception. May be null.
  int (*borrow_from_object)(void* object, Tensor*);
  void* current_stream;
};

}  // namespace farcall::dlpack
