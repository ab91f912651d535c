// The binary layout by which array libraries hand arrays to one another (DLPack, unversioned form). bind_array.h reads it.
#pragma once

#include <cstdint>

namespace gradcomp::dlpack {

enum : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };  // device types
enum : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4 };           // type codes

struct Device {
  int32_t type;
  int32_t id;
};

struct Type {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  Type dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null for a contiguous array
  uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* context;
  void (*release)(Managed* self);
};

// The fast way in, of libraries that have it (DLPack 1.3): a table of functions, found as a capsule in the array's type. The
// one used here describes an array without handing it over.
struct Exchange {
  struct {
    uint32_t major, minor;
  } version;
  void* older;
  void* allocate;
  void* hand_over;
  void* wrap;
  int (*describe)(void* object, Tensor* out);
  void* current_stream;
};

}  // namespace gradcomp::dlpack
