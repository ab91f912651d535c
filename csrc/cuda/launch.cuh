// The launch of a kernel, and its dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <tuple>

#include "../expects.h"
#include "../math.h"
#include "../span.h"

//   LAUNCH(kernel, blocks, threads, bytes of dynamic shared memory, queue, the kernel's arguments...);
//   LAUNCH_TOGETHER(kernel, blocks, threads, queue, the kernel's arguments...);   at most most_together() blocks, all resident
//   DYNAMIC_SHARED(type, name)   inside a kernel: `name` points to its dynamic shared memory
// The emulator (tests/simt) has its own definitions of these, and of UNROLLED (math.h). Nothing else differs between a GPU and
// the emulator.
#ifdef GRADCOMP_SIMT
#define LAUNCH_ON(kernel, blocks, threads, shared, stream, ...) \
  ::simt::launch(#kernel, kernel, blocks, threads, shared, stream, __VA_ARGS__)
#define LAUNCH_TOGETHER(kernel, blocks, threads, queue, ...) LAUNCH(kernel, blocks, threads, 0, queue, __VA_ARGS__)
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::simt::dynamic_shared())
#else
#define LAUNCH_ON(kernel, blocks, threads, shared, stream, ...) kernel<<<blocks, threads, shared, stream>>>(__VA_ARGS__)
#define LAUNCH_TOGETHER(kernel, blocks, threads, queue, ...) \
  CUDA_TRY(launch_together(kernel, blocks, threads, static_cast<cudaStream_t>((queue).stream), __VA_ARGS__))
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

// Blocks that are resident together, at most: few, so that a collective has room beside them.
constexpr unsigned kMostTogether = 32;
#ifdef GRADCOMP_SIMT
inline unsigned most_together() { return ::simt::most_together(); }
#else
inline unsigned most_together() {
  int device = 0, processors = 0;
  CUDA_TRY(cudaGetDevice(&device));
  CUDA_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(processors) < kMostTogether ? static_cast<unsigned>(processors) : kMostTogether;
}

template <class... Params, class... Args>
cudaError_t launch_together(void (*kernel)(Params...), unsigned blocks, unsigned threads, cudaStream_t stream, Args... args) {
  std::tuple<Params...> values(args...);
  return std::apply(
      [&](auto&... each) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&each))...};
        return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), pointers, 0,
                                           stream);
      },
      values);
}
#endif

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
