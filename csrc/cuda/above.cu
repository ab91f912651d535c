// Taking the entries above their layer's threshold, on a GPU.
//
//   mark_passing         a bit for each entry that passes, and their number
//   take_or_list         moves all entries that pass out, if the capacity is enough, and the other kernels return at once;
//                        otherwise lists their indices, in order, if they are not too many
//   count_digits         three times: the digits of the key of the last entry within the capacity, from the list
//   count_taken, take_chosen   a tile's entries above that key, and equal to it; then each goes to its place in the payload
//
// The last five read all entries if those that pass are too many for the list. Seven launches and one memset. Bytes an entry of
// the bucket: 4.3, and 24 for a taken one, or about 45 for a listed one; 24 without a list.

#include "../math.h"
#include "../ops.h"
#include "device_select.cuh"
#include "thread_residual.cuh"

namespace gradcomp::cuda {
namespace {

// The key of an entry: its magnitude if that exceeds the layer's threshold, otherwise 0.
struct Passing {
  const int32_t* ends;
  const float* thresholds;
  uint32_t low, high;  // the entries that are asked about belong to these layers
  uint32_t threshold;  // of the low one

  // Mostly all entries belong to one layer, whose threshold is then at hand.
  __device__ __forceinline__ Passing over(uint32_t first, uint32_t last) const {
    Passing its = *this;
    its.low = first_not(low, high, [&](uint32_t i) { return static_cast<uint32_t>(ends[i]) <= first; });
    its.high = its.low;
    if (static_cast<uint32_t>(ends[its.low]) <= last) {
      its.high = first_not(its.low, high, [&](uint32_t i) { return static_cast<uint32_t>(ends[i]) <= last; });
    }
    its.threshold = magnitude_key(thresholds[its.low]);
    return its;
  }

  __device__ __forceinline__ uint32_t operator()(float x, uint32_t index) const {
    const uint32_t least = low == high ? threshold : magnitude_key(thresholds[layer_of(index)]);
    const uint32_t key = magnitude_key(x);
    return key > least ? key : 0;
  }

  // The first layer that ends behind the entry, which is never an empty one.
  __device__ __forceinline__ uint32_t layer_of(uint32_t index) const {
    uint32_t begin = low, end = high;
    while (begin < end) {
      const uint32_t middle = (begin + end) / 2;
      if (static_cast<uint32_t>(ends[middle]) <= index) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return end;
  }
};

__global__ void __launch_bounds__(kThreads)
    mark_passing(ResidualReader reader, MovingHand hand, uint32_t n, Passing passing, uint32_t capacity, Plan plan) {
  const uint32_t tile = blockIdx.x * kTile;
  const Passing its = passing.over(tile, n - tile < kTile ? n - 1 : tile + kTile - 1);
  const auto passes = [least = its.threshold](float x) { return magnitude_key(x) > least; };
  const auto passes_at = [&](float x, uint32_t index) { return its(x, index) != 0; };
  if (!mark_tile(reader, n, plan, its.low == its.high, passes, passes_at)) return;
  const uint32_t found = scan_in_place<kThreads>(plan.tile_listed, gridDim.x);
  if (threadIdx.x != 0) return;
  const bool listed = found <= plan.longest_list;
  *plan.choice = {0, capacity, found <= capacity ? 0 : listed ? found : n, listed ? 1u : 0u};
  hand.announce(found);
}

__global__ void __launch_bounds__(kThreads) take_or_list(MovingHand hand, Plan plan) {
  if (plan.choice->sources == 0) {
    for_each_marked(plan, [&](uint32_t place, uint32_t index) { hand.take(place, index, hand.residual[index]); });
  } else if (plan.choice->listed != 0) {
    for_each_marked(plan, [&](uint32_t place, uint32_t index) { plan.list[place] = index; });
  }
}

}  // namespace

int64_t take_above_scratch(int64_t n, int64_t capacity) { return Plan(n, capacity, nullptr).words; }

void take_above(Span<float> residual, OptionalSpan<float> velocity, OptionalSpan<uint8_t> sent_in, int64_t step,
                OptionalSpan<const int32_t> flag, OptionalSpan<const uint32_t> /* peaks */, Span<const int32_t> ends,
                Span<const float> thresholds, Span<float> values, Span<int32_t> indices, Span<int32_t> header,
                Span<uint32_t> scratch, Queue queue) {
  const Plan plan(residual.size, values.size, scratch.data);
  const auto n = static_cast<uint32_t>(residual.size);
  const auto capacity = static_cast<uint32_t>(values.size < residual.size ? values.size : residual.size);
  const unsigned tiles = blocks_for(n, kTile);
  const ResidualReader reader = {residual.data};
  const MovingHand hand = {residual.data, {velocity.data, sent_in.data, static_cast<uint8_t>(step)},
                           values.data,   indices.data,
                           flag.data,     header.data};
  const Passing passing = {ends.data, thresholds.data, 0, static_cast<uint32_t>(ends.size - 1), 0};
  const auto count_first = count_digits<ResidualReader, Passing, kFirstDigits>;

  CUDA_TRY(cudaMemsetAsync(scratch.data, 0, plan.zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  LAUNCH(mark_passing, tiles, kThreads, 0, queue, reader, hand, n, passing, capacity, plan);
  LAUNCH(take_or_list, tiles, kThreads, 0, queue, hand, plan);
  LAUNCH(count_first, source_blocks(n), kThreads, 0, queue, reader, passing, kFirstShift, plan.first_counts, plan.tickets + 0,
         plan);
  choose_and_take(reader, hand, n, passing, plan, queue);
}

}  // namespace gradcomp::cuda
