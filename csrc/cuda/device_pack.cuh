// A take's reads of a residual and its moves out of it, and packed sparse entries, as blocks of a launch write them
// (docs/wire.md). Values and indices may be other blocks' of the same launch, once all have met.
#pragma once

#include "../math_payload.h"
#include "block.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {

struct ResidualReader {
  const float* residual;

  __device__ __forceinline__ bool is_aligned() const { return cuda::is_aligned(residual); }
  __device__ __forceinline__ Four read_whole(int64_t entry) const { return load_whole(residual + entry); }
  __device__ __forceinline__ Four read(int64_t entry, int64_t count) const { return load_four(residual + entry, count); }
  __device__ __forceinline__ float at(uint32_t index) const { return residual[index]; }
};

struct MovingHand {
  float* residual;
  uint8_t* ages;
  float* values;
  int32_t* indices;
  const int32_t* flag;
  int32_t* header;

  __device__ __forceinline__ void announce(uint32_t found) const {
    header[0] = static_cast<int32_t>(found);
    header[1] = flag != nullptr ? *flag : 0;
  }

  __device__ __forceinline__ void take(uint32_t place, uint32_t index, float x) const {
    values[place] = x;
    indices[place] = static_cast<int32_t>(index);
    residual[index] = 0.0f;
    if (ages != nullptr) ages[index] = 0;
  }
};

// What is packed, and where to. The residual may be missing; blocks are where nothing is packed.
struct Packing {
  Packed form{1, 1};
  Span<const float> values;
  const int32_t* indices = nullptr;
  float* residual = nullptr;
  Span<uint32_t> blocks, entries;

  __device__ __forceinline__ uint32_t index(uint32_t i) const {
    const int32_t its = __ldcg(indices + i);
    return static_cast<uint32_t>(its);
  }
  __device__ __forceinline__ bool is_inside(uint32_t i) const { return form.is_inside(static_cast<int32_t>(index(i))); }
};

// Find the largest x of all threads.
static __device__ __forceinline__ uint32_t block_max(uint32_t x) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  for (unsigned step = 1; step < kWarp; step *= 2) x = max(x, __shfl_xor_sync(kWholeWarp, x, step));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) atomicMax(&largest, x);
  __syncthreads();
  const uint32_t found = largest;
  __syncthreads();  // the next call writes it
  return found;
}

// Write the word of a block of 2^16 entries, of which `there` travel in all, and put the rounding errors back.
template <unsigned kThreads>
static __device__ __forceinline__ void pack_block(const Packing& to, uint32_t there, uint32_t block) {
  const auto part_begin = [&](uint32_t low, uint32_t b) {
    return first_not(low, there, [&](uint32_t i) { return to.is_inside(i) && to.index(i) >> kBlockBits < b; });
  };
  const uint32_t begin = part_begin(0, block), end = part_begin(begin, block + 1);
  uint32_t largest = 0;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads)
    largest = max(largest, magnitude_key(__ldcg(to.values.data + i)));
  largest = block_max(largest);
  const uint32_t word = begin == end ? 0 : block_word(end - begin, largest);
  if (threadIdx.x == 0) to.blocks.data[block] = word;
  if (to.residual == nullptr) return;
  const int exponent = read_block_word(word).exponent;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const float x = __ldcg(to.values.data + i);
    float* const entry = to.residual + to.index(i);
    if (to.is_inside(i)) *entry = __ldcg(entry) + (x - coded_value(value_code(x, exponent), exponent));
  }
}

// Write a word of the row of high parts, or of the row of codes, from the entries whose bits are in it. Each bit i + high lies
// beyond the one before, so every thread halves its way to the first.
static __device__ __forceinline__ void pack_word(const Packing& to, uint32_t there, int64_t w) {
  const Packed& form = to.form;
  const int64_t high_words = form.high_words();
  uint32_t word = 0;
  if (w < high_words) {
    const auto bit = [&](uint32_t i) { return (to.index(i) >> form.low) + int64_t{i}; };
    const int64_t first = 32 * w;
    uint32_t from = 0;
    for (uint32_t end = there; from < end;) {
      const uint32_t middle = from + (end - from) / 2;
      if (bit(middle) < first) {
        from = middle + 1;
      } else {
        end = middle;
      }
    }
    for (uint32_t i = from; i < there; ++i) {
      const int64_t at = bit(i) - first;
      if (at >= 32 || !to.is_inside(i)) break;
      word |= 1u << at;
    }
  } else {
    const int64_t first = 32 * (w - high_words);
    const int width = form.width();
    for (int64_t i = first / width; i < there && i * width < first + 32 && to.is_inside(static_cast<uint32_t>(i)); ++i) {
      const uint32_t index = to.index(static_cast<uint32_t>(i));
      const uint32_t code = form.code(__ldcg(to.values.data + i), index,
                                      read_block_word(__ldcg(to.blocks.data + (index >> kBlockBits))).exponent);
      const int64_t shift = i * width - first;
      word |= shift < 0 ? code >> -shift : code << shift;
    }
  }
  to.entries.data[w] = word;
}

// Pack what all blocks of a launch have taken. `found` entries passed, of which as many are there as fit.
template <unsigned kThreads>
static __device__ __forceinline__ void pack_taken(const Packing& to, uint32_t found, Meeting& meeting) {
  if (to.blocks.size == 0) return;
  const auto there = static_cast<uint32_t>(entries_there(static_cast<int32_t>(found), to.values.size));
  meeting.wait();
  for (int64_t block = blockIdx.x; block < to.blocks.size; block += gridDim.x) {
    pack_block<kThreads>(to, there, static_cast<uint32_t>(block));
  }
  meeting.wait();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t w = int64_t{blockIdx.x} * kThreads + threadIdx.x; w < to.entries.size; w += step) pack_word(to, there, w);
}

inline Packing packing_of(Span<float> residual, const Taken& taken) {
  return {Packed(residual.size, taken.values.size),
          {taken.values.data, taken.values.size},
          taken.indices.data,
          residual.data,
          taken.blocks,
          taken.entries};
}

}  // namespace gradcomp::cuda
