// The scratch of a selection, and the lists of its candidates. A tile's candidates lie together in a list, in index order.
#pragma once

#include "block.cuh"
#include "launch.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {

constexpr unsigned kThreads = 256;
// Entries of a block that reads the whole bucket: a word of bits for each thread.
constexpr uint32_t kTile = 32 * kThreads;
// Lines of a tile.
constexpr uint32_t kLines = kTile / kLine;
// Entries of a block that reads sources.
constexpr uint32_t kSmallTile = 4 * kThreads;
// Tiles of a list that a block reads at once, a warp each.
constexpr uint32_t kTilesAtOnce = kThreads / kWarp;
// Blocks of a launch, at most. Every block's histogram must be added up, so a block of a large bucket takes several tiles
// instead. Launches that mostly read a list have fewer. Undecided candidates, at most, that one block decides on. In the
// emulator buckets that tests can afford reach all three.
#ifdef GRADCOMP_SIMT
constexpr unsigned kMostBlocks = 3, kMostSourceBlocks = 3;
constexpr uint32_t kMostUndecided = 48;
#else
constexpr unsigned kMostBlocks = 2048, kMostSourceBlocks = 1024;
constexpr uint32_t kMostUndecided = 16384;
#endif

constexpr int kFirstBits = 11, kNextBits = 10;
constexpr int kFirstShift = 31 - kFirstBits;
constexpr uint32_t kFirstDigits = 1u << kFirstBits, kNextDigits = 1u << kNextBits;

// The state of the search for the k-th largest key. Every kernel reads it; the last block of a counting kernel writes it.
struct Choice {
  uint32_t digits;   // the key's leading bits, or a bound for them; the others are 0
  uint32_t wanted;   // entries with these leading bits that are taken
  uint32_t sources;  // entries to choose from: the listed ones, or all; 0 if there is no choice to make
  uint32_t listed;   // 1 if the sources are listed
  uint32_t counted;  // 1 if each tile's chosen entries are counted
};

// The layout of the scratch. The parts that must start as zeros come first.
struct Plan {
  Choice* choice = nullptr;
  // Of seven kernels: first digits, bits or list, next digits twice, taken, peaks or heaviest's sample, lines by peaks.
  uint32_t* tickets = nullptr;
  // Listed candidates; undecided ones; 1 if take_topk must read all entries, or NaN among heaviest's cells.
  uint32_t* counters = nullptr;
  uint32_t* first_counts = nullptr;  // without bits three: of all entries, of peaks, of lines by peaks
  uint32_t* next_counts = nullptr;   // of two passes
  uint32_t* bits = nullptr;          // of every entry: 1 for one that passes
  uint32_t* peaks = nullptr;         // of every line of kLine entries: its largest key
  uint32_t* tile_begin = nullptr;    // of each tile: the place of its first candidate in the list
  uint32_t* tile_count = nullptr;    // and the number of its candidates
  uint32_t* tile_above = nullptr;    // its candidates above the k-th key, then those of all tiles before it; without a list, of
  uint32_t* tile_equal = nullptr;    // small tiles, and likewise entries equal to the k-th key
  uint32_t* undecided = nullptr;     // candidates of the k-th key's leading bits: the tile, then the last digit
  uint32_t* list = nullptr;          // the candidates' indices
  float* values = nullptr;           // the candidates
  uint32_t tiles = 0, longest_list = 0;
  int64_t zeroed = 0, words = 0;

  // A list of more than a quarter of the entries would cost more than it saves. has_bits: whether a first pass leaves bits, or
  // peaks.
  Plan(int64_t n, int64_t k, bool has_bits, uint32_t* scratch) {
    const int64_t small_tiles = blocks_for(n, kSmallTile);
    tiles = blocks_for(n, kTile);
    const int64_t wish = k < 1024 ? 4096 : k < n ? 4 * k : n;
    longest_list = static_cast<uint32_t>(wish < n / 4 ? wish : n / 4);
    const auto part = [&](int64_t size) {
      uint32_t* const begin = scratch == nullptr ? nullptr : scratch + words;
      words += (size + 3) / 4 * 4;  // so that all parts can be read in fours
      return begin;
    };
    choice = reinterpret_cast<Choice*>(part(sizeof(Choice) / sizeof(uint32_t)));
    tickets = part(7);
    counters = part(3);
    first_counts = part((has_bits ? 1 : 3) * kFirstDigits);
    next_counts = part(2 * kNextDigits);
    zeroed = words;
    bits = part(has_bits ? int64_t{tiles} * kThreads : 0);
    peaks = part(has_bits ? 0 : int64_t{tiles} * kLines);
    tile_begin = part(tiles);
    tile_count = part(tiles);
    tile_above = part(small_tiles);
    tile_equal = part(small_tiles);
    undecided = part(longest_list < kMostUndecided ? longest_list : kMostUndecided);
    list = part(longest_list);
    values = reinterpret_cast<float*>(part(longest_list));
  }

  // Set the parts that must start as zeros.
  void clear(Queue queue) const {
    CUDA_TRY(cudaMemsetAsync(choice, 0, zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
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

// Return the bits of 32 entries in a row of this block's tile, those of this thread: 1 for each for which passes_at(x, index)
// holds. If all entries of the tile are judged `alike`, passes(x) tells the same.
//
// A warp votes on the first, second, third and last of its fours. The votes meet in shared memory, where a thread gathers its
// word: a byte from each of four votes.
template <class Reader, class Passes, class PassesAt>
static __device__ __forceinline__ uint32_t marks_of_tile(const Reader& reader, uint32_t n, bool alike, Passes passes,
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
  return gathered(four.x) | gathered(four.y) << 1 | gathered(four.z) << 2 | gathered(four.w) << 3;
}

// The same bits as above, of the entries that reaches() holds for. It holds for a peak if it does for any entry of the line,
// and not for 0. Only lines with such peaks are read.
template <class Reader, class Reaches>
static __device__ __forceinline__ uint32_t marks_by_peaks(const Reader& reader, uint32_t n, const uint32_t* peaks,
                                                          Reaches reaches) {
  __shared__ uint32_t words[kThreads];
  __shared__ uint8_t lines[kLines];
  const int64_t tile = int64_t{blockIdx.x} * kTile;
  words[threadIdx.x] = 0;
  const bool mine = threadIdx.x < kLines && tile + threadIdx.x * kLine < n && reaches(peaks[tile / kLine + threadIdx.x]);
  uint32_t total;
  const uint32_t place = block_exclusive_sum<kThreads>(mine, total);
  if (mine) lines[place] = static_cast<uint8_t>(threadIdx.x);
  __syncthreads();
  const auto& its = reader.over(tile);
  const bool whole = is_whole(its, tile, n);
  constexpr uint32_t kAtOnce = kWarp / kLineLanes;  // lines of a warp
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t first = threadIdx.x / kWarp * kAtOnce; first < total; first += kThreads / kLineLanes) {
    const uint32_t own = first + lane / kLineLanes;
    const bool there = own < total;
    const int64_t entry = tile + lines[there ? own : first] * kLine + lane % kLineLanes * 4;
    const Four four = whole ? its.read_whole(entry) : its.read(entry, n - entry);
    uint32_t votes[4];
    UNROLLED for (int i = 0; i < 4; ++i) votes[i] = __ballot_sync(kWholeWarp, there && reaches(magnitude_key(four.x[i])));
    // A lane gathers the word of eight lanes.
    const uint32_t line = first + lane / 2;
    if (lane >= 2 * kAtOnce || line >= total) continue;
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= four_apart(votes[i] >> (lane * 8) & 0xffu) << i;
    words[lines[line] * 2 + lane % 2] = word;
  }
  __syncthreads();
  return words[threadIdx.x];
}

// Note the bits of this thread, of this block's tile. Returns true in the last block, which also gets the number of all marked.
static __device__ __forceinline__ bool note_marks(const Plan& plan, uint32_t marks, uint32_t* found) {
  plan.bits[blockIdx.x * kThreads + threadIdx.x] = marks;
  uint32_t total;
  block_exclusive_sum<kThreads>(static_cast<uint32_t>(__popc(marks)), total);
  if (threadIdx.x == 0) plan.tile_begin[blockIdx.x] = total;
  if (!is_last_block(plan.tickets + 1, gridDim.x)) return false;
  *found = scan_in_place<kThreads>(plan.tile_begin, gridDim.x);
  return true;
}

// Call put(place) for each bit of a word that is set.
template <class Put>
static __device__ __forceinline__ void for_each_bit(uint32_t word, Put put) {
  for (; word != 0; word &= word - 1) put(static_cast<uint32_t>(__ffs(static_cast<int>(word)) - 1));
}

// Put the candidates of this block's tile, which `marks` has the bits of, in the list, behind those of the tiles that came
// first. Call note(x) for each of them, by one thread. Threads share them evenly, and read the first ones while the place in
// the list is on its way.
template <class Reader, class Note>
static __device__ __forceinline__ void list_tile(const Reader& reader, uint32_t marks, const Plan& plan, Note note) {
  __shared__ uint16_t offsets[kTile];
  __shared__ uint32_t begin;
  uint32_t total;
  uint32_t place = block_exclusive_sum<kThreads>(static_cast<uint32_t>(__popc(marks)), total);
  const uint32_t before = threadIdx.x == 0 ? atomicAdd(plan.counters + 0, total) : 0;
  for_each_bit(marks, [&](uint32_t bit) { offsets[place++] = static_cast<uint16_t>(threadIdx.x * 32 + bit); });
  __syncthreads();
  for (uint32_t first = 0; first < total; first += kThreads) {
    const uint32_t i = first + threadIdx.x;
    const uint32_t index = blockIdx.x * kTile + (i < total ? offsets[i] : 0);
    const float x = i < total ? reader.at(index) : 0.0f;
    if (first == 0) {
      if (threadIdx.x == 0) begin = before;
      __syncthreads();
    }
    if (i >= total) continue;
    plan.list[begin + i] = index;
    plan.values[begin + i] = x;
    note(x);
  }
  if (threadIdx.x == 0) {
    plan.tile_begin[blockIdx.x] = before;
    plan.tile_count[blockIdx.x] = total;
  }
}

// A candidate in the list, or none.
struct Candidate {
  uint32_t index;
  float x;
  bool there;
};

// Call use(tile) for the tiles of this warp, one of those of `blocks` blocks.
template <class Use>
static __device__ __forceinline__ void for_each_tile_of_warp(const Plan& plan, uint32_t blocks, Use use) {
  const uint32_t first = blockIdx.x * kTilesAtOnce + threadIdx.x / kWarp;
  for (uint32_t tile = first; tile < plan.tiles; tile += blocks * kTilesAtOnce) use(tile);
}

// Call use(candidate) for a tile's candidates, of which each lane of a warp has one. All lanes must call this.
template <class Use>
static __device__ __forceinline__ void for_each_candidate(const Plan& plan, uint32_t tile, Use use) {
  constexpr uint32_t kShare = 4;
  const uint32_t begin = plan.tile_begin[tile], count = plan.tile_count[tile];
  for (uint32_t first = 0; first < count; first += kShare * kWarp) {
    Candidate share[kShare];
    UNROLLED for (uint32_t i = 0; i < kShare; ++i) {
      const uint32_t place = first + i * kWarp + threadIdx.x % kWarp;
      share[i] = place < count ? Candidate{plan.list[begin + place], plan.values[begin + place], true} : Candidate{0, 0, false};
    }
    UNROLLED for (uint32_t i = 0; i < kShare; ++i) {
      if (first + i * kWarp < count) use(share[i]);
    }
  }
}

}  // namespace gradcomp::cuda
