// The peaks of a block's lines on a GPU, noted while a tile's entries are in registers.
#pragma once

#include <cstdint>

#include "../math.h"
#include "block_pieces.cuh"
#include "warp.cuh"

namespace gradcomp::cuda {

// The peaks of a block's lines, if they are wanted, each plus 1; 0 where it is not known. of: in shared memory.
template <int64_t kEntries>
struct BlockPeaks {
  static constexpr uint32_t kLines = kEntries / kLine;
  uint32_t* of;
  uint32_t* peaks;  // of all lines; null if they are not wanted

  static __device__ __forceinline__ uint32_t peak_of(const Four& four) {
    return peak_of_line(
        {magnitude_key(four.x[0]), magnitude_key(four.x[1]), magnitude_key(four.x[2]), magnitude_key(four.x[3])});
  }

  __device__ __forceinline__ void clear() const {
    if (peaks == nullptr) return;
    for (uint32_t line = threadIdx.x; line < kLines; line += kTileThreads) of[line] = 0;
    __syncthreads();
  }

  // Note those of rows of a whole tile.
  template <int kFours>
  __device__ __forceinline__ void note(int64_t entry, const Four (&rows)[kFours]) const {
    if (peaks == nullptr) return;
    uint32_t* const lines = of + static_cast<uint32_t>(entry) % kEntries / kLine;
    UNROLLED for (int row = 0; row < kFours; ++row) {
      const uint32_t peak = peak_of(rows[row]);
      if (threadIdx.x % kLineLanes == 0) lines[row * (kRow / kLine)] = peak + 1;
    }
  }

  // Write all of them, after a barrier. Lines of the flat array that are not in whole tiles are read again.
  __device__ __forceinline__ void store(const float* flat, int64_t n) const {
    if (peaks == nullptr) return;
    const int64_t begin = blockIdx.x * kEntries;
    bool missing = false;
    for (uint32_t line = threadIdx.x; line < kLines; line += kTileThreads) {
      const bool known = of[line] != 0;
      if (known) peaks[begin / kLine + line] = of[line] - 1;
      missing |= !known && begin + line * kLine < n;
    }
    if (!__syncthreads_or(missing)) return;
    for (uint32_t line = threadIdx.x / kLineLanes; line < kLines; line += kTileThreads / kLineLanes) {
      const int64_t entry = begin + line * kLine + threadIdx.x % kLineLanes * 4;
      const bool mine = of[line] == 0 && entry < n;
      const uint32_t peak = peak_of(mine ? load_four(flat + entry, n - entry) : Four{});
      if (mine && threadIdx.x % kLineLanes == 0) peaks[entry / kLine] = peak;
    }
  }
};

}  // namespace gradcomp::cuda
