// The host's half of the stand-in: errors, and the limits that a launch must keep.

#include "cuda_runtime.h"

namespace {

// The limits of every device since 2017, for kernels that have not asked for more shared memory.
constexpr unsigned kMostBlocks = 0x7fffffff, kMostThreads = 1024;
constexpr size_t kMostShared = 48 * 1024;

cudaError_t last_error = cudaSuccess;

}  // namespace

namespace simt {

bool accept(const Shape& shape) {
  if (shape.blocks < 1 || shape.blocks > kMostBlocks || shape.threads < 1 || shape.threads > kMostThreads) {
    last_error = cudaErrorInvalidConfiguration;
  } else if (shape.shared > kMostShared) {
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
