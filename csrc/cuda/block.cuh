// Sums, scans and histograms of a block, and the search for the block that finishes last. All threads of a block must call
// these.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "launch.cuh"
#include "warp.cuh"

namespace gradcomp::cuda {

// Sum x over the threads before this one; total <- the sum over all threads.
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

// Replace each of counts[0 .. size) by the sum of those before it. Returns the sum of all. One block calls this. A thread reads
// its counts of a round before it adds up the first: the other blocks have ended, and nothing else hides the way to memory.
template <unsigned kThreads>
static __device__ __forceinline__ uint32_t scan_in_place(uint32_t* counts, uint32_t size) {
  constexpr uint32_t kEach = 32;
  const bool aligned = reinterpret_cast<uintptr_t>(counts) % sizeof(uint4) == 0;
  uint32_t before = 0;
  for (uint32_t at = 0; at < size; at += kThreads * kEach) {
    const uint32_t first = at + threadIdx.x * kEach;
    const bool whole = aligned && first + kEach <= size;
    uint32_t mine[kEach];
    if (whole) {
      UNROLLED for (uint32_t i = 0; i < kEach; i += 4) {
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(counts + first + i));
        memcpy(mine + i, &four, sizeof four);
      }
    } else {
      UNROLLED for (uint32_t i = 0; i < kEach; ++i) mine[i] = first + i < size ? __ldcg(counts + first + i) : 0;
    }
    uint32_t sum = 0;
    UNROLLED for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t its = mine[i];
      mine[i] = sum;
      sum += its;
    }
    uint32_t total;
    const uint32_t running = before + block_exclusive_sum<kThreads>(sum, total);
    UNROLLED for (uint32_t i = 0; i < kEach; i += 4) {
      const uint4 four = {running + mine[i], running + mine[i + 1], running + mine[i + 2], running + mine[i + 3]};
      if (whole) {
        *reinterpret_cast<uint4*>(counts + first + i) = four;
      } else {
        UNROLLED for (uint32_t j = i; j < i + 4; ++j) {
          if (first + j < size) counts[first + j] = running + mine[j];
        }
      }
    }
    before += total;
  }
  return before;
}

// Return true in the last of `blocks` blocks that call this, and false in the others. The last block may then read all blocks'
// earlier writes to global memory, with __ldcg, past the first-level cache. No block waits for another. *ticket starts as 0,
// and is 0 again after the launch.
//
// The first barrier collects all threads' results, which one thread's fence publishes before it takes the ticket for all. Its
// second fence keeps their reads behind the ticket, of which the second barrier tells them.
static __device__ __forceinline__ bool is_last_block(uint32_t* ticket, uint32_t blocks) {
  __shared__ uint32_t place;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    place = atomicAdd(ticket, 1u);
    __threadfence();
  }
  __syncthreads();
  if (place != blocks - 1) return false;
  if (threadIdx.x == 0) *ticket = 0;
  return true;
}

// A barrier of all blocks of a launch, which are resident together. The fences do what those of is_last_block do. *ticket
// starts as 0, and is 0 again after the launch.
struct Meeting {
  uint32_t* ticket;
  uint32_t awaited = 0;

  // All blocks may then read what others wrote before, with __ldcg.
  __device__ __forceinline__ void wait() {
    awaited += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(ticket, 1u);
      while (atomicAdd(ticket, 0u) < awaited) continue;
      __threadfence();
    }
    __syncthreads();
  }

  // No block waits any more.
  __device__ __forceinline__ void end() const {
    if (threadIdx.x == 0 && atomicAdd(ticket, 1u) == awaited + gridDim.x - 1) atomicExch(ticket, 0u);
  }
};

// Set the ticket of a call to 0, the last of its words of scratch.
inline uint32_t* zeroed_ticket(Span<uint32_t> scratch, int64_t words, Queue queue) {
  uint32_t* const ticket = scratch.data + words - 1;
  CUDA_TRY(cudaMemsetAsync(ticket, 0, sizeof *ticket, static_cast<cudaStream_t>(queue.stream)));
  return ticket;
}

// A histogram of digits in shared memory: a block clears it, counts with atomics, and adds it to that of all blocks. The digit
// 0 follows from the rest. Each lane counts it in a place of its own, which nobody reads: in a gradient full of zeros all
// threads would count in one place, and a branch for each entry costs more than the entry.
template <uint32_t kDigits>
constexpr uint32_t kPlaces = kDigits + kWarp;

// counts is aligned for uint4, here and below.
template <unsigned kThreads, uint32_t kDigits>
static __device__ __forceinline__ void clear_digits(uint32_t* counts) {
  for (uint32_t digit = 4 * threadIdx.x; digit < kDigits; digit += 4 * kThreads) {
    *reinterpret_cast<uint4*>(counts + digit) = {0, 0, 0, 0};
  }
  __syncthreads();
}

template <uint32_t kDigits>
static __device__ __forceinline__ void count_digit(uint32_t* counts, uint32_t digit) {
  atomicAdd(counts + (digit != 0 ? digit : kDigits + threadIdx.x % kWarp), 1u);
}

template <unsigned kThreads, uint32_t kDigits>
static __device__ __forceinline__ void add_up_digits(const uint32_t* counts, uint32_t* all) {
  __syncthreads();
  for (uint32_t digit = 4 * threadIdx.x; digit < kDigits; digit += 4 * kThreads) {
    const uint4 four = *reinterpret_cast<const uint4*>(counts + digit);
    if ((four.x | four.y | four.z | four.w) == 0) continue;
    const uint32_t each[4] = {four.x, four.y, four.z, four.w};
    for (int i = 0; i < 4; ++i) {
      if (each[i] != 0) atomicAdd(all + digit + i, each[i]);
    }
  }
}

// A digit, the number of entries with a larger one, and the number with this one or a larger one (unknown for digit 0).
struct Digit {
  uint32_t digit;
  uint32_t above;
  uint32_t reach;
};

// Pick the digit of the wanted-th largest entry. picked is in shared memory, for all threads of the one block that calls this.
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
