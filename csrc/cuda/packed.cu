// Packed sparse entries on a GPU: packing, adding up, and putting back. A block of threads for every 2^16 entries of the bucket
// finds its part of the payload by itself. Packing takes another launch, with a thread for each word of the payload.
//
// Bytes an entry of the payload, which is some 2 bytes an entry itself: pack_sparse 20, unpack_sparse 10, add_packed and
// settle_packed 2. The entries of the bucket that are written to cost a scattered read and write of 4 each. Where nothing of
// what was sent stays, the last block that adds settles: a ticket a block, predicted 1 us a launch in a good step; alone, it
// takes some 1 us for each 2^16 entries of the bucket in a failed one.

#include "../math_packed.h"
#include "../math_payload.h"
#include "../ops.h"
#include "block.cuh"
#include "device_pack.cuh"
#include "launch.cuh"
#include "thread_add.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 512;
// The bits of the row of high parts that a thread reads at once.
constexpr unsigned kBits = 8;

__device__ __forceinline__ uint32_t count_in(const int32_t* header, const Packing& to) {
  return static_cast<uint32_t>(header[0] < 0 ? 0 : entries_there(header[0], to.values.size));
}

__global__ void __launch_bounds__(kThreads) pack_blocks(const __grid_constant__ Packing to, const int32_t* header) {
  pack_block<kThreads>(to, count_in(header, to), blockIdx.x);
}

__global__ void __launch_bounds__(kThreads) pack_words(const __grid_constant__ Packing to, const int32_t* header) {
  const int64_t w = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (w < to.entries.size) pack_word(to, count_in(header, to), w);
}

// The number of a payload's entries up to the end of this block's, if all words up to its own are sound.
struct Offset {
  uint32_t end;  // at most 2^31: 2^15 words that count up to 2^16 each
  bool sound;
};

// Sum the words up to this block's that are this thread's, one of `threads`. A few are read before the first is used.
__device__ __forceinline__ Offset sum_words(const uint32_t* blocks, uint32_t thread, uint32_t threads) {
  constexpr uint32_t kEach = 8;
  Offset mine = {0, true};
  for (uint32_t first = thread; first <= blockIdx.x; first += kEach * threads) {
    uint32_t words[kEach];
    UNROLLED for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t b = first + i * threads;
      words[i] = b <= blockIdx.x ? blocks[b] : 0;  // sound, and without entries
    }
    UNROLLED for (uint32_t i = 0; i < kEach; ++i) {
      const BlockWord word = read_block_word(words[i]);
      mine.sound = mine.sound && word.sound;
      mine.end += word.sound ? word.count : 0;
    }
  }
  return mine;
}

__device__ __forceinline__ Offset offset_in(const uint32_t* blocks) {
  const Offset mine = sum_words(blocks, threadIdx.x, kThreads);
  Offset all;
  block_exclusive_sum<kThreads>(mine.end, all.end);
  all.sound = !__syncthreads_or(!mine.sound);
  return all;
}

// Call use(i, index, value) for the entries of a block's word. Returns false, in at least one thread of one block, if a use
// returned false or the payload is malformed. Entries are used up to the first block with an unsound word or with too many
// entries. Arbitrary bytes never make it touch anything outside the arrays.
template <class Use>
__device__ __forceinline__ bool for_block(uint32_t block, const Packed& form, const uint32_t* blocks, const uint32_t* entries,
                                          int32_t count, const Offset& offset, const Use& use) {
  if (count < 0) return block + threadIdx.x != 0;
  const auto there = static_cast<uint32_t>(entries_there(count, form.capacity));
  const uint32_t end = offset.end;
  if (!offset.sound || end > there) return threadIdx.x != 0;
  const BlockWord word = read_block_word(blocks[block]);
  const uint32_t begin = end - word.count, highs = form.highs_in(block), length = highs + word.count;
  const int64_t first = form.highs_before(block) + begin;
  bool well_formed = block + 1 < gridDim.x || end == there;
  uint32_t before = 0;
  for (uint32_t round = 0; round < length; round += kThreads * kBits) {
    const uint32_t at = round + threadIdx.x * kBits;
    uint32_t bits = at < length ? bits_at(entries, first + at, static_cast<int>(min(kBits, length - at))) : 0;
    uint32_t in_round;
    uint32_t found = before + block_exclusive_sum<kThreads>(static_cast<uint32_t>(__popc(bits)), in_round);
    for (; bits != 0; bits &= bits - 1, ++found) {
      const uint32_t high = at + static_cast<uint32_t>(__ffs(static_cast<int>(bits))) - 1 - found;
      if (found >= word.count || high >= highs) {
        well_formed = false;
        break;
      }
      const uint32_t code = form.code_at(entries, begin + found);
      well_formed &= use(begin + found, form.index_of(block, high, code), form.value_of(code, word.exponent));
    }
    before += in_round;
  }
  return well_formed && before == word.count;
}

__device__ bool add_block(uint32_t block, Span<float> target, Span<uint8_t> marks, const uint32_t* blocks,
                          const uint32_t* entries, const Packed& form, int32_t count, const Offset& offset, float scale) {
  return for_block(block, form, blocks, entries, count, offset,
                   [&](uint32_t, int64_t index, float x) { return add_at(target, marks, index, scale * x); });
}

__global__ void __launch_bounds__(kThreads) unpack_blocks(const Packed form, const uint32_t* blocks, const uint32_t* entries,
                                                          int32_t* header, float* values, int32_t* indices) {
  const bool well_formed =
      for_block(blockIdx.x, form, blocks, entries, header[0], offset_in(blocks), [&](uint32_t i, int64_t index, float x) {
        values[i] = x;
        indices[i] = static_cast<int32_t>(index);
        return index < form.n;
      });
  if (!well_formed) header[1] = 1;
}

// What a failed exchange puts back: what this rank has sent, if the residual is given. Also the place for a copy of the first
// entry, if it is given, and the ticket of those that add.
struct Repair {
  Span<float> residual;
  const uint32_t* blocks;
  const uint32_t* entries;
  const int32_t* header;
  float* first;
  uint32_t* ticket;
};

// Put all blocks' entries back, by the one block that calls this.
__device__ void put_back(const Repair& own, const Packed& form) {
  Offset offset = {0, true};
  for (uint32_t block = 0; block < gridDim.x; ++block) {
    const BlockWord word = read_block_word(own.blocks[block]);
    offset.sound = offset.sound && word.sound;
    offset.end += word.sound ? word.count : 0;
    add_block(block, own.residual, {}, own.blocks, own.entries, form, own.header[0], offset, 1.0f);
  }
}

// Add rank by rank. No other block adds to this block's entries, and a rank's begin to be added after a sum that all threads
// have come to, once those of the rank before are there. Each warp first finds the offsets of some ranks, so that no rank waits
// for them.
__global__ void __launch_bounds__(kThreads)
    add_packed_blocks(Span<float> target, Span<uint8_t> marks, const __grid_constant__ Spans<const uint32_t> blocks,
                      const __grid_constant__ Spans<const uint32_t> entries,
                      const __grid_constant__ Spans<const int32_t> headers, const Packed form, float scale, Repair own) {
  __shared__ Offset offsets[Spans<const uint32_t>::kMost];
  for (unsigned rank = threadIdx.x / kWarp; rank < static_cast<unsigned>(headers.count); rank += kThreads / kWarp) {
    const Offset mine = sum_words(blocks.data[rank], threadIdx.x % kWarp, kWarp);
    const Offset all = {warp_inclusive_sum(mine.end), __all_sync(kWholeWarp, mine.sound) != 0};
    if (threadIdx.x % kWarp == kWarp - 1) offsets[rank] = all;
  }
  __syncthreads();
  for (int rank = 0; rank < headers.count; ++rank) {
    const int32_t* header = headers.data[rank];
    const bool flagged = header[1] != 0;
    const bool well_formed = flagged ? blockIdx.x + threadIdx.x != 0
                                     : add_block(blockIdx.x, target, marks, blocks.data[rank], entries.data[rank], form,
                                                 header[0], offsets[rank], scale);
    if (!well_formed) spoil(target, marks);
  }
  if (own.ticket == nullptr || !is_last_block(own.ticket, gridDim.x)) return;
  const float first = __ldcg(target.data);
  if (own.first != nullptr && threadIdx.x == 0) *own.first = first;
  if (own.residual.data != nullptr && !is_finite(first)) put_back(own, form);
}

__global__ void __launch_bounds__(kThreads)
    settle_packed_blocks(Span<float> residual, const uint32_t* blocks, const uint32_t* entries, const int32_t* header,
                         const float* update, const Packed form, float keep) {
  const float share = share_to_keep(update, keep);
  if (share != 0) add_block(blockIdx.x, residual, {}, blocks, entries, form, header[0], offset_in(blocks), share);
}

}  // namespace

void pack_sparse(OptionalSpan<float> residual, Span<const float> values, Span<const int32_t> indices,
                 Span<const int32_t> header, int64_t n, Span<uint32_t> blocks, Span<uint32_t> entries, Queue queue) {
  const Packing to = {Packed(n, values.size), values, indices.data, residual.data, blocks, entries};
  LAUNCH(pack_blocks, static_cast<unsigned>(blocks.size), kThreads, 0, queue, to, header.data);
  LAUNCH(pack_words, blocks_for(entries.size, kThreads), kThreads, 0, queue, to, header.data);
}

void unpack_sparse(Span<float> values, Span<int32_t> indices, Span<int32_t> header, int64_t n, Span<const uint32_t> blocks,
                   Span<const uint32_t> entries, Queue queue) {
  LAUNCH(unpack_blocks, static_cast<unsigned>(blocks.size), kThreads, 0, queue, Packed(n, values.size), blocks.data,
         entries.data, header.data, values.data, indices.data);
}

void add_and_settle(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                    const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, int64_t capacity, float scale,
                    Span<float> residual, const OwnPacked& own, float keep, float* first, uint32_t* ticket, Queue queue) {
  const Repair repair = {
      keep == 0 ? residual : Span<float>{}, own.blocks.data, own.entries.data, own.header.data, first, ticket};
  LAUNCH(add_packed_blocks, blocks_for(target.size, kBlockEntries), kThreads, 0, queue, target, marks, blocks, entries, headers,
         Packed(target.size, capacity), scale, repair);
  if (keep == 0) return;
  settle_packed(residual, own.blocks, own.entries, own.header, {target.data, target.size}, capacity, keep, queue);
}

void add_packed(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, int64_t capacity, float scale,
                Queue queue) {
  add_and_settle(target, marks, blocks, entries, headers, capacity, scale, {}, {}, 0, nullptr, nullptr, queue);
}

void settle_packed(Span<float> residual, Span<const uint32_t> blocks, Span<const uint32_t> entries, Span<const int32_t> header,
                   Span<const float> update, int64_t capacity, float keep, Queue queue) {
  LAUNCH(settle_packed_blocks, blocks_for(residual.size, kBlockEntries), kThreads, 0, queue, residual, blocks.data,
         entries.data, header.data, update.data, Packed(residual.size, capacity), keep);
}

}  // namespace gradcomp::cuda
