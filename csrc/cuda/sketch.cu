// Count sketches on a GPU. A thread for each cell of the table looks up the cell's entries and adds them up in their order. No
// atomics are needed. The order of additions is the CPU's, so a table equals the CPU's to the last bit.
//
// Bytes: each row reads all entries, 4 bytes each, 64 in a row for sixteen threads. A thread has a column, and goes through all
// rows sixteen rounds at a time; blocks that run side by side do so at about the same pace. The first row then reads from
// memory, and the others from the second cache. Memory is read once, 4 bytes an entry, for each wave of resident threads that
// the columns fill. 4 a cell are written.

#include "../math_sketch.h"
#include "../ops.h"
#include "launch.cuh"
#include "warp.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 128;
constexpr uint32_t kWidth = kSketchTile;
constexpr uint32_t kTilesOfBlock = kThreads / kWidth;

// The sixteen threads of a tile take sixteen rounds at a time: each looks one of them up for all.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    sum_cells(const float* flat, uint32_t n, const __grid_constant__ SketchHash hash, float scale, float* table) {
  const uint32_t lane = threadIdx.x % kWidth, column_tile = blockIdx.x * kTilesOfBlock + threadIdx.x / kWidth;
  const uint32_t entry_tiles = (n + kWidth - 1) / kWidth, rounds = hash.round_of(entry_tiles + hash.tiles - 1);
  float sums[kRows] = {};
  for (uint32_t first = 0; first < rounds; first += kWidth) {
    const uint32_t round = first + lane;
    UNROLLED for (uint32_t row = 0; row < kRows; ++row) {
      const int64_t tile = int64_t{round} * hash.tiles + hash.deal(row, round).place(column_tile, hash.tiles);
      const uint32_t begin = tile < entry_tiles ? static_cast<uint32_t>(tile) * kWidth : n;
      const Turn turn = SketchHash::turn(hash.turns_of(row), static_cast<uint32_t>(tile));
      float x[kWidth];
      UNROLLED for (uint32_t i = 0; i < kWidth; ++i) {
        const Turn its = {__shfl_sync(kWholeWarp, turn.bits, static_cast<int>(i), kWidth)};
        const uint32_t entry = __shfl_sync(kWholeWarp, begin, static_cast<int>(i), kWidth) + (lane ^ its.flip());
        // A sum is never -0, so that adding 0 keeps it.
        x[i] = entry < n ? float_of(bits_of(flat[entry]) ^ its.sign(lane)) : 0.0f;
      }
      for (const float its : x) sums[row] += scale * its;
    }
  }
  if (column_tile >= hash.tiles) return;
  UNROLLED for (uint32_t row = 0; row < kRows; ++row) {
    table[(int64_t{row} * hash.tiles + column_tile) * kWidth + lane] = sums[row];
  }
}

}  // namespace

void sketch(Span<const float> flat, int64_t rows, int64_t seed, float scale, Span<float> table, Queue queue) {
  const int64_t columns = table.size / rows;
  const auto sum = rows == 3 ? sum_cells<3> : rows == 5 ? sum_cells<5> : rows == 7 ? sum_cells<7> : sum_cells<9>;
  LAUNCH(sum, blocks_for(columns, kThreads), kThreads, 0, queue, flat.data, static_cast<uint32_t>(flat.size),
         SketchHash(columns, seed), scale, table.data);
}

}  // namespace gradcomp::cuda
