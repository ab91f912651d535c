// The k entries of largest magnitude, on a GPU: the launches of take_topk.
//
//   count_first_digits   a histogram of all keys' leading 11 bits; the digits of the k-th key and how many entries reach them;
//                        the largest key of each line
//   list_candidates      those entries and their indices, a tile's in order, from lines that have some; a histogram of their
//                        next digit
//   count_last_digits    the last digit, from the candidates only; each tile's number of chosen ones
//   count_taken          these numbers, if too many candidates are equal in all but the last digit
//   take_chosen          each chosen entry goes to its place in the hand
//
// The last four read all entries if the candidates are too many for the list (many equal entries, or k near n).
// Five launches and one memset.
#pragma once

#include "../math.h"
#include "device_select.cuh"

namespace gradcomp::cuda {

struct Magnitude {
  __device__ __forceinline__ Magnitude over(uint32_t, uint32_t) const { return *this; }
  __device__ __forceinline__ uint32_t operator()(float x, uint32_t) const { return magnitude_key(x); }
};

template <class Reader, class Hand>
static __global__ void __launch_bounds__(kThreads)
    count_first_digits(const __grid_constant__ Reader reader, Hand hand, uint32_t n, uint32_t k, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  clear_digits<kThreads, kFirstDigits>(counts);
  for (int64_t tile = int64_t{blockIdx.x} * kTile; tile < n; tile += int64_t{gridDim.x} * kTile) {
    uint32_t* const peaks = plan.peaks + (tile + 4 * threadIdx.x) / kLine;
    const auto count = [&](const Four& four, int number) {
      uint32_t keys[4];
      for (int i = 0; i < 4; ++i) {
        keys[i] = magnitude_key(four.x[i]);
        count_digit<kFirstDigits>(counts, keys[i] >> kFirstShift);
      }
      const uint32_t peak = peak_of_line(keys);
      if (threadIdx.x % kLineLanes == 0) peaks[number * (kThreads / kLineLanes)] = peak;
    };
    const auto& its = reader.over(tile);
    if (is_whole(its, tile, n)) {
      for_each_whole(its, tile, count);
    } else {
      for_each_there(its, tile, n, count);
    }
  }
  add_up_digits<kThreads, kFirstDigits>(counts, plan.first_counts);
  if (!is_last_block(plan.tickets + 0, gridDim.x)) return;
  pick_digit<kThreads, kFirstDigits>(plan.first_counts, k, &picked);
  if (threadIdx.x != 0) return;
  const uint32_t candidates = picked.digit == 0 ? n : picked.reach;
  const bool listed = candidates <= plan.longest_list;
  *plan.choice = {picked.digit << kFirstShift, k - picked.above, listed ? candidates : n, listed ? 1u : 0u, 0};
  hand.announce(k);
}

// Blocks that fit into a multiprocessor, by their registers.
template <class Reader>
constexpr int kBlocksOf = Reader::kBlocks;

template <class Reader>
static __global__ void __launch_bounds__(kThreads, kBlocksOf<Reader>)
    list_candidates(const __grid_constant__ Reader reader, uint32_t n, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kNextDigits>];
  __shared__ Digit picked;
  const uint32_t blocks = plan.choice->listed != 0 ? gridDim.x : blocks_with_work(plan);
  if (blockIdx.x >= blocks) return;
  const Choice choice = *plan.choice;
  clear_digits<kThreads, kNextDigits>(counts);
  if (choice.listed != 0) {
    const uint32_t marks = marks_by_peaks(reader, n, plan.peaks, [&](uint32_t key) { return key >= choice.digits; });
    list_tile(reader, marks, plan,
              [&](float x) { count_next<kNextDigits>(counts, magnitude_key(x), choice.digits, kNextBits); });
  } else {
    count_all<kNextDigits>(reader, Magnitude{}, choice, kNextBits, blocks, counts);
  }
  pick_next<kNextDigits>(counts, plan.next_counts, plan.tickets + 1, blocks, choice, kNextBits, plan, &picked);
}

template <class Reader, class Hand>
static void take_largest(const Reader& reader, Hand hand, int64_t n, int64_t k, Span<uint32_t> scratch, Queue queue) {
  const Plan plan(n, k, false, scratch.data);
  const auto entries = static_cast<uint32_t>(n), wanted = static_cast<uint32_t>(k);
  const unsigned tiles = blocks_for(n, kTile);
  const unsigned blocks = tiles < kMostBlocks ? tiles : kMostBlocks;
  const auto count_first = count_first_digits<Reader, Hand>;

  CUDA_TRY(cudaMemsetAsync(scratch.data, 0, plan.zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  LAUNCH(count_first, blocks, kThreads, 0, queue, reader, hand, entries, wanted, plan);
  LAUNCH(list_candidates<Reader>, tiles, kThreads, 0, queue, reader, entries, plan);
  choose_and_take(reader, hand, n, Magnitude{}, plan, queue);
}

}  // namespace gradcomp::cuda
