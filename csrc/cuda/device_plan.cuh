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
// instead. In the emulator so do blocks of buckets that tests can afford.
#ifdef GRADCOMP_SIMT
constexpr unsigned kMostBlocks = 3;
#else
constexpr unsigned kMostBlocks = 2048;
#endif

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
      words += (size + 3) / 4 * 4;  // so that all parts can be read in fours
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

// Call use(four, number) for the fours of a whole tile that are this thread's: 0, 1, 2 and so on. The reader's share of them is
// read before the first is used.
constexpr int kFours = kTile / (4 * kThreads);
template <class Reader, class Use>
static __device__ __forceinline__ void for_each_whole(const Reader& reader, int64_t tile, Use use) {
  const int64_t entry = tile + 4 * threadIdx.x;
  for (int first = 0; first < kFours; first += Reader::kShare) {
    Four share[Reader::kShare];
    UNROLLED for (int i = 0; i < Reader::kShare; ++i) share[i] = reader.read_whole(entry + int64_t{first + i} * 4 * kThreads);
    UNROLLED for (int i = 0; i < Reader::kShare; ++i) use(share[i], first + i);
  }
}

// The same for a tile of which any part may be there, one four at a time.
template <class Reader, class Use>
static __device__ __forceinline__ void for_each_there(const Reader& reader, int64_t tile, uint32_t n, Use use) {
  for (int number = 0; number < kFours; ++number) {
    const int64_t entry = tile + 4 * (threadIdx.x + int64_t{number} * kThreads);
    use(reader.read(entry, n - entry), number);
  }
}

template <class Reader>
static __device__ __forceinline__ bool is_whole(const Reader& reader, int64_t tile, uint32_t n) {
  return tile + kTile <= n && reader.is_aligned();
}

// Move bit i of a byte to bit 4 i.
static __device__ __forceinline__ uint32_t four_apart(uint32_t byte) {
  byte = (byte | byte << 12) & 0x000f000fu;
  byte = (byte | byte << 6) & 0x03030303u;
  return (byte | byte << 3) & 0x11111111u;
}

// Mark the entries of this block's tile for which passes_at(x, index) holds, and count them. If all entries of the tile are
// judged `alike`, passes(x) tells the same. Returns true in the last block.
//
// A warp votes on the first, second, third and last of its fours. The votes meet in shared memory, where a thread gathers its
// word: 32 entries in a row, a byte from each of four votes.
template <class Reader, class Passes, class PassesAt>
static __device__ __forceinline__ bool mark_tile(const Reader& reader, uint32_t n, const Plan& plan, bool alike, Passes passes,
                                                 PassesAt passes_at) {
  __shared__ uint4 votes[kThreads / 4];
  const int64_t tile = int64_t{blockIdx.x} * kTile;
  const auto vote = [&](int number, bool first, bool second, bool third, bool last) {
    const uint4 four = {__ballot_sync(kWholeWarp, first), __ballot_sync(kWholeWarp, second), __ballot_sync(kWholeWarp, third),
                        __ballot_sync(kWholeWarp, last)};
    if (threadIdx.x % kWarp == 0) votes[number * (kThreads / kWarp) + threadIdx.x / kWarp] = four;
  };
  const auto& its = reader.over(tile);
  if (alike && is_whole(its, tile, n)) {
    for_each_whole(its, tile, [&](const Four& four, int number) {
      vote(number, passes(four.x[0]), passes(four.x[1]), passes(four.x[2]), passes(four.x[3]));
    });
  } else {
    for_each_there(its, tile, n, [&](const Four& four, int number) {
      const int64_t entry = tile + 4 * (threadIdx.x + int64_t{number} * kThreads);
      bool marked[4];
      for (int i = 0; i < 4; ++i) marked[i] = entry + i < n && passes_at(four.x[i], static_cast<uint32_t>(entry + i));
      vote(number, marked[0], marked[1], marked[2], marked[3]);
    });
  }
  __syncthreads();
  const uint4 four = votes[threadIdx.x / 4];
  const auto gathered = [](uint32_t votes_of) { return four_apart(votes_of >> (threadIdx.x % 4 * 8) & 0xffu); };
  const uint32_t word = gathered(four.x) | gathered(four.y) << 1 | gathered(four.z) << 2 | gathered(four.w) << 3;
  plan.bits[blockIdx.x * kThreads + threadIdx.x] = word;
  uint32_t total;
  block_exclusive_sum<kThreads>(static_cast<uint32_t>(__popc(word)), total);
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
