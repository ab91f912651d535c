// Kernels that are right, one for each promise of the emulator.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/block.cuh"
#include "launches.h"
#include "math.h"

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

// Scans twice in a row, which needs the barrier at the end of a scan.
__global__ void scan_twice(const uint32_t* x, uint32_t* sums, uint32_t* totals) {
  const unsigned i = threadIdx.x;
  sums[i] = block_exclusive_sum<kBlock>(x[i], totals[i]);
  sums[kBlock + i] = block_exclusive_sum<kBlock>(x[kBlock + i], totals[kBlock + i]);
}

// Finds the wanted-th largest digit, as all threads of the last block see it.
__global__ void pick(const uint32_t* x, uint32_t wanted, uint32_t* all, uint32_t* ticket, uint32_t* out) {
  __shared__ uint32_t counts[kBlock];
  __shared__ Digit picked;
  clear_digits<kBlock, kBlock>(counts);
  count_digit(counts, x[blockIdx.x * kBlock + threadIdx.x]);
  add_up_digits<kBlock, kBlock>(counts, all);
  if (!is_last_block(ticket, gridDim.x)) return;
  pick_digit<kBlock, kBlock>(all, wanted, &picked);
  out[threadIdx.x] = picked.digit;
  out[kBlock + threadIdx.x] = picked.above;
}

// Sums the words of all blocks, in the last block.
__global__ void last_block(uint32_t* parts, uint32_t* ticket, uint32_t* out) {
  parts[blockIdx.x * kBlock + threadIdx.x] = 1;
  if (!is_last_block(ticket, gridDim.x)) return;
  for (unsigned block = 0; block < gridDim.x; ++block) out[threadIdx.x] += __ldcg(parts + block * kBlock + threadIdx.x);
}

__global__ void shuffles(const uint32_t* x, uint32_t* out, int width) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[i] = __shfl_sync(kWholeWarp, x[i], 5, width);
  out[n + i] = __shfl_up_sync(kWholeWarp, x[i], 3, width);
  out[2 * n + i] = __shfl_down_sync(kWholeWarp, x[i], 3, width);
  out[3 * n + i] = __shfl_xor_sync(kWholeWarp, x[i], 6, width);
}

// Lets even and odd lanes vote among themselves, in different branches.
__global__ void votes(const int* x, unsigned* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[i] = __ballot_sync(kWholeWarp, x[i]);
  if (i % 2 == 0) {
    out[n + i] = __any_sync(0x55555555u, x[i]);
  } else {
    out[n + i] = __all_sync(0xaaaaaaaau, x[i]);
  }
  __syncwarp();
  out[2 * n + i] = __syncthreads_count(x[i]);
  out[3 * n + i] = __syncthreads_or(x[i]) * 2 + __syncthreads_and(x[i]);
}

__global__ void atomics(const int* x, int* out, float* sum, unsigned long long* wide) {
  const int mine = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(out + 0, mine);
  atomicMax(out + 1, mine);
  atomicMin(out + 2, mine);
  atomicOr(out + 3, mine);
  atomicAnd(out + 4, mine);
  atomicCAS(out + 5, 0, mine);  // the first one other than 0 stays
  if (atomicExch(out + 6, mine) == 0) atomicAdd(out + 7, 1);
  atomicAdd(sum, 1.0f);
  atomicAdd(wide, 1ull << 32);
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
  const int others = __syncthreads_count(1);
  out[threadIdx.x] = others;
}

__global__ void places(uint32_t* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned size = blockDim.x * blockDim.y * blockDim.z;
  out[block * size + thread] = block * 1000 + thread;
}

__global__ void block_order(uint32_t* next, uint32_t* out) {
  if (threadIdx.x == 0) out[atomicAdd(next, 1u)] = blockIdx.x;
}

__global__ void move_vectors(const float* from, float* to) {
  const unsigned i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(from + i);
}

__global__ void bounds(const float* a, const float* b, float* out) {
  out[threadIdx.x] = min(a[threadIdx.x], b[threadIdx.x]);
  out[32 + threadIdx.x] = max(a[threadIdx.x], b[threadIdx.x]);
}

__global__ void widen(const uint16_t* x, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[i] = __half2float(__ushort_as_half(x[i]));
  out[n + i] = f16_to_float(x[i]);
  out[2 * n + i] = __bfloat162float(__ushort_as_bfloat16(x[i]));
  out[3 * n + i] = bf16_to_float(x[i]);
}

__global__ void narrow(const float* x, uint16_t* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  out[i] = __half_as_ushort(__float2half_rn(x[i]));
  out[n + i] = float_to_f16(x[i]);
  out[2 * n + i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
  out[3 * n + i] = float_to_bf16(x[i]);
}

}  // namespace

void define_right(py::module_& m) {
  m.def("set_order", [](bool shuffled) { simt::set_order(shuffled ? simt::Order::shuffled : simt::Order::plain); });
  DEFINE(scan, (const U32& x, U32 sums, U32 totals), blocks_of(x), kBlock, 0, queue, x.data(), sums.mutable_data(),
         totals.mutable_data());
  DEFINE(scan_twice, (const U32& x, U32 sums, U32 totals), 1, kBlock, 0, queue, x.data(), sums.mutable_data(),
         totals.mutable_data());
  DEFINE(pick, (const U32& x, uint32_t wanted, U32 all, U32 ticket, U32 out), blocks_of(x), kBlock, 0, queue, x.data(), wanted,
         all.mutable_data(), ticket.mutable_data(), out.mutable_data());
  DEFINE(last_block, (U32 parts, U32 ticket, U32 out), blocks_of(parts), kBlock, 0, queue, parts.mutable_data(),
         ticket.mutable_data(), out.mutable_data());
  DEFINE(shuffles, (const U32& x, U32 out, int width), blocks_of(x), kBlock, 0, queue, x.data(), out.mutable_data(), width);
  DEFINE(votes, (const Array<int>& x, U32 out), blocks_of(x), kBlock, 0, queue, x.data(), out.mutable_data());
  DEFINE(atomics, (const Array<int>& x, Array<int> out, Array<float> sum, Array<unsigned long long> wide), blocks_of(x), kBlock,
         0, queue, x.data(), out.mutable_data(), sum.mutable_data(), wide.mutable_data());
  DEFINE(reverse, (const U32& x, U32 out), blocks_of(x), kBlock, kBlock * sizeof(uint32_t), queue, x.data(),
         out.mutable_data());
  m.def("left_over", [](U32 out) { LAUNCH(left_over<32>, blocks_of(out, 32), 32, 0, queue, out.mutable_data()); });
  DEFINE(ends_early, (U32 out), 1, blocks_of(out, 1), 0, queue, out.mutable_data());
  DEFINE(places, (U32 out), dim3(2, 3, 4), dim3(5, 6, 7), 0, queue, out.mutable_data());
  DEFINE(block_order, (U32 next, U32 out), blocks_of(out, 1), 32, 0, queue, next.mutable_data(), out.mutable_data());
  DEFINE(move_vectors, (const Array<float>& x, Array<float> out, int skip), blocks_of(x, 128), 32, 0, queue, x.data() + skip,
         out.mutable_data() + skip);
  DEFINE(bounds, (const Array<float>& a, const Array<float>& b, Array<float> out), 1, 32, 0, queue, a.data(), b.data(),
         out.mutable_data());
  DEFINE(widen, (const Array<uint16_t>& x, Array<float> out), blocks_of(x), kBlock, 0, queue, x.data(), out.mutable_data());
  DEFINE(narrow, (const Array<float>& x, Array<uint16_t> out), blocks_of(x), kBlock, 0, queue, x.data(), out.mutable_data());

  // Launches of any shape, to try the limits, and that the next one works.
  m.def("launch", [](U32 out, unsigned blocks, unsigned block_threads, size_t shared) {
    LAUNCH(block_order, blocks, block_threads, shared, queue, out.mutable_data(), out.mutable_data() + 1);
  });
  m.def("allow_shared",
        [](int bytes) { CUDA_TRY(cudaFuncSetAttribute(block_order, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)); });
}

}  // namespace selftest
