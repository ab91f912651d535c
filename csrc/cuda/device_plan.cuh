// The scratch of a selection, and lists in index order, which two launches make from a bit for each entry.
#pragma once

#include "block.cuh"
#include "launch.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {

constexpr unsigned kThreads = 256;
// Entries of a block that reads the whole bucket: a word of bits for each thread.
constexpr uint32_t kTile = 32 * kThreads;
// Entries of a block that reads sources.
constexpr uint32_t kSmallTile = 4 * kThreads;
// Blocks of a launch, at most. Every block's histogram must be added up, so a block of a large bucket takes several tiles
// instead.
constexpr unsigned kMostBlocks = 2048;

constexpr int kFirstBits = 11, kNextBits = 10;
constexpr int kFirstShift = 31 - kFirstBits;
constexpr uint32_t kFirstDigits = 1u << kFirstBits, kNextDigits = 1u << kNextBits;

// The state of the search for the k-th largest key. Every kernel reads it; the last block of a counting kernel writes it.
struct Choice {
  uint32_t digits;   // the key's leading bits; the others are 0
  uint32_t wanted;   // entries with these leading bits that are taken
  uint32_t sources;  // entries to choose from: the listed ones, or all; 0 if there is no choice to make
  uint32_t listed;   // 1 if the sources are listed
};

// The layout of the scratch. The parts that must start as zeros come first.
struct Plan {
  Choice* choice = nullptr;
  uint32_t* tickets = nullptr;  // of five kernels: first digits, bits, next digits twice, taken
  uint32_t* first_counts = nullptr;
  uint32_t* next_counts = nullptr;  // of two passes
  uint32_t* bits = nullptr;         // of every entry: 1 for a candidate
  uint32_t* tile_listed = nullptr;  // candidates of each tile, then of all tiles before it
  uint32_t* tile_above = nullptr;   // likewise entries above the k-th key, in small tiles
  uint32_t* tile_equal = nullptr;   // likewise entries equal to the k-th key
  uint32_t* list = nullptr;
  uint32_t longest_list = 0;
  int64_t zeroed = 0, words = 0;

  // A list of more than a quarter of the entries would cost more than it saves.
  Plan(int64_t n, int64_t k, uint32_t* scratch) {
    const int64_t tiles = blocks_for(n, kTile), small_tiles = blocks_for(n, kSmallTile);
    const int64_t wish = k < 1024 ? 4096 : k < n ? 4 * k : n;
    longest_list = static_cast<uint32_t>(wish < n / 4 ? wish : n / 4);
    const auto part = [&](int64_t size) {
      uint32_t* const begin = scratch == nullptr ? nullptr : scratch + words;
      words += size;
      return begin;
    };
    choice = reinterpret_cast<Choice*>(part(sizeof(Choice) / sizeof(uint32_t)));
    tickets = part(5);
    first_counts = part(kFirstDigits);
    next_counts = part(2 * kNextDigits);
    zeroed = words;
    bits = part(tiles * kThreads);
    tile_listed = part(tiles);
    tile_above = part(small_tiles);
    tile_equal = part(small_tiles);
    list = part(longest_list);
  }
};

// Join the bits of eight neighbouring lanes, four each, into a word, which all eight get.
static __device__ __forceinline__ uint32_t join_bits(uint32_t four_bits) {
  uint32_t word = four_bits << (4 * (threadIdx.x % 8));
  for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(kWholeWarp, word, step);
  return word;
}

// Mark the entries of this block's tile for which passes(x, index) holds, and count them. Returns true in the last block.
template <class Reader, class Passes>
static __device__ __forceinline__ bool mark_tile(const Reader& reader, uint32_t n, const Plan& plan, Passes passes) {
  const int64_t tile = int64_t{blockIdx.x} * kTile;
  uint32_t found = 0;
  for (uint32_t at = threadIdx.x * 4; at < kTile; at += 4 * kThreads) {
    const Four four = reader.read(tile + at, n - (tile + at));
    uint32_t four_bits = 0;
    for (int i = 0; i < 4; ++i) {
      const bool marked = tile + at + i < n && passes(four.x[i], static_cast<uint32_t>(tile + at + i));
      four_bits |= static_cast<uint32_t>(marked) << i;
    }
    found += __popc(four_bits);
    const uint32_t word = join_bits(four_bits);
    if (threadIdx.x % 8 == 0) plan.bits[(tile + at) / 32] = word;
  }
  uint32_t total;
  block_exclusive_sum<kThreads>(found, total);
  if (threadIdx.x == 0) plan.tile_listed[blockIdx.x] = total;
  return is_last_block(plan.tickets + 1, gridDim.x);
}

// Call put(place, index) for each marked entry of this block's tile; its place follows from the tiles' sums.
template <class Put>
static __device__ __forceinline__ void for_each_marked(const Plan& plan, Put put) {
  const uint32_t word_index = blockIdx.x * kThreads + threadIdx.x;
  uint32_t word = plan.bits[word_index];
  uint32_t total;
  uint32_t place = plan.tile_listed[blockIdx.x] + block_exclusive_sum<kThreads>(__popc(word), total);
  for (; word != 0; word &= word - 1) put(place++, word_index * 32 + __ffs(static_cast<int>(word)) - 1);
}

}  // namespace gradcomp::cuda
