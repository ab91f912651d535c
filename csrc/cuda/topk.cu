// Exact top-k on a GPU.
//
//   count_first_digits   a histogram of all keys' leading 11 bits; the digits of the k-th key and how many entries reach them
//   mark_candidates      a bit for each entry that reaches these digits
//   list_candidates      their indices, in order, from the bits
//   count_digits         twice: the remaining digits, from the candidates only
//   count_taken, take_chosen   a tile's entries above the k-th key, and equal to it; then each finds its place and is moved out
//
// Where the candidates are too many for the list (many equal entries, or k near n) the last four read all entries instead.
// Seven launches and one memset. Bytes an entry of the bucket: 8.3, and 32 or so a candidate; 20 without a list.

#include "../math.h"
#include "../ops.h"
#include "select.cuh"

namespace gradcomp::cuda {
namespace {

struct Magnitude {
  __device__ __forceinline__ Magnitude over(uint32_t, uint32_t) const { return *this; }
  __device__ __forceinline__ uint32_t operator()(float x, uint32_t) const { return magnitude_key(x); }
};

__global__ void __launch_bounds__(kThreads)
    count_first_digits(const float* value, uint32_t n, uint32_t k, const int32_t* flag, int32_t* header, Plan plan) {
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
  header[0] = static_cast<int32_t>(k);
  header[1] = flag != nullptr ? *flag : 0;
}

__global__ void __launch_bounds__(kThreads) mark_candidates(const float* value, uint32_t n, Plan plan) {
  if (plan.choice->listed == 0) return;
  const uint32_t least = plan.choice->digits;
  const bool last = mark_tile(value, n, plan, [least](float x, uint32_t) { return magnitude_key(x) >= least; });
  if (last) scan_in_place<kThreads>(plan.tile_listed, gridDim.x);
}

__global__ void __launch_bounds__(kThreads) list_candidates(Plan plan) {
  if (plan.choice->listed == 0) return;
  for_each_marked(plan, [&](uint32_t place, uint32_t index) { plan.list[place] = index; });
}

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return Plan(n, k, nullptr).words; }

void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> /* peaks */, int64_t k,
               Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const Plan plan(value.size, k, scratch.data);
  EXPECTS(scratch.size >= plan.words, "take_topk: scratch has ", scratch.size, " words; ", plan.words, " are needed");
  const auto n = static_cast<uint32_t>(value.size), wanted = static_cast<uint32_t>(k);
  const unsigned tiles = blocks_for(n, kTile);
  const unsigned blocks = tiles < kMostBlocks ? tiles : kMostBlocks;

  CUDA_TRY(cudaMemsetAsync(scratch.data, 0, plan.zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  LAUNCH(count_first_digits, blocks, kThreads, 0, queue, value.data, n, wanted, flag.data, header.data, plan);
  LAUNCH(mark_candidates, tiles, kThreads, 0, queue, value.data, n, plan);
  LAUNCH(list_candidates, tiles, kThreads, 0, queue, plan);
  choose_and_take(n, {value.data, velocity.data, values.data, indices.data}, Magnitude{}, plan, queue);
}

}  // namespace gradcomp::cuda
