// Count sketches on a GPU. A thread for each cell of the table looks up the cell's entries and adds them up in their order. No
// atomics are needed. The order of additions is the CPU's, so a table equals the CPU's to the last bit.
//
// Bytes: each row reads all entries, 4 bytes each, 64 in a row for sixteen threads. Threads go through the rounds sixteen at a
// time, in all rows. Blocks that run side by side do so at about the same pace. The first row then reads from memory, and the
// others from the second cache. Memory is read once, 4 bytes an entry, for each wave of resident threads that the columns
// fill. 4 a cell are written. Where columns are few, each row has blocks of its own, so that the chip has enough threads.

#include "../math_sketch.h"
#include "../ops.h"
#include "launch.cuh"
#include "warp.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 128;
constexpr uint32_t kWidth = kSketchTile;
constexpr uint32_t kTilesOfBlock = kThreads / kWidth;
constexpr uint32_t kMostRows = 9;
// Rounds of which a block finds the deals at once, for all its tiles.
constexpr uint32_t kKnownRounds = 64;
// Fewer columns than this leave most of the chip idle if a thread has a column of all rows.
#ifdef GRADCOMP_SIMT
constexpr int64_t kManyColumns = 1 << 10;
#else
constexpr int64_t kManyColumns = 1 << 16;
#endif
// A tile of entries behind all others.
constexpr uint32_t kNowhere = 0x80000000u;

// The way of a row's round from tiles of columns to tiles of entries, and the seed of the row's turns.
struct alignas(16) WayBack {
  Multiplier inverse;
  uint32_t first, turns;
};

// Sixteen tiles of entries: the first entry of each, plus its flip, and its turn's bits.
struct Sixteen {
  uint4 entries[kWidth / 4], turns[kWidth / 4];
};

__device__ __forceinline__ void unpack(const uint4* fours, uint32_t* words) {
  UNROLLED for (uint32_t i = 0; i < kWidth / 4; ++i) {
    const uint4 four = fours[i];
    memcpy(words + 4 * i, &four, sizeof four);
  }
}

// Add up an entry of each of sixteen tiles.
template <bool kWhole>
__device__ __forceinline__ float add_sixteen(float sum, const Sixteen& tiles, const float* flat, uint32_t n, uint32_t lane,
                                             float scale) {
  uint32_t entries[kWidth], turns[kWidth], x[kWidth];
  unpack(tiles.entries, entries);
  UNROLLED for (uint32_t i = 0; i < kWidth; ++i) {
    const uint32_t entry = entries[i] ^ lane;
    x[i] = kWhole || entry < n ? bits_of(flat[entry]) : 0;
  }
  // n's highest bit is 0. With it all additions wait for all loads, so that no load waits for an addition.
  uint32_t loaded = 0;
  UNROLLED for (const uint32_t its : x) loaded |= its;
  lane += loaded & n & 0x80000000u;
  unpack(tiles.turns, turns);
  // A sum is never -0, so that adding 0 keeps it.
  UNROLLED for (uint32_t i = 0; i < kWidth; ++i) sum += scale * float_of(x[i] ^ Turn{turns[i]}.sign(lane));
  return sum;
}

// The rows are shared out to `shares` blocks for the same columns, `rows` to each. The sixteen threads of a tile take sixteen
// rounds at a time: each looks one of them up for all.
__global__ void __launch_bounds__(kThreads) sum_cells(const float* flat, uint32_t n, const __grid_constant__ SketchHash hash,
                                                      uint32_t rows, uint32_t shares, float scale, float* table) {
  __shared__ WayBack ways[kMostRows * kKnownRounds];
  __shared__ Sixteen sources[kTilesOfBlock];
  __shared__ float sums[kMostRows * kThreads];
  const uint32_t lane = threadIdx.x % kWidth, first_row = blockIdx.x % shares * rows;
  const uint32_t column_tile = blockIdx.x / shares * kTilesOfBlock + threadIdx.x / kWidth;
  const uint32_t entry_tiles = (n + kWidth - 1) / kWidth, rounds = hash.round_of(entry_tiles + hash.tiles - 1);
  const uint32_t whole = hash.round_of(n / kWidth);  // rounds of which all entries are there
  Sixteen& own = sources[threadIdx.x / kWidth];
  for (uint32_t row = 0; row < rows; ++row) sums[row * kThreads + threadIdx.x] = 0.0f;
  for (uint32_t known = 0; known < rounds; known += kKnownRounds) {
    __syncthreads();  // the ways before have been used
    for (uint32_t i = threadIdx.x; i < rows * kKnownRounds; i += kThreads) {
      const uint32_t row = first_row + i / kKnownRounds;
      const Deal deal = hash.deal(row, known + i % kKnownRounds);
      ways[i] = {deal.inverse, deal.first, hash.turns_of(row)};
    }
    __syncthreads();
    for (uint32_t first = known; first < known + kKnownRounds && first < rounds; first += kWidth) {
      for (uint32_t row = 0; row < rows; ++row) {
        const uint32_t round = first + lane;
        const WayBack way = ways[row * kKnownRounds + round - known];
        const Deal deal = {{}, way.inverse, way.first};
        const uint32_t tile = round * hash.tiles + deal.place(column_tile, hash.tiles);
        const Turn turn = SketchHash::turn(way.turns, tile);
        const bool there = round < rounds && tile < entry_tiles;
        reinterpret_cast<uint32_t*>(own.entries)[lane] = (there ? tile * kWidth : kNowhere) + turn.flip();
        reinterpret_cast<uint32_t*>(own.turns)[lane] = turn.bits;
        __syncwarp();
        float& sum = sums[row * kThreads + threadIdx.x];
        sum = first + kWidth <= whole ? add_sixteen<true>(sum, own, flat, n, lane, scale)
                                      : add_sixteen<false>(sum, own, flat, n, lane, scale);
        __syncwarp();  // the tiles have been read
      }
    }
  }
  if (column_tile >= hash.tiles) return;
  for (uint32_t row = 0; row < rows; ++row) {
    table[(int64_t{first_row + row} * hash.tiles + column_tile) * kWidth + lane] = sums[row * kThreads + threadIdx.x];
  }
}

}  // namespace

void sketch(Span<const float> flat, int64_t rows, int64_t seed, float scale, Span<float> table, Queue queue) {
  const int64_t columns = table.size / rows, shares = columns < kManyColumns ? rows : 1;
  const unsigned blocks = blocks_for(columns, kThreads) * static_cast<unsigned>(shares);
  LAUNCH(sum_cells, blocks, kThreads, 0, queue, flat.data, static_cast<uint32_t>(flat.size), SketchHash(columns, seed),
         static_cast<uint32_t>(rows / shares), static_cast<uint32_t>(shares), scale, table.data);
}

}  // namespace gradcomp::cuda
