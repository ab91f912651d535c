// What the threads of a warp or block do together: sums, scans, histograms, and finding out which block finishes last. All
// threads of the block must call these.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gradcomp::cuda {

constexpr unsigned kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// The sum of x over this lane and those below it.
static __device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t x) {
  const unsigned lane = threadIdx.x % kWarp;
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const uint32_t below = __shfl_up_sync(kWholeWarp, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

// The sum of x over the threads before this one; total becomes the sum over all of them.
template <unsigned kThreads>
static __device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t x, uint32_t& total) {
  constexpr unsigned kWarps = kThreads / kWarp;
  __shared__ uint32_t warp_sums[kWarps];
  const unsigned warp = threadIdx.x / kWarp;
  const uint32_t inclusive = warp_inclusive_sum(x);
  if (threadIdx.x % kWarp == kWarp - 1) warp_sums[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
  for (unsigned w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  __syncthreads();  // the next call writes warp_sums
  return before + inclusive - x;
}

// Replaces counts[0 .. size) by the sums of what stands before each, and returns the sum of all; called by one block.
template <unsigned kThreads>
static __device__ __forceinline__ uint32_t scan_in_place(uint32_t* counts, uint32_t size) {
  constexpr uint32_t kEach = 8;
  uint32_t before = 0;
  for (uint32_t at = 0; at < size; at += kThreads * kEach) {
    const uint32_t first = at + threadIdx.x * kEach;
    uint32_t mine[kEach];
    uint32_t sum = 0;
    for (uint32_t i = 0; i < kEach; ++i) {
      mine[i] = first + i < size ? __ldcg(counts + first + i) : 0;
      sum += mine[i];
    }
    uint32_t total;
    uint32_t running = before + block_exclusive_sum<kThreads>(sum, total);
    for (uint32_t i = 0; i < kEach; ++i) {
      if (first + i < size) counts[first + i] = running;
      running += mine[i];
    }
    before += total;
  }
  return before;
}

// The first of low .. high for which precedes(i) does not hold, in an order where it holds for all before that and for none
// after; high is not asked about. For a whole warp: each round asks 32 at once, where a thread alone would ask one.
template <class Precedes>
static __device__ __forceinline__ uint32_t first_not(uint32_t low, uint32_t high, Precedes precedes) {
  while (low < high) {
    const uint32_t step = (high - low + kWarp - 1) / kWarp;
    const uint32_t probe = low + (threadIdx.x % kWarp + 1) * step - 1;
    const unsigned holds = __ballot_sync(kWholeWarp, probe < high && precedes(probe));
    low += static_cast<uint32_t>(__popc(holds)) * step;
    const uint32_t last = low + step - 1;
    high = last < high ? last : high;
  }
  return high;
}

// True in the one block of `blocks` that gets here last: what the others wrote to global memory before is then there to be read
// (with __ldcg, past the first-level cache). No block waits for another. *ticket starts as 0.
static __device__ __forceinline__ bool is_last_block(uint32_t* ticket, uint32_t blocks) {
  __shared__ uint32_t place;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) place = atomicAdd(ticket, 1u);
  __syncthreads();
  __threadfence();
  return place == blocks - 1;
}

// A histogram of digits in shared memory: a block clears it, counts with atomics, and adds it up with the other blocks'. The
// digit 0 is never counted, it is what remains: in a gradient full of zeros all threads would count in one place.
template <unsigned kThreads, uint32_t kDigits>
static __device__ __forceinline__ void clear_digits(uint32_t* counts) {
  for (uint32_t digit = threadIdx.x; digit < kDigits; digit += kThreads) counts[digit] = 0;
  __syncthreads();
}

static __device__ __forceinline__ void count_digit(uint32_t* counts, uint32_t digit) {
  if (digit != 0) atomicAdd(counts + digit, 1u);
}

template <unsigned kThreads, uint32_t kDigits>
static __device__ __forceinline__ void add_up_digits(const uint32_t* counts, uint32_t* all) {
  __syncthreads();
  for (uint32_t digit = threadIdx.x; digit < kDigits; digit += kThreads) {
    if (counts[digit] != 0) atomicAdd(all + digit, counts[digit]);
  }
}

struct Digit {
  uint32_t digit;
  uint32_t above;  // entries with a larger digit
  uint32_t reach;  // entries with this one or a larger digit; unknown for 0
};

// The digit of the wanted-th largest entry, for all threads of one block to read; picked is in shared memory.
template <unsigned kThreads, uint32_t kDigits>
static __device__ __forceinline__ void pick_digit(const uint32_t* all, uint32_t wanted, Digit* picked) {
  constexpr uint32_t kEach = kDigits / kThreads;
  const uint32_t highest = kDigits - 1 - threadIdx.x * kEach;
  uint32_t mine[kEach];
  uint32_t sum = 0;
  for (uint32_t i = 0; i < kEach; ++i) {
    mine[i] = __ldcg(all + highest - i);
    sum += mine[i];
  }
  uint32_t total;
  uint32_t above = block_exclusive_sum<kThreads>(sum, total);
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t digit = highest - i;
    if (above < wanted && (wanted <= above + mine[i] || digit == 0)) *picked = {digit, above, above + mine[i]};
    above += mine[i];
  }
  __syncthreads();
}

}  // namespace gradcomp::cuda
