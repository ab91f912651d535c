// The host's half of the stand-in: copies, errors, and the limits that a launch must keep.

#include <mutex>
#include <unordered_map>

#include "cuda_runtime.h"

namespace {

// The limits of every device since 2017; kMostShared is the H100's.
constexpr uint64_t kMostThreads = 1024, kMostThreadsZ = 64;
constexpr uint64_t kMostBlocksX = 0x7fffffff, kMostBlocksYZ = 65535;
constexpr size_t kShared = 48 * 1024, kMostShared = 227 * 1024;

cudaError_t last_error = cudaSuccess;
std::unordered_map<const void*, size_t> allowed_shared;

bool within(const dim3& size, uint64_t x, uint64_t y, uint64_t z) {
  return size.x >= 1 && size.y >= 1 && size.z >= 1 && size.x <= x && size.y <= y && size.z <= z;
}

}  // namespace

namespace simt {

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMostShared) return last_error = cudaErrorInvalidValue;
  allowed_shared[kernel] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

bool accept(const Shape& shape) {
  const auto known = allowed_shared.find(shape.kernel);
  const size_t most_shared = known == allowed_shared.end() || known->second < kShared ? kShared : known->second;
  if (!within(shape.grid, kMostBlocksX, kMostBlocksYZ, kMostBlocksYZ) ||
      !within(shape.block, kMostThreads, kMostThreads, kMostThreadsZ) ||
      uint64_t{shape.block.x} * shape.block.y * shape.block.z > kMostThreads) {
    last_error = cudaErrorInvalidConfiguration;
  } else if (shape.shared > most_shared) {
    last_error = cudaErrorInvalidValue;
  } else {
    return true;
  }
  return false;
}

}  // namespace simt

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
  }
  return "unrecognized error code";
}

cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  memset(to, byte, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
