// Sums and searches of a warp. All its lanes must call these.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gradcomp::cuda {

constexpr unsigned kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// Sum x over this lane and the lanes below it.
static __device__ __forceinline__ uint32_t warp_inclusive_sum(uint32_t x) {
  const unsigned lane = threadIdx.x % kWarp;
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const uint32_t below = __shfl_up_sync(kWholeWarp, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

// Find the first of low .. high for which precedes(i) does not hold. It holds for all before that one, for none after it, and
// is never asked about high. Each round asks 32 places at once, one for each lane.
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

}  // namespace gradcomp::cuda
