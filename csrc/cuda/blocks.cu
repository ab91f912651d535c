// Rounding to a block's budget of bits, and adding up, on a GPU: a block of threads for every block of entries, a thread for
// every group. Entries go through shared memory, in rows that 32 threads can read at once.
//
// Bytes an entry, with a word for every 32 / bits entries beside them: take_blocks 8, add_blocks 8, read_blocks 4, or 2 into
// halves. About 20 instructions an entry of take_blocks, 12 of add_blocks and a rank, 16 of read_blocks: at a warp a scheduler
// and cycle, a third of the time that the bytes take; of read_blocks into halves, as long as its bytes take.
// The last block of add_and_settle_blocks settles: a ticket a block, predicted 1 us a launch of 6 M entries; alone, it moves
// some 50 GB/s in a failed step.

#include "../math_blocks.h"
#include "../math_payload.h"
#include "../ops.h"
#include "block.cuh"
#include "block_pieces.cuh"
#include "launch.cuh"
#include "thread_add.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = Blocks::kGroups;
// Blocks of a multiprocessor, at least: 1,024 threads, and 128 KB of entries.
constexpr unsigned kBlocks = 8;
constexpr int kEntries = Blocks::kGroup;
// Words from one group's entries in shared memory to those of the next: 32 threads then read 32 banks.
constexpr unsigned kPadded = kEntries + 1;

__device__ __forceinline__ unsigned row_place(unsigned entry) { return entry / kEntries * kPadded + entry % kEntries; }

// Copy the block's entries from `first` on into shared memory, and zeros behind the last. A thread asks for eight fours before
// it uses the first.
__device__ __forceinline__ void fetch(const float* x, unsigned count, float* rows, unsigned first = 0) {
  constexpr unsigned kFours = kEntries / 4;
  Four fours[kFours];
  const bool whole = count == Blocks::kEntries && is_aligned(x) && first == 0;
  UNROLLED for (unsigned i = 0; i < kFours; ++i) {
    const unsigned at = 4 * (threadIdx.x + i * kThreads);
    if (whole) {
      fours[i] = load_whole(x + at);
    } else {
      UNROLLED for (unsigned j = 0; j < 4; ++j) fours[i].x[j] = at + j >= first && at + j < count ? x[at + j] : 0.0f;
    }
  }
  UNROLLED for (unsigned i = 0; i < kFours; ++i) {
    const unsigned at = 4 * (threadIdx.x + i * kThreads);
    UNROLLED for (unsigned j = 0; j < 4; ++j) rows[row_place(at + j)] = fours[i].x[j];
  }
  __syncthreads();
}

// Write the block's entries from `first` on back from shared memory.
__device__ __forceinline__ void put_back(float* x, unsigned count, const float* rows, unsigned first = 0) {
  __syncthreads();
  const bool whole = count == Blocks::kEntries && is_aligned(x) && first == 0;
  UNROLLED for (unsigned i = 0; i < kEntries / 4; ++i) {
    const unsigned at = 4 * (threadIdx.x + i * kThreads);
    Four four;
    UNROLLED for (unsigned j = 0; j < 4; ++j) four.x[j] = rows[row_place(at + j)];
    if (whole) {
      store_whole(x + at, four);
    } else {
      UNROLLED for (unsigned j = 0; j < 4; ++j) {
        if (at + j >= first && at + j < count) x[at + j] = four.x[j];
      }
    }
  }
}

// Turn 8 x 8 bits in each byte of eight words: bit b of word i changes places with bit i of word b.
__device__ __forceinline__ void turn(uint32_t (&words)[8]) {
  UNROLLED for (unsigned apart = 1; apart < 8; apart *= 2) {
    const uint32_t low = apart == 1 ? 0x55555555u : apart == 2 ? 0x33333333u : 0x0f0f0f0fu;
    UNROLLED for (unsigned i = 0; i < 8; ++i) {
      if ((i & apart) != 0) continue;
      uint32_t &upper = words[i], &lower = words[i | apart];
      const uint32_t change = (upper >> apart ^ lower) & low;
      lower ^= change;
      upper ^= change << apart;
    }
  }
}

// Find the largest height at which the groups of a block are within its budget. One warp looks; all threads get it.
__device__ __forceinline__ int find_height(int budget, const uint8_t* depths, unsigned groups) {
  __shared__ int height;
  if (threadIdx.x < kWarp) {
    int own[Blocks::kGroups / kWarp];
    UNROLLED for (unsigned i = 0; i < Blocks::kGroups / kWarp; ++i) {
      const unsigned group = threadIdx.x + i * kWarp;
      own[i] = group < groups ? depths[group] : kEmpty;
    }
    const int found = height_within(budget, [&](int at) {
      int words = 0;
      UNROLLED for (const int depth : own) words += width_of(at, depth);
      for (unsigned step = 1; step < kWarp; step *= 2) words += __shfl_xor_sync(kWholeWarp, words, step);
      return words;
    });
    if (threadIdx.x == 0) height = found;
  }
  __syncthreads();
  return height;
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    take(float* residual, const int32_t* flag, const __grid_constant__ Blocks form, int32_t* header, uint32_t* words) {
  __shared__ float rows[kThreads * kPadded];
  __shared__ uint8_t depths[kThreads];
  __shared__ uint32_t top;
  const auto count = static_cast<unsigned>(form.entries(blockIdx.x));
  const auto groups = static_cast<unsigned>(Blocks::groups_of(count)), budget = static_cast<unsigned>(form.budget(groups));
  float* const x = residual + form.begin(blockIdx.x);
  uint32_t* const own = words + form.at(blockIdx.x);
  uint32_t* const codes = own + Blocks::codes_at(groups);
  if (threadIdx.x == 0) top = 0;
  if (blockIdx.x + threadIdx.x == 0) {
    header[0] = 0;
    header[1] = flag != nullptr ? *flag : 0;
    if (form.words() % 2 != 0) words[form.words()] = 0;  // the payload ends with a whole word of 64 bits
  }
  fetch(x, count, rows);

  float* const row = rows + threadIdx.x * kPadded;
  const unsigned first = threadIdx.x * kEntries, there = first >= count             ? 0
                                                         : count - first < kEntries ? count - first
                                                                                    : kEntries;
  uint32_t largest = 0;
  bool equal = true;
  UNROLLED for (unsigned i = 0; i < kEntries; ++i) {
    const uint32_t magnitude = magnitude_key(row[i]);
    largest = magnitude > largest ? magnitude : largest;
    equal = equal && (i >= there || bits_of(row[i]) == bits_of(row[0]));
  }
  const uint32_t scale = scale_above(largest);
  const bool constant = equal && scale != kInfiniteScale;
  if (!constant) atomicMax(&top, scale);
  __syncthreads();
  const int depth = top == kInfiniteScale ? kEmpty : !constant ? depth_of(scale, top) : largest != 0 ? kConstant : kEmpty;
  depths[threadIdx.x] = static_cast<uint8_t>(depth);
  __syncthreads();
  const int height = top == kInfiniteScale ? 0 : find_height(static_cast<int>(budget), depths, groups);
  if (threadIdx.x == 0) own[0] = block_head(top, height);
  // Threads behind the last group have no entries, and write the bytes that fill up the last word.
  if (threadIdx.x < (groups + 3) / 4 * 4) reinterpret_cast<uint8_t*>(own + 1)[threadIdx.x] = static_cast<uint8_t>(depth);

  const int width = width_of(height, depth);
  uint32_t total;
  uint32_t* const to = codes + block_exclusive_sum<kThreads>(static_cast<uint32_t>(width), total);
  if (depth == kConstant) {
    to[0] = bits_of(row[0]);
    for (unsigned i = 0; i < kEntries; ++i) row[i] = 0;
  } else if (depth != kEmpty) {
    const EvenLevels levels(top - static_cast<uint32_t>(depth), width);
    const float most = static_cast<float>(levels.top), rounding = most + kRounding;
    uint32_t planes[8] = {};
    UNROLLED for (unsigned i = 0; i < kEntries; ++i) {
      float number = row[i] * levels.per_step;
      number = number > most ? most : number;
      number = number < -most ? -most : number;
      const float sum = number + rounding;
      planes[i % 8] |= (bits_of(sum) - bits_of(kRounding)) << (i / 8 * 8);
      row[i] -= (sum - rounding) * levels.step;
    }
    turn(planes);
    UNROLLED for (int bit = 0; bit < 8; ++bit) {
      if (bit < width) to[bit] = planes[bit];
    }
  }
  for (unsigned i = total + threadIdx.x; i < budget; i += kThreads) codes[i] = 0;
  put_back(x, count, rows);
}

// This thread's group in a rank's payload. Words behind its codes are not read.
struct Group {
  uint32_t top;
  int depth, width;
  uint32_t words[8];

  // Add scale times its entries to a row.
  __device__ __forceinline__ void add_to(float* row, float scale) {
    if (depth == kConstant) {
      const float value = scale * float_of(words[0]);
      UNROLLED for (unsigned i = 0; i < kEntries; ++i) row[i] += value;
    } else if (depth != kEmpty) {
      turn(words);
      const EvenLevels levels(top - static_cast<uint32_t>(depth), width);
      UNROLLED for (unsigned i = 0; i < kEntries; ++i) {
        const auto code = static_cast<int>(words[i % 8] >> (i / 8 * 8) & 0xff);
        row[i] += scale * (static_cast<float>(code - levels.top) * levels.step);
      }
    }
  }
};

// Read this thread's groups in kAtOnce payloads from the first on, side by side, since each waits twice for memory: for the
// depths of its groups, and then for the codes, whose places follow from them. Groups of a block that is not sound, and those
// of payloads that are not there, are empty. `sent`, if it is given, is the only payload. Returns whether all blocks are sound.
template <int kAtOnce>
__device__ __forceinline__ bool read_groups(unsigned block, const Spans<const uint8_t>& payloads, const uint8_t* sent,
                                            int first, const Blocks& form, Group (&some)[kAtOnce]) {
  const auto groups = static_cast<unsigned>(Blocks::groups_of(form.entries(block)));
  const auto budget = static_cast<unsigned>(form.budget(groups));
  const uint32_t* codes[kAtOnce];
  UNROLLED for (int i = 0; i < kAtOnce; ++i) {
    const bool there = kAtOnce == 1 || first + i < (sent != nullptr ? 1 : payloads.count);
    const uint8_t* const payload = sent != nullptr ? sent : payloads.data[there ? first + i : first];
    const uint32_t* const own = reinterpret_cast<const uint32_t*>(payload + kHeaderBytes) + form.at(block);
    codes[i] = own + Blocks::codes_at(groups);
    some[i].top = top_of(own[0]);
    some[i].depth = there && threadIdx.x < groups ? reinterpret_cast<const uint8_t*>(own + 1)[threadIdx.x] : kEmpty;
    some[i].width = width_of(height_of(own[0]), some[i].depth);
  }
  // Two widths share a word: their sums stay below 2^16.
  uint32_t widths = 0, totals;
  UNROLLED for (int i = 0; i < kAtOnce; ++i) widths |= static_cast<uint32_t>(some[i].width) << 16 * i;
  const uint32_t befores = block_exclusive_sum<kThreads>(widths, totals);
  bool sound = true;
  UNROLLED for (int i = 0; i < kAtOnce; ++i) {
    const bool fits = some[i].depth >= kConstant || some[i].depth + kLeastScale <= some[i].top;
    const bool own_sound =
        __syncthreads_or(!fits) == 0 && some[i].top < kInfiniteScale && (totals >> 16 * i & 0xffff) <= budget;
    sound = sound && own_sound;
    if (!own_sound) some[i].depth = kEmpty, some[i].width = 0;
    codes[i] += befores >> 16 * i & 0xffff;
  }
  UNROLLED for (int i = 0; i < kAtOnce; ++i) {
    UNROLLED for (int bit = 0; bit < 8; ++bit) some[i].words[bit] = bit < some[i].width ? codes[i][bit] : 0;
  }
  return sound;
}

__device__ __forceinline__ bool is_flagged(const uint8_t* payload) { return reinterpret_cast<const int32_t*>(payload)[1] != 0; }

// Add all payloads to the entries of a block, in order; or what this rank has sent alone, which never spoils the target.
template <int kAtOnce>
__device__ __forceinline__ void add_to_block(unsigned block, float* target, const Spans<const uint8_t>& payloads,
                                             const uint8_t* sent, const Blocks& form, float scale, float* rows) {
  const auto count = static_cast<unsigned>(form.entries(block));
  float* const x = target + form.begin(block);
  // Other blocks may make the first entry NaN meanwhile.
  const bool is_watched = block == 0 && sent == nullptr;
  fetch(x, count, rows, is_watched ? 1 : 0);
  if (is_watched && threadIdx.x == 0) rows[0] = *static_cast<volatile float*>(target);
  bool sound = true;
  for (int first = 0; first < (sent != nullptr ? 1 : payloads.count); first += kAtOnce) {
    Group some[kAtOnce];
    sound = read_groups(block, payloads, sent, first, form, some) && sound;
    if (is_watched) {
      for (int i = first; i < payloads.count && i < first + kAtOnce; ++i) sound = sound && !is_flagged(payloads.data[i]);
    }
    UNROLLED for (int i = 0; i < kAtOnce; ++i) some[i].add_to(rows + threadIdx.x * kPadded, scale);
  }
  put_back(x, count, rows, is_watched ? 1 : 0);
  if (threadIdx.x != 0 || sent != nullptr) return;
  if (!sound) {
    spoil({target, form.n}, {});
  } else if (is_watched) {
    change_first(target, [&](float) { return rows[0]; });
  }
}

// If a residual is given, the last block settles: it puts what this rank has sent back, block by block.
template <int kAtOnce>
__global__ void __launch_bounds__(kThreads, kBlocks)
    add(float* target, const __grid_constant__ Spans<const uint8_t> payloads, const __grid_constant__ Blocks form, float scale,
        float* residual, const uint8_t* own, uint32_t* ticket) {
  __shared__ float rows[kThreads * kPadded];
  const uint8_t* sent = nullptr;
  for (unsigned block = blockIdx.x; block < gridDim.x;) {
    add_to_block<kAtOnce>(block, sent == nullptr ? target : residual, payloads, sent, form, sent == nullptr ? scale : 1.0f,
                          rows);
    ++block;
    if (sent != nullptr) continue;
    if (residual == nullptr || !is_last_block(ticket, gridDim.x) || is_finite(__ldcg(target))) return;
    sent = own;
    block = 0;
  }
}

__global__ void __launch_bounds__(kThreads) settle(float* residual, const __grid_constant__ Spans<const uint8_t> own,
                                                   const __grid_constant__ Blocks form, const float* update) {
  __shared__ float rows[kThreads * kPadded];
  if (!is_finite(update[0])) add_to_block<1>(blockIdx.x, residual, own, own.data[0], form, 1.0f, rows);
}

// Read a payload's block into pieces.
__global__ void __launch_bounds__(kThreads) read(const __grid_constant__ Spans<const uint8_t> payload,
                                                 const __grid_constant__ Blocks form, const __grid_constant__ Pieces to) {
  __shared__ float rows[kThreads * kPadded];
  Group some[1];
  const bool sound = read_groups(blockIdx.x, payload, nullptr, 0, form, some) && !is_flagged(payload.data[0]);
  float* const row = rows + threadIdx.x * kPadded;
  for (unsigned i = 0; i < kEntries; ++i) row[i] = 0;
  some[0].add_to(row, 1);
  if (threadIdx.x == 0 && !sound) row[0] = not_a_number();
  __syncthreads();
  for_each_run<kThreads>(to, [&](int piece, int64_t entry, int count) {
    const auto at = static_cast<unsigned>(entry - form.begin(blockIdx.x));
    Four four;
    for (unsigned j = 0; j < 4; ++j) four.x[j] = j < static_cast<unsigned>(count) ? rows[row_place(at + j)] : 0;
    write_piece<false>(to, piece, entry, count, four);
  });
}

}  // namespace

void take_blocks(Span<float> residual, OptionalSpan<const int32_t> flag, int64_t bits, Span<uint8_t> payload, Queue queue) {
  const Blocks form{residual.size, bits};
  auto* const words = reinterpret_cast<uint32_t*>(payload.data + kHeaderBytes);
  LAUNCH(take, blocks_for(form.count(), 1), kThreads, 0, queue, residual.data, flag.data, form,
         reinterpret_cast<int32_t*>(payload.data), words);
}

void add_and_settle_blocks(Span<float> target, const Spans<const uint8_t>& payloads, int64_t bits, float scale,
                           Span<float> residual, Span<const uint8_t> own, Span<uint32_t> counters, Queue queue) {
  const Blocks form{target.size, bits};
  const auto add_them = payloads.count == 1 ? add<1> : add<2>;
  LAUNCH(add_them, blocks_for(form.count(), 1), kThreads, 0, queue, target.data, payloads, form, scale, residual.data, own.data,
         counters.data);
}

void add_blocks(Span<float> target, const Spans<const uint8_t>& payloads, int64_t bits, float scale, Queue queue) {
  add_and_settle_blocks(target, payloads, bits, scale, {}, {}, {}, queue);
}

void read_blocks(Span<const uint8_t> payload, int64_t bits, const Pieces& to, Queue queue) {
  const Blocks form{to.size(), bits};
  LAUNCH(read, blocks_for(form.count(), 1), kThreads, 0, queue, Spans(payload), form, to);
}

void settle_blocks(Span<float> residual, Span<const uint8_t> own, int64_t bits, Span<const float> update, Queue queue) {
  const Blocks form{residual.size, bits};
  LAUNCH(settle, blocks_for(form.count(), 1), kThreads, 0, queue, residual.data, Spans(own), form, update.data);
}

}  // namespace gradcomp::cuda
