// The k entries of largest magnitude, on a GPU: the launches that take_topk and heaviest share.
//
//   count_first_digits   a histogram of all keys' leading 11 bits; the digits of the k-th key and how many entries reach them
//   mark_candidates      a bit for each entry that reaches these digits
//   list_candidates      their indices, in order, from the bits
//   count_digits         twice: the remaining digits, from the candidates only
//   count_taken, take_chosen   a tile's entries above the k-th key, and equal to it; then each goes to its place in the hand
//
// The last four read all entries if the candidates are too many for the list (many equal entries, or k near n).
// Seven launches and one memset.
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
  __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  clear_digits<kThreads, kFirstDigits>(counts);
  for (int64_t tile = int64_t{blockIdx.x} * kTile; tile < n; tile += int64_t{gridDim.x} * kTile) {
    const auto count = [&](const Four& four, int) {
      for (const float x : four.x) count_digit<kFirstDigits>(counts, magnitude_key(x) >> kFirstShift);
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
  *plan.choice = {picked.digit << kFirstShift, k - picked.above, listed ? candidates : n, listed ? 1u : 0u};
  hand.announce(k);
}

template <class Reader>
static __global__ void __launch_bounds__(kThreads)
    mark_candidates(const __grid_constant__ Reader reader, uint32_t n, Plan plan) {
  if (plan.choice->listed == 0) return;
  const uint32_t least = plan.choice->digits;
  const auto reaches = [least](float x, uint32_t = 0) { return magnitude_key(x) >= least; };
  if (mark_tile(reader, n, plan, true, reaches, reaches)) scan_in_place<kThreads>(plan.tile_listed, gridDim.x);
}

static __global__ void __launch_bounds__(kThreads) list_candidates(Plan plan) {
  if (plan.choice->listed == 0) return;
  for_each_marked(plan, [&](uint32_t place, uint32_t index) { plan.list[place] = index; });
}

template <class Reader, class Hand>
static void take_largest(const Reader& reader, Hand hand, int64_t n, int64_t k, Span<uint32_t> scratch, Queue queue) {
  const Plan plan(n, k, scratch.data);
  const auto entries = static_cast<uint32_t>(n), wanted = static_cast<uint32_t>(k);
  const unsigned tiles = blocks_for(n, kTile);
  const unsigned blocks = tiles < kMostBlocks ? tiles : kMostBlocks;
  const auto count_first = count_first_digits<Reader, Hand>;

  CUDA_TRY(cudaMemsetAsync(scratch.data, 0, plan.zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  LAUNCH(count_first, blocks, kThreads, 0, queue, reader, hand, entries, wanted, plan);
  LAUNCH(mark_candidates<Reader>, tiles, kThreads, 0, queue, reader, entries, plan);
  LAUNCH(list_candidates, tiles, kThreads, 0, queue, plan);
  choose_and_take(reader, hand, n, Magnitude{}, plan, queue);
}

}  // namespace gradcomp::cuda
