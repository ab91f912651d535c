// How kernels start, and how threads touch memory: four entries at a time where the pointer allows it, else one by one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../check.h"
#include "../span.h"

// LAUNCH(kernel, blocks, threads, bytes of dynamic shared memory, queue, the kernel's arguments...);
// DYNAMIC_SHARED(type, name); inside a kernel: `name` points to the dynamic shared memory.
// The only ways to launch and to take dynamic shared memory: tests/simt replaces both, and nothing else in these files differs
// between a GPU and the emulator, but that UNROLLED, before a loop whose arrays belong in registers, means nothing there.
#ifdef GRADCOMP_SIMT
#define UNROLLED
#define LAUNCH_ON(kernel, blocks, threads, shared, stream, ...) \
  ::simt::launch(#kernel, kernel, blocks, threads, shared, stream, __VA_ARGS__)
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::simt::dynamic_shared())
#else
#define UNROLLED _Pragma("unroll")
#define LAUNCH_ON(kernel, blocks, threads, shared, stream, ...) kernel<<<blocks, threads, shared, stream>>>(__VA_ARGS__)
#define DYNAMIC_SHARED(type, name)                     \
  extern __shared__ __align__(16) char name##_bytes[]; \
  type* const name = reinterpret_cast<type*>(name##_bytes)
#endif

#define LAUNCH(kernel, blocks, threads, shared, queue, ...)                                             \
  do {                                                                                                  \
    LAUNCH_ON(kernel, blocks, threads, shared, static_cast<cudaStream_t>((queue).stream), __VA_ARGS__); \
    CUDA_TRY(cudaGetLastError());                                                                       \
  } while (false)

namespace gradcomp::cuda {

// How many blocks cover n entries.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  EXPECTS(blocks <= 0x7fffffff, "CUDA: ", n, " entries are more than one launch covers");
  return static_cast<unsigned>(blocks);
}

struct Four {
  float x[4];
};

// p[0 .. count), and zeros up to four.
static __device__ __forceinline__ Four load_four(const float* p, int64_t count) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(float4) == 0) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    return {{v.x, v.y, v.z, v.w}};
  }
  Four four = {};
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.x[i] = p[i];
  }
  return four;
}

static __device__ __forceinline__ void store_four(float* p, int64_t count, const Four& four) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(float4) == 0) {
    *reinterpret_cast<float4*>(p) = make_float4(four.x[0], four.x[1], four.x[2], four.x[3]);
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) p[i] = four.x[i];
  }
}

// The same for arrays of 16-bit patterns.
struct FourHalves {
  uint16_t x[4];
};

static __device__ __forceinline__ FourHalves load_four(const uint16_t* p, int count) {
  FourHalves four = {};
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(uint2) == 0) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    memcpy(four.x, &v, sizeof v);
    return four;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.x[i] = p[i];
  }
  return four;
}

static __device__ __forceinline__ void store_four(uint16_t* p, int count, const FourHalves& four) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(uint2) == 0) {
    uint2 v;
    memcpy(&v, four.x, sizeof v);
    *reinterpret_cast<uint2*>(p) = v;
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) p[i] = four.x[i];
  }
}

}  // namespace gradcomp::cuda
