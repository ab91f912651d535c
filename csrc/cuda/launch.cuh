// The launch of a kernel, and its dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../expects.h"
#include "../math.h"
#include "../span.h"

//   LAUNCH(kernel, blocks, threads, bytes of dynamic shared memory, queue, the kernel's arguments...);
//   DYNAMIC_SHARED(type, name)   inside a kernel: `name` points to its dynamic shared memory
// The emulator (tests/simt) has its own definitions of these two, and of UNROLLED (math.h). Nothing else differs between a GPU
// and the emulator.
#ifdef GRADCOMP_SIMT
#define LAUNCH_ON(kernel, blocks, threads, shared, stream, ...) \
  ::simt::launch(#kernel, kernel, blocks, threads, shared, stream, __VA_ARGS__)
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::simt::dynamic_shared())
#else
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

// Count the blocks that cover n entries.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  EXPECTS(blocks <= 0x7fffffff, "CUDA: ", n, " entries do not fit into one launch");
  return static_cast<unsigned>(blocks);
}

// The same, but at most so many, which then take several shares each.
inline unsigned blocks_for(int64_t n, int64_t per_block, unsigned most) {
  const unsigned blocks = blocks_for(n, per_block);
  return blocks < most ? blocks : most;
}

}  // namespace gradcomp::cuda
