// Kernels that are wrong: threads that wait in vain, and accesses beyond an array.

#include <cuda_runtime.h>

#include "cuda/warp.cuh"
#include "launches.h"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace selftest {
namespace {

__global__ void divergent_barrier(uint32_t* out) {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads_or(1);
  }
  out[threadIdx.x] = 1;
}

__global__ void barrier_against_shuffle(uint32_t* out) {
  if (threadIdx.x == 7) return;
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    out[threadIdx.x] = __shfl_sync(threadIdx.x == 64 ? kWholeWarp : 0xfffffffeu, threadIdx.x, 1);
  }
}

__global__ void missing_lane(uint32_t* out) {
  if (threadIdx.x == 9) return;
  out[threadIdx.x] = __shfl_xor_sync(kWholeWarp, threadIdx.x, 1);
}

__global__ void unnamed_lane(uint32_t* out) { out[threadIdx.x] = __shfl_sync(0x0000ffffu, threadIdx.x, 0); }

__global__ void overrun_global(uint32_t* out, int by) { out[threadIdx.x + by] = 1; }

__global__ void overrun_static(uint32_t* out, int by) {
  __shared__ uint32_t fixed[32];
  fixed[threadIdx.x + by] = 1;
  __syncthreads();
  out[threadIdx.x] = fixed[threadIdx.x];
}

__global__ void overrun_dynamic(uint32_t* out, int by) {
  DYNAMIC_SHARED(uint32_t, dynamic);
  dynamic[threadIdx.x + by] = 1;
  __syncthreads();
  out[threadIdx.x] = dynamic[threadIdx.x];
}

// Overruns the stack after a barrier, when it has been left and entered again.
__global__ void overrun_stack(uint32_t* out, int by) {
  volatile uint32_t local[8] = {};
  __syncthreads();
  local[threadIdx.x % 8 + by] = 1;
  out[threadIdx.x] = local[0];
}

}  // namespace

void define_wrong(py::module_& m) {
  DEFINE(divergent_barrier, (U32 out), 1, 64, 0, queue, out.mutable_data());
  DEFINE(barrier_against_shuffle, (U32 out), 1, 96, 0, queue, out.mutable_data());
  DEFINE(missing_lane, (U32 out), 2, 64, 0, queue, out.mutable_data());
  DEFINE(unnamed_lane, (U32 out), 1, 32, 0, queue, out.mutable_data());
  DEFINE(overrun_global, (U32 out, int by), 1, 32, 0, queue, out.mutable_data(), by);
  DEFINE(overrun_static, (U32 out, int by), 1, 32, 0, queue, out.mutable_data(), by);
  DEFINE(overrun_dynamic, (U32 out, int by), 1, 32, 32 * sizeof(uint32_t), queue, out.mutable_data(), by);
  DEFINE(overrun_stack, (U32 out, int by), 1, 32, 0, queue, out.mutable_data(), by);
}

}  // namespace selftest
