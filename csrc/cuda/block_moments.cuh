// Statistics of a block on a GPU. The threads' results are merged in a fixed order, so that scheduling does not change them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../math.h"
#include "launch.cuh"
#include "thread_four.cuh"
#include "warp.cuh"

namespace gradcomp::cuda {

// Moments whose mean is measured from one of the entries, the pivot. If entries differ in their last bits only, the rounding of
// a mean from 0 would hide their deviations.
template <class T>
struct Shifted {
  T pivot;
  Moments<T> moments;
};

// A join for join_block, to which T{} adds nothing.
struct Merge {
  template <class T>
  __device__ __forceinline__ Shifted<T> operator()(const Shifted<T>& a, Shifted<T> b) const {
    if (b.moments.count == 0) return a;
    if (a.moments.count == 0) return b;
    b.moments.mean += b.pivot - a.pivot;
    return {a.pivot, merge(a.moments, b.moments)};
  }
};

struct Add {
  __device__ __forceinline__ double operator()(double a, double b) const { return a + b; }
};

// Include `count` entries, at most four.
static __device__ __forceinline__ void include(Shifted<float>& all, const Four& of, int count) {
  if (all.moments.count == 0) all.pivot = of.x[0];
  const auto entries = static_cast<float>(count);
  const float share = 1.0f / entries;
  Moments<float> four = {entries, 0.0f, 0.0f, of.x[0], of.x[0], 0.0f};
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.mean += (of.x[i] - all.pivot) * share;
  }
  for (int i = 0; i < 4; ++i) {
    if (i >= count) continue;
    const float apart = (of.x[i] - all.pivot) - four.mean;
    four.squares += apart * apart;
    four.low = of.x[i] < four.low ? of.x[i] : four.low;
    four.high = of.x[i] > four.high ? of.x[i] : four.high;
    four.nonzero += of.x[i] != 0.0f ? 1.0f : 0.0f;
  }
  all.moments = merge(all.moments, four);
}

// Include whole fours.
template <int kFours>
static __device__ __forceinline__ void include(Shifted<float>& all, const Four (&of)[kFours]) {
  constexpr float kEntries = 4 * kFours, kShare = 1 / kEntries;
  if (all.moments.count == 0) all.pivot = of[0].x[0];
  Moments<float> share = {kEntries, 0.0f, 0.0f, of[0].x[0], of[0].x[0], 0.0f};
  UNROLLED for (int i = 0; i < kFours; ++i) {
    UNROLLED for (int j = 0; j < 4; ++j) share.mean += (of[i].x[j] - all.pivot) * kShare;
  }
  UNROLLED for (int i = 0; i < kFours; ++i) {
    UNROLLED for (int j = 0; j < 4; ++j) {
      const float its = of[i].x[j], apart = (its - all.pivot) - share.mean;
      share.squares += apart * apart;
      share.low = its < share.low ? its : share.low;
      share.high = its > share.high ? its : share.high;
      share.nonzero += its != 0.0f ? 1.0f : 0.0f;
    }
  }
  all.moments = merge(all.moments, share);
}

template <class T>
static __device__ __forceinline__ T shuffle_down(const T& x, unsigned step) {
  uint32_t words[sizeof(T) / sizeof(uint32_t)];
  memcpy(words, &x, sizeof x);
  for (uint32_t& word : words) word = __shfl_down_sync(kWholeWarp, word, step);
  T from;
  memcpy(&from, words, sizeof from);
  return from;
}

// Join all threads' parts in the order of the threads. Thread 0 gets the result; all threads of the block must call this.
template <unsigned kThreads, class T, class Join>
static __device__ __forceinline__ T join_block(T mine, Join join) {
  constexpr unsigned kWarps = kThreads / kWarp;
  __shared__ T of_warps[kWarps];
  // The upper lanes join some parts twice, but lane 0 gets none of that.
  for (unsigned step = 1; step < kWarp; step *= 2) mine = join(mine, shuffle_down(mine, step));
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    mine = threadIdx.x < kWarps ? of_warps[threadIdx.x] : T{};
    for (unsigned step = 1; step < kWarps; step *= 2) mine = join(mine, shuffle_down(mine, step));
  }
  __syncthreads();  // the next call writes of_warps
  return mine;
}

}  // namespace gradcomp::cuda
