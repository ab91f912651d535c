// Sparse entries in 32 bits, on a GPU: packing, adding up, and putting back. One launch each, with a block of threads for every
// 2^16 entries of the bucket, which finds its part of the payload by itself.
//
// Bytes an entry of the payload: pack_sparse and unpack_sparse 12, add_packed and settle_packed 4. The entries of the bucket
// that are written to cost a scattered read and write of 4 each.

#include "../math.h"
#include "../ops.h"
#include "block.cuh"
#include "launch.cuh"
#include "thread_add.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 512;

// Find the largest x of all threads.
__device__ __forceinline__ uint32_t block_max(uint32_t x) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  for (unsigned step = 1; step < kWarp; step *= 2) x = max(x, __shfl_xor_sync(kWholeWarp, x, step));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) atomicMax(&largest, x);
  __syncthreads();
  return largest;
}

__global__ void __launch_bounds__(kThreads) pack_blocks(Span<const float> values, const int32_t* indices, const int32_t* header,
                                                        float* residual, uint32_t* blocks, uint32_t* entries) {
  const auto there = static_cast<uint32_t>(header[0] < 0 ? 0 : entries_there(header[0], values.size));
  const auto part_begin = [&](uint32_t low, uint32_t b) {
    return first_not(low, there, [&](uint32_t i) { return static_cast<uint32_t>(indices[i]) >> kBlockBits < b; });
  };
  const uint32_t begin = part_begin(0, blockIdx.x), end = part_begin(begin, blockIdx.x + 1);
  uint32_t largest = 0;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) largest = max(largest, magnitude_key(values.data[i]));
  largest = block_max(largest);
  if (threadIdx.x == 0) blocks[blockIdx.x] = begin == end ? 0 : block_word(end - begin, largest);
  const int exponent = exponent_of(largest);
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const float x = values.data[i];
    const auto index = static_cast<uint32_t>(indices[i]);
    const uint32_t entry = pack_entry(x, exponent, index);
    entries[i] = entry;
    if (residual != nullptr) residual[index] += x - entry_value(entry, exponent);
  }
}

// Call use(i, index, value) for the entries of this block's word. Returns false, in at least one thread of one block, if a use
// returned false or the payload is malformed. Entries are used up to the first block with an unsound word or with too many
// entries. Arbitrary bytes never make it touch anything outside the arrays.
template <class Use>
__device__ __forceinline__ bool for_block(Span<const uint32_t> blocks, Span<const uint32_t> entries, int32_t count,
                                          const Use& use) {
  if (count < 0) return blockIdx.x + threadIdx.x != 0;
  const auto there = static_cast<uint32_t>(entries_there(count, entries.size));
  uint32_t sum = 0;  // at most 2^31: 2^15 words that count up to 2^16 each
  bool sound = true;
  for (uint32_t b = threadIdx.x; b <= blockIdx.x; b += kThreads) {
    const BlockWord word = read_block_word(blocks.data[b]);
    sound = sound && word.sound;
    sum += word.sound ? word.count : 0;
  }
  uint32_t end;
  block_exclusive_sum<kThreads>(sum, end);
  if (__syncthreads_or(!sound) || end > there) return threadIdx.x != 0;
  const BlockWord word = read_block_word(blocks.data[blockIdx.x]);
  bool well_formed = blockIdx.x + 1 < gridDim.x || end == there;
  for (uint32_t i = end - word.count + threadIdx.x; i < end; i += kThreads) {
    const uint32_t entry = __ldg(entries.data + i);
    const uint32_t index = blockIdx.x << kBlockBits | (entry & (kBlockEntries - 1));
    well_formed &= use(i, index, entry_value(entry, word.exponent));
  }
  return well_formed;
}

__device__ bool add_block(Span<float> target, Span<uint8_t> marks, Span<const uint32_t> blocks, Span<const uint32_t> entries,
                          int32_t count, float scale) {
  return for_block(blocks, entries, count,
                   [&](uint32_t, uint32_t index, float x) { return add_at(target, marks, index, scale * x); });
}

__global__ void __launch_bounds__(kThreads)
    unpack_blocks(Span<const uint32_t> blocks, Span<const uint32_t> entries, int32_t* header, float* values, int32_t* indices) {
  const bool well_formed = for_block(blocks, entries, header[0], [&](uint32_t i, uint32_t index, float x) {
    values[i] = x;
    indices[i] = static_cast<int32_t>(index);
    return true;
  });
  if (!well_formed) header[1] = 1;
}

// Add rank by rank. No other block adds to this block's entries.
__global__ void __launch_bounds__(kThreads)
    add_blocks(Span<float> target, Span<uint8_t> marks, const __grid_constant__ Spans<const uint32_t> blocks,
               const __grid_constant__ Spans<const uint32_t> entries, const __grid_constant__ Spans<const int32_t> headers,
               float scale) {
  for (int rank = 0; rank < headers.count; ++rank) {
    const int32_t* header = headers.data[rank];
    const bool flagged = header[1] != 0;
    const bool well_formed = flagged ? blockIdx.x + threadIdx.x != 0
                                     : add_block(target, marks, {blocks.data[rank], blocks.size},
                                                 {entries.data[rank], entries.size}, header[0], scale);
    if (!well_formed) spoil(target, marks);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads)
    settle_blocks(Span<float> residual, Span<const uint32_t> blocks, Span<const uint32_t> entries, const int32_t* header,
                  const float* update, float keep) {
  const float share = share_to_keep(update, keep);
  if (share != 0) add_block(residual, {}, blocks, entries, header[0], share);
}

}  // namespace

void pack_sparse(OptionalSpan<float> residual, Span<const float> values, Span<const int32_t> indices,
                 Span<const int32_t> header, Span<uint32_t> blocks, Span<uint32_t> entries, Queue queue) {
  LAUNCH(pack_blocks, static_cast<unsigned>(blocks.size), kThreads, 0, queue, values, indices.data, header.data, residual.data,
         blocks.data, entries.data);
}

void unpack_sparse(Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<const uint32_t> blocks,
                   Span<const uint32_t> entries, Queue queue) {
  LAUNCH(unpack_blocks, static_cast<unsigned>(blocks.size), kThreads, 0, queue, blocks, entries, header.data, values.data,
         indices.data);
}

void add_packed(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, float scale, Queue queue) {
  LAUNCH(add_blocks, blocks_for(target.size, kBlockEntries), kThreads, 0, queue, target, marks, blocks, entries, headers,
         scale);
}

void settle_packed(Span<float> residual, Span<const uint32_t> blocks, Span<const uint32_t> entries, Span<const int32_t> header,
                   Span<const float> update, float keep, Queue queue) {
  LAUNCH(settle_blocks, blocks_for(residual.size, kBlockEntries), kThreads, 0, queue, residual, blocks, entries, header.data,
         update.data, keep);
}

}  // namespace gradcomp::cuda
