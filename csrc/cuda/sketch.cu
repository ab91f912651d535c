// Count sketches on a GPU. A thread for each cell of the table looks up the cell's entries and adds them up in their order. No
// atomics are needed. The order of additions is the CPU's, so a table equals the CPU's to the last bit.
//
// Bytes: each row reads all entries, 4 bytes each, 64 in a row for sixteen threads. Blocks that run side by side go through the
// rounds at about the same pace, so that most reads come from the second cache. Memory is read once, 4 bytes an entry, for each
// wave of resident threads that the table's cells fill. 4 a cell are written.

#include "../math_sketch.h"
#include "../ops.h"
#include "launch.cuh"
#include "warp.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 128;
constexpr uint32_t kWidth = kSketchTile;
constexpr uint32_t kTilesOfBlock = kThreads / kWidth;

// Find the tile of a round that goes to this tile of columns.
__device__ __forceinline__ uint32_t dealt_to(const Deal& deal, uint32_t column_tile, uint32_t tiles) {
  const uint32_t apart = column_tile - deal.first + (column_tile < deal.first ? tiles : 0);
  return static_cast<uint32_t>(uint64_t{apart} * deal.inverse % tiles);
}

// The sixteen threads of a tile take sixteen rounds at a time: each looks one of them up for all.
__global__ void __launch_bounds__(kThreads)
    sum_cells(const float* flat, uint32_t n, const __grid_constant__ SketchHash hash, float scale, float* table) {
  const uint32_t row = blockIdx.y, turns = hash.turns_of(row);
  const uint32_t lane = threadIdx.x % kWidth, column_tile = blockIdx.x * kTilesOfBlock + threadIdx.x / kWidth;
  const uint32_t entry_tiles = (n + kWidth - 1) / kWidth, rounds = (entry_tiles + hash.tiles - 1) / hash.tiles;
  float sum = 0.0f;
  for (uint32_t first = 0; first < rounds; first += kWidth) {
    const uint32_t round = first + lane;
    const int64_t tile = int64_t{round} * hash.tiles + dealt_to(hash.deal(row, round), column_tile, hash.tiles);
    const uint32_t begin = tile < entry_tiles ? static_cast<uint32_t>(tile) * kWidth : n;
    const Turn turn = SketchHash::turn(turns, static_cast<uint32_t>(tile));
    float x[kWidth];
    for (uint32_t i = 0; i < kWidth; ++i) {
      const Turn its = {__shfl_sync(kWholeWarp, turn.bits, static_cast<int>(i), kWidth)};
      const uint32_t entry = __shfl_sync(kWholeWarp, begin, static_cast<int>(i), kWidth) + (lane ^ its.flip());
      x[i] =
          entry < n ? float_of(bits_of(flat[entry]) ^ its.sign(lane)) : 0.0f;  // a sum is never -0, so that adding 0 keeps it
    }
    for (const float its : x) sum += scale * its;
  }
  if (column_tile < hash.tiles) table[(int64_t{row} * hash.tiles + column_tile) * kWidth + lane] = sum;
}

}  // namespace

void sketch(Span<const float> flat, int64_t rows, int64_t seed, float scale, Span<float> table, Queue queue) {
  const int64_t columns = table.size / rows;
  const dim3 blocks(blocks_for(columns, kThreads), static_cast<unsigned>(rows));
  LAUNCH(sum_cells, blocks, kThreads, 0, queue, flat.data, static_cast<uint32_t>(flat.size), SketchHash(columns, seed), scale,
         table.data);
}

}  // namespace gradcomp::cuda
