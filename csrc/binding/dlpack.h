// The structs of DLPack 1.x by which PyTorch describes a Python object's tensor to C. PyTorch's
// header for them is not part of its stable ABI, but DLPack's own ABI fixes these structs
// (https://dmlc.github.io/dlpack).
#pragma once

#include <cstdint>

namespace fastattn::dlpack {

constexpr int32_t kCpu = 1;
enum Code : uint8_t { kInt = 0, kFloat = 2, kBFloat = 4 };

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;

  bool is(Code kind, int size) const { return code == kind && bits == size && lanes == 1; }
};

// Borrows the sizes and strides of a tensor that lives.
struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  DataType dtype;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};

// The capsule `torch.Tensor.__dlpack_c_exchange_api__`.
constexpr const char* kExchange = "dlpack_exchange_api";
struct Exchange {
  uint32_t major, minor;
  const void* previous;
  const void *allocate, *to_managed, *from_managed;
  int (*describe)(void* object, Tensor* out);  // other than 0: a Python exception is set
  const void* stream;
};

}  // namespace fastattn::dlpack
