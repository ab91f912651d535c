// Kernels that are right, one for each promise of the emulator.

#include <cuda_runtime.h>

#include <atomic>

#include "cuda/block.cuh"
#include "launches.h"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace selftest {
namespace {

__global__ void scan(const uint32_t* x, uint32_t* sums, uint32_t* totals) {
  const unsigned i = blockIdx.x * kBlock + threadIdx.x;
  uint32_t total;
  sums[i] = block_exclusive_sum<kBlock>(x[i], total);
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

__global__ void shuffles(const uint32_t* x, uint32_t* out, int width) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[i] = __shfl_sync(kWholeWarp, x[i], 5, width);
  out[n + i] = __shfl_up_sync(kWholeWarp, x[i], 3);
  out[2 * n + i] = __shfl_down_sync(kWholeWarp, x[i], 3);
  out[3 * n + i] = __shfl_xor_sync(kWholeWarp, x[i], 6);
}

// Lets even and odd lanes vote among themselves, in different branches.
__global__ void votes(const int* x, unsigned* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  if (i % 2 == 0) {
    out[i] = __ballot_sync(0x55555555u, x[i]);
  } else {
    out[i] = __all_sync(0xaaaaaaaau, x[i]);
  }
  __syncwarp();
  out[n + i] = __syncthreads_or(x[i]);
}

__global__ void atomics(const int* x, int* out) {
  const int mine = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(out + 0, mine);
  atomicMax(out + 1, mine);
  atomicOr(out + 2, mine);
  atomicCAS(out + 3, 0, mine);  // the first one other than 0 stays
  if (atomicExch(out + 4, mine) == 0) atomicAdd(out + 5, 1);
}

// Each block turns its part around, through static and through dynamic shared memory.
__global__ void reverse(const uint32_t* x, uint32_t* out) {
  __shared__ uint32_t fixed[kBlock];
  DYNAMIC_SHARED(uint32_t, dynamic);
  const unsigned t = threadIdx.x, i = blockIdx.x * kBlock + t, n = gridDim.x * kBlock;
  out[2 * n + i] = fixed[t];
  out[3 * n + i] = dynamic[t];
  __syncthreads();
  fixed[t] = x[i];
  dynamic[t] = x[i];
  __syncthreads();
  out[i] = fixed[kBlock - 1 - t];
  out[n + i] = dynamic[kBlock - 1 - t];
}

// Copies a template's shared memory as a block finds it.
template <int kSize>
__global__ void left_over(uint32_t* out) {
  __shared__ uint32_t fixed[kSize];
  out[blockIdx.x * kSize + threadIdx.x] = fixed[threadIdx.x];
  __syncthreads();
  fixed[threadIdx.x] = threadIdx.x;
}

// Threads that have ended are not waited for.
__global__ void ends_early(uint32_t* out) {
  if (threadIdx.x % 3 == 0) return;
  if (__syncthreads_or(threadIdx.x == 1)) out[threadIdx.x] = 1;
}

__global__ void block_order(uint32_t* next, uint32_t* out) {
  if (threadIdx.x == 0) out[atomicAdd(next, 1u)] = blockIdx.x;
}

__global__ void move_vectors(const float* from, float* to) {
  const unsigned i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(from + i);
}

// Host code: every operation of std::atomic on one word. Headers use some of them beside kernels.
template <class Word>
uint64_t host_atomics() {
  std::atomic<Word> at{0};
  at.store(5);
  Word expected = 5;
  const bool strong = at.compare_exchange_strong(expected, 12);
  const bool weak = at.compare_exchange_weak(expected = 11, 13);  // it holds 12: neither changes nor agrees
  uint64_t seen = (strong && !weak && expected == 12);
  for (const Word before :
       {at.fetch_add(4), at.fetch_sub(1), at.fetch_and(10), at.fetch_or(1), at.fetch_xor(2), at.exchange(7)})
    seen = 100 * seen + before;
  return 100 * seen + at.load();
}

}  // namespace

void define_right(py::module_& m) {
  m.def("host_atomics", [] {
    return py::make_tuple(host_atomics<uint8_t>(), host_atomics<uint16_t>(), host_atomics<uint32_t>(),
                          host_atomics<uint64_t>());
  });
  DEFINE(scan, (const U32& x, U32 sums, U32 totals), blocks_of(x), kBlock, 0, queue, x.data(), sums.mutable_data(),
         totals.mutable_data());
  DEFINE(shuffles, (const U32& x, U32 out, int width), blocks_of(x), kBlock, 0, queue, x.data(), out.mutable_data(), width);
  DEFINE(votes, (const Array<int>& x, U32 out), blocks_of(x), kBlock, 0, queue, x.data(), out.mutable_data());
  DEFINE(atomics, (const Array<int>& x, Array<int> out), blocks_of(x), kBlock, 0, queue, x.data(), out.mutable_data());
  DEFINE(reverse, (const U32& x, U32 out), blocks_of(x), kBlock, kBlock * sizeof(uint32_t), queue, x.data(),
         out.mutable_data());
  m.def("left_over", [](U32 out) { LAUNCH(left_over<32>, blocks_of(out, 32), 32, 0, queue, out.mutable_data()); });
  DEFINE(ends_early, (U32 out), 1, blocks_of(out, 1), 0, queue, out.mutable_data());
  DEFINE(block_order, (U32 next, U32 out), blocks_of(out, 1), 32, 0, queue, next.mutable_data(), out.mutable_data());
  DEFINE(move_vectors, (const Array<float>& x, Array<float> out, int skip), blocks_of(x, 128), 32, 0, queue, x.data() + skip,
         out.mutable_data() + skip);

  // Launches of any shape, to try the limits, and that the next one works.
  m.def("launch", [](U32 out, unsigned blocks, unsigned block_threads, size_t shared) {
    LAUNCH(block_order, blocks, block_threads, shared, queue, out.mutable_data(), out.mutable_data() + 1);
  });
}

}  // namespace selftest
