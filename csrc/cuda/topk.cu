// Exact top-k on a GPU: a radix selection of the k-th largest key, 11, 10 and 10 bits at a time, with all its state on the
// device.
//
//   count_first_digits   a histogram of all keys' leading 11 bits; the digits of the k-th key and how many entries reach them
//   mark_candidates      a bit for each entry that reaches these digits
//   list_candidates      their indices, in order, from the bits
//   count_next_digits    twice: the remaining digits, from the candidates only
//   count_taken, take    a tile's entries above the k-th key, and equal to it; then each finds its place and is moved out
//
// Where the candidates are too many for the list (many equal entries, or k near n) the last four read all entries instead,
// which is decided on the device. Seven launches and one memset. Bytes an entry of the bucket: 8.3, and 32 or so a candidate;
// 20 without a list. Blocks that finish last pick and scan for all, so that no block waits.

#include "../math.h"
#include "../ops.h"
#include "block.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr uint32_t kTile = 32 * kThreads;  // entries of a block where the whole bucket is read: a word of bits for each thread
constexpr uint32_t kSmallTile = 4 * kThreads;  // of a block that reads candidates
constexpr unsigned kMostBlocks = 2048;         // above, blocks take several tiles: each block's histogram has to be added up

constexpr int kFirstBits = 11, kNextBits = 10;
constexpr int kFirstShift = 31 - kFirstBits;
constexpr uint32_t kFirstDigits = 1u << kFirstBits, kNextDigits = 1u << kNextBits;

// What is known of the k-th largest key; every kernel reads it, the last block of a counting kernel writes it.
struct Choice {
  uint32_t digits;   // the key's leading bits found so far; the rest are 0
  uint32_t wanted;   // of the entries with these leading bits, so many are taken
  uint32_t sources;  // entries that the later kernels read: the listed candidates, or all
  uint32_t listed;   // whether they are listed
};

// Everything that take_topk keeps in its scratch. What must start as zeros comes first.
struct Plan {
  Choice* choice = nullptr;
  uint32_t* tickets = nullptr;  // of five kernels
  uint32_t* first_counts = nullptr;
  uint32_t* next_counts = nullptr;  // of two passes
  uint32_t* bits = nullptr;         // of every entry: is it a candidate?
  uint32_t* tile_listed = nullptr;  // candidates of each tile, then of all tiles before it
  uint32_t* tile_above = nullptr;   // the same of entries above the k-th key, in small tiles
  uint32_t* tile_equal = nullptr;   // and of those equal to it
  uint32_t* list = nullptr;
  uint32_t capacity = 0;
  int64_t zeroed = 0, words = 0;

  // A list of more than a quarter of the entries would cost more than it saves.
  Plan(int64_t n, int64_t k, uint32_t* scratch) {
    const int64_t tiles = blocks_for(n, kTile), small_tiles = blocks_for(n, kSmallTile);
    const int64_t wish = 4 * k > 4096 ? 4 * k : 4096;
    capacity = static_cast<uint32_t>(wish < n / 4 ? wish : n / 4);
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
    list = part(capacity);
  }
};

__global__ void __launch_bounds__(kThreads) count_first_digits(const float* value, uint32_t n, uint32_t k, Plan plan) {
  __shared__ uint32_t counts[kFirstDigits];
  __shared__ Digit picked;
  clear_digits<kThreads, kFirstDigits>(counts);
  for (int64_t tile = int64_t{blockIdx.x} * kTile; tile < n; tile += int64_t{gridDim.x} * kTile) {
    for (int64_t entry = tile + threadIdx.x * 4; entry < tile + kTile; entry += 4 * kThreads) {
      const Four four = load_four(value + entry, n - entry);
      for (const float x : four.x) count_digit(counts, magnitude_key(x) >> kFirstShift);
    }
  }
  add_up_digits<kThreads, kFirstDigits>(counts, plan.first_counts);
  if (!is_last_block(plan.tickets + 0, gridDim.x)) return;
  pick_digit<kThreads, kFirstDigits>(plan.first_counts, k, &picked);
  if (threadIdx.x != 0) return;
  const uint32_t candidates = picked.digit == 0 ? n : picked.reach;
  const bool listed = candidates <= plan.capacity;
  *plan.choice = {picked.digit << kFirstShift, k - picked.above, listed ? candidates : n, listed ? 1u : 0u};
}

// A lane has four entries' bits, eight neighbours make a word. Every lane gets its word.
__device__ __forceinline__ uint32_t join_bits(uint32_t four_bits) {
  uint32_t word = four_bits << (4 * (threadIdx.x % 8));
  for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(kWholeWarp, word, step);
  return word;
}

__global__ void __launch_bounds__(kThreads) mark_candidates(const float* value, uint32_t n, Plan plan) {
  if (plan.choice->listed == 0) return;
  const uint32_t threshold = plan.choice->digits;
  const int64_t tile = int64_t{blockIdx.x} * kTile;
  uint32_t found = 0;
  for (uint32_t at = threadIdx.x * 4; at < kTile; at += 4 * kThreads) {
    const Four four = load_four(value + tile + at, n - (tile + at));
    uint32_t four_bits = 0;
    for (int i = 0; i < 4; ++i) {
      const bool reaches = tile + at + i < n && magnitude_key(four.x[i]) >= threshold;
      four_bits |= static_cast<uint32_t>(reaches) << i;
    }
    found += __popc(four_bits);
    const uint32_t word = join_bits(four_bits);
    if (threadIdx.x % 8 == 0) plan.bits[(tile + at) / 32] = word;
  }
  uint32_t total;
  block_exclusive_sum<kThreads>(found, total);
  if (threadIdx.x == 0) plan.tile_listed[blockIdx.x] = total;
  if (is_last_block(plan.tickets + 1, gridDim.x)) scan_in_place<kThreads>(plan.tile_listed, gridDim.x);
}

__global__ void __launch_bounds__(kThreads) list_candidates(Plan plan) {
  if (plan.choice->listed == 0) return;
  const uint32_t word_index = blockIdx.x * kThreads + threadIdx.x;
  uint32_t word = plan.bits[word_index];
  uint32_t total;
  uint32_t place = plan.tile_listed[blockIdx.x] + block_exclusive_sum<kThreads>(__popc(word), total);
  for (; word != 0; word &= word - 1) plan.list[place++] = word_index * 32 + __ffs(static_cast<int>(word)) - 1;
}

// Four entries in a row of what the later kernels read: their places and their values; count of them are there.
struct Sources {
  uint32_t index[4];
  Four value;
  int count;
};

__device__ __forceinline__ Sources load_sources(const float* value, const Plan& plan, uint32_t sources, bool listed,
                                                uint32_t first) {
  Sources four = {};
  four.count = first >= sources ? 0 : sources - first < 4 ? static_cast<int>(sources - first) : 4;
  for (uint32_t i = 0; i < 4; ++i) four.index[i] = first + i;
  if (!listed) {
    four.value = load_four(value + first, four.count);
    return four;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < four.count) four.index[i] = plan.list[first + i];
  }
  for (int i = 0; i < 4; ++i) {
    if (i < four.count) four.value.x[i] = value[four.index[i]];
  }
  return four;
}

// The grid is made for reading all entries; for a list, few blocks of it have work.
__device__ __forceinline__ uint32_t blocks_with_work(uint32_t sources) {
  const uint32_t tiles = (sources + kSmallTile - 1) / kSmallTile;
  return tiles < gridDim.x ? tiles : gridDim.x;
}

__global__ void __launch_bounds__(kThreads) count_next_digits(const float* value, int pass, Plan plan) {
  __shared__ uint32_t counts[kNextDigits];
  __shared__ Digit picked;
  const uint32_t sources = plan.choice->sources;
  const uint32_t blocks = blocks_with_work(sources);
  if (blockIdx.x >= blocks) return;
  const bool listed = plan.choice->listed != 0;
  const uint32_t digits = plan.choice->digits;
  const uint32_t wanted = plan.choice->wanted;
  const int shift = pass == 0 ? kNextBits : 0;
  clear_digits<kThreads, kNextDigits>(counts);
  for (uint32_t tile = blockIdx.x * kSmallTile; tile < sources; tile += blocks * kSmallTile) {
    const Sources four = load_sources(value, plan, sources, listed, tile + threadIdx.x * 4);
    for (int i = 0; i < 4; ++i) {
      const uint32_t difference = (magnitude_key(four.value.x[i]) ^ digits) >> shift;
      if (i < four.count && difference < kNextDigits) count_digit(counts, difference);
    }
  }
  uint32_t* const all = plan.next_counts + pass * kNextDigits;
  add_up_digits<kThreads, kNextDigits>(counts, all);
  if (!is_last_block(plan.tickets + 2 + pass, blocks)) return;
  pick_digit<kThreads, kNextDigits>(all, wanted, &picked);
  if (threadIdx.x != 0) return;
  plan.choice->digits = digits | picked.digit << shift;
  plan.choice->wanted = wanted - picked.above;
}

// Where entries stand against the k-th key: in one word, those above in its lower half, those equal in its upper one.
__device__ __forceinline__ uint32_t standing(const Sources& four, int i, uint32_t key) {
  const uint32_t its = magnitude_key(four.value.x[i]);
  if (i >= four.count || its < key) return 0;
  return its > key ? 1u : 1u << 16;
}

__global__ void __launch_bounds__(kThreads) count_taken(const float* value, Plan plan) {
  const uint32_t sources = plan.choice->sources;
  const uint32_t blocks = blocks_with_work(sources);
  if (blockIdx.x >= blocks) return;
  const bool listed = plan.choice->listed != 0;
  const uint32_t key = plan.choice->digits;
  for (uint32_t tile = blockIdx.x * kSmallTile; tile < sources; tile += blocks * kSmallTile) {
    const Sources four = load_sources(value, plan, sources, listed, tile + threadIdx.x * 4);
    uint32_t mine = 0;
    for (int i = 0; i < 4; ++i) mine += standing(four, i, key);
    uint32_t total;
    block_exclusive_sum<kThreads>(mine, total);
    if (threadIdx.x == 0) {
      plan.tile_above[tile / kSmallTile] = total & 0xffffu;
      plan.tile_equal[tile / kSmallTile] = total >> 16;
    }
  }
  if (!is_last_block(plan.tickets + 4, blocks)) return;
  const uint32_t tiles = (sources + kSmallTile - 1) / kSmallTile;
  scan_in_place<kThreads>(plan.tile_above, tiles);
  scan_in_place<kThreads>(plan.tile_equal, tiles);
}

__global__ void __launch_bounds__(kThreads) take(float* value, float* velocity, const int32_t* flag, uint32_t k, float* values,
                                                 int32_t* indices, int32_t* header, Plan plan) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    header[0] = static_cast<int32_t>(k);
    header[1] = flag != nullptr ? *flag : 0;
  }
  const uint32_t sources = plan.choice->sources;
  const uint32_t blocks = blocks_with_work(sources);
  if (blockIdx.x >= blocks) return;
  const bool listed = plan.choice->listed != 0;
  const uint32_t key = plan.choice->digits;
  const uint32_t quota = plan.choice->wanted;
  for (uint32_t tile = blockIdx.x * kSmallTile; tile < sources; tile += blocks * kSmallTile) {
    const Sources four = load_sources(value, plan, sources, listed, tile + threadIdx.x * 4);
    uint32_t mine = 0;
    for (int i = 0; i < 4; ++i) mine += standing(four, i, key);
    uint32_t total;
    const uint32_t before = block_exclusive_sum<kThreads>(mine, total);
    uint32_t above = plan.tile_above[tile / kSmallTile] + (before & 0xffffu);
    uint32_t equal = plan.tile_equal[tile / kSmallTile] + (before >> 16);
    for (int i = 0; i < 4; ++i) {
      const uint32_t its = standing(four, i, key);
      if (its == 1 || (its != 0 && equal < quota)) {
        const uint32_t place = above + (equal < quota ? equal : quota);
        values[place] = four.value.x[i];
        indices[place] = static_cast<int32_t>(four.index[i]);
        value[four.index[i]] = 0.0f;
        if (velocity != nullptr) velocity[four.index[i]] = 0.0f;
      }
      above += its & 0xffffu;
      equal += its >> 16;
    }
  }
}

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return Plan(n, k, nullptr).words; }

void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, int64_t k, Span<float> values,
               Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const Plan plan(value.size, k, scratch.data);
  EXPECTS(scratch.size >= plan.words, "take_topk: scratch has ", scratch.size, " words; ", plan.words, " are needed");
  const auto n = static_cast<uint32_t>(value.size), wanted = static_cast<uint32_t>(k);
  const unsigned tiles = blocks_for(n, kTile), small_tiles = blocks_for(n, kSmallTile);
  const unsigned blocks = tiles < kMostBlocks ? tiles : kMostBlocks;
  const unsigned small_blocks = small_tiles < kMostBlocks ? small_tiles : kMostBlocks;

  CUDA_TRY(cudaMemsetAsync(scratch.data, 0, plan.zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  LAUNCH(count_first_digits, blocks, kThreads, 0, queue, value.data, n, wanted, plan);
  LAUNCH(mark_candidates, tiles, kThreads, 0, queue, value.data, n, plan);
  LAUNCH(list_candidates, tiles, kThreads, 0, queue, plan);
  LAUNCH(count_next_digits, small_blocks, kThreads, 0, queue, value.data, 0, plan);
  LAUNCH(count_next_digits, small_blocks, kThreads, 0, queue, value.data, 1, plan);
  LAUNCH(count_taken, small_blocks, kThreads, 0, queue, value.data, plan);
  LAUNCH(take, small_blocks, kThreads, 0, queue, value.data, velocity.data, flag.data, wanted, values.data, indices.data,
         header.data, plan);
}

}  // namespace gradcomp::cuda
