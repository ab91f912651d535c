// The scratch of a selection, and the tiles that its blocks share. A selection is one launch whose blocks are all resident.
#pragma once

#include "block.cuh"
#include "launch.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {

// Threads of a block. In the emulator a block has few, and buckets that tests can afford are tiles of several blocks.
#ifdef GRADCOMP_SIMT
constexpr unsigned kSelecting = 128;
#else
constexpr unsigned kSelecting = 1024;
#endif
// Entries that a warp reads at once, in rows of a four for each lane.
constexpr uint32_t kSelectTile = 512, kSelectRow = 4 * kWarp;
constexpr int kSelectRows = kSelectTile / kSelectRow;
static_assert(kSelectRows == 4, "a word has a byte for each row");

// A key's digits, the first one of 11 bits, and the others of 10.
constexpr int kFirstBits = 11, kNextBits = 10, kAllDigits = 3;
constexpr int kFirstShift = 31 - kFirstBits;
constexpr uint32_t kFirstDigits = 1u << kFirstBits, kNextDigits = 1u << kNextBits;

// The layout of the scratch. The parts that must start as zeros come first.
struct Plan {
  uint32_t* found = nullptr;       // candidates, in the list or beyond its end
  uint32_t* counts = nullptr;      // of each digit, kFirstDigits places
  uint32_t* of_blocks = nullptr;   // of each block: its entries above the k-th key, and equal to it
  uint32_t* tile_begin = nullptr;  // of each tile: the place of its first candidate in the list
  uint32_t* tile_count = nullptr;  // and the number of its candidates
  uint32_t* tile_above = nullptr;  // its entries above the k-th key, then those of its block's tiles before it
  uint32_t* tile_equal = nullptr;  // and likewise entries equal to the k-th key
  uint32_t* list = nullptr;        // the candidates' indices
  float* values = nullptr;         // the candidates
  uint32_t tiles = 0, longest_list = 0;
  int64_t zeroed = 0, words = 0;

  // A list of more than a quarter of the entries would cost more than it saves.
  Plan(int64_t n, int64_t k, uint32_t* scratch) {
    tiles = blocks_for(n, kSelectTile);
    const int64_t wish = k < 1024 ? 4096 : k < n ? 4 * k : n;
    longest_list = static_cast<uint32_t>(wish < n / 4 ? wish : n / 4);
    const auto part = [&](int64_t size) {
      uint32_t* const begin = scratch == nullptr ? nullptr : scratch + words;
      words += (size + 3) / 4 * 4;  // so that all parts can be read in fours
      return begin;
    };
    found = part(1);
    counts = part(kAllDigits * kFirstDigits);
    zeroed = words;
    of_blocks = part(2 * kMostTogether);
    for (uint32_t** const of_tiles : {&tile_begin, &tile_count, &tile_above, &tile_equal}) *of_tiles = part(tiles);
    list = part(longest_list);
    values = reinterpret_cast<float*>(part(longest_list));
  }

  unsigned blocks() const { return blocks_for(tiles, kSelecting / kWarp, most_together()); }

  // Set the parts that must start as zeros.
  __device__ __forceinline__ void clear() const {
    for (int64_t i = blockIdx.x * kSelecting + threadIdx.x; i < zeroed; i += gridDim.x * kSelecting) found[i] = 0;
  }

  // The first of a block's tiles, which are neighbours.
  __device__ __forceinline__ uint32_t first_tile(uint32_t block) const {
    return static_cast<uint32_t>(uint64_t{tiles} * block / gridDim.x);
  }
};

// Call use(tile) for the tiles of this warp.
template <class Use>
static __device__ __forceinline__ void for_each_own_tile(const Plan& plan, Use use) {
  const uint32_t end = plan.first_tile(blockIdx.x + 1);
  for (uint32_t tile = plan.first_tile(blockIdx.x) + threadIdx.x / kWarp; tile < end; tile += kSelecting / kWarp) use(tile);
}

// Read the rows of a tile, this lane's four of each.
template <class Reader>
static __device__ __forceinline__ void read_rows(const Reader& reader, uint32_t n, uint32_t tile, Four (&rows)[kSelectRows]) {
  const uint32_t lane = threadIdx.x % kWarp;
  const bool whole = n - tile * kSelectTile >= kSelectTile && reader.is_aligned();
  UNROLLED for (int row = 0; row < kSelectRows; ++row) {
    const int64_t entry = int64_t{tile} * kSelectTile + row * kSelectRow + 4 * lane;
    rows[row] = whole ? reader.read_whole(entry) : reader.read(entry, n - entry);
  }
}

// Give a tile a part of the list, for so many candidates. All lanes must call this.
static __device__ __forceinline__ uint32_t begin_in_list(const Plan& plan, uint32_t tile, uint32_t count) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t begin = __shfl_sync(kWholeWarp, lane == 0 && count > 0 ? atomicAdd(plan.found, count) : 0, 0);
  if (lane == 0) {
    plan.tile_begin[tile] = begin;
    plan.tile_count[tile] = count;
  }
  return begin;
}

static __device__ __forceinline__ void put_in_list(const Plan& plan, uint32_t place, uint32_t index, float x) {
  if (place >= plan.longest_list) return;
  plan.list[place] = index;
  plan.values[place] = x;
}

// Put the entries of a tile for which passes(x, index) holds in the list, in index order.
template <class Reader, class Passes>
static __device__ __forceinline__ void list_tile(const Reader& reader, uint32_t n, uint32_t tile, const Plan& plan,
                                                 Passes passes) {
  const uint32_t lane = threadIdx.x % kWarp, first = tile * kSelectTile + 4 * lane;
  uint32_t marks = 0, counts = 0;  // of each row a byte: its candidates are at most 128
  Four rows[kSelectRows];
  read_rows(reader, n, tile, rows);
  UNROLLED for (int row = 0; row < kSelectRows; ++row) {
    UNROLLED for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t index = first + row * kSelectRow + i;
      if (index < n && passes(rows[row].x[i], index)) marks |= 1u << (4 * row + i);
    }
    counts += static_cast<uint32_t>(__popc(marks >> 4 * row & 0xf)) << row * 8;
  }
  const uint32_t inclusive = warp_inclusive_sum(counts), sums = __shfl_sync(kWholeWarp, inclusive, kWarp - 1);
  uint32_t total = 0;
  for (int row = 0; row < kSelectRows; ++row) total += sums >> row * 8 & 0xff;
  uint32_t place = begin_in_list(plan, tile, total);
  UNROLLED for (int row = 0; row < kSelectRows; ++row) {
    uint32_t at = place + ((inclusive - counts) >> row * 8 & 0xff);
    UNROLLED for (uint32_t i = 0; i < 4; ++i) {
      if (marks >> (4 * row + i) & 1) put_in_list(plan, at++, first + row * kSelectRow + i, rows[row].x[i]);
    }
    place += sums >> row * 8 & 0xff;
  }
}

}  // namespace gradcomp::cuda
