// Taking what exceeds its layer's threshold, on a GPU.
//
//   mark_passing         a bit for each entry that passes, and how many do
//   take_or_list         where there is room for all that pass, they are moved out right away, and all that follows returns at
//                        once; otherwise their indices are listed, in order, if they are not too many
//   count_digits         three times: the digits of the key of the last one that there is room for, from the list
//   count_taken, take_chosen   a tile's entries above that key, and equal to it; then each finds its place and is moved out
//
// Where those that pass are too many for the list, the last five read all entries instead. Seven launches and one memset. Bytes
// an entry of the bucket: 4.3, and 24 for one that is taken, or 45 or so for one that is listed; 24 without a list.

#include "../math.h"
#include "../ops.h"
#include "bucket.cuh"
#include "select.cuh"

namespace gradcomp::cuda {
namespace {

// What passes: the key is the distance from the layer's center where that exceeds the threshold, otherwise 0.
struct Passing {
  const int32_t* ends;
  const float* centers;
  const float* thresholds;
  uint32_t low, high;  // the entries asked for are of these layers
  float center;        // of the low one
  uint32_t threshold;

  // Most often all are of one layer, whose numbers are then at hand.
  __device__ __forceinline__ Passing over(uint32_t first, uint32_t last) const {
    Passing its = *this;
    its.low = first_not(low, high, [&](uint32_t i) { return static_cast<uint32_t>(ends[i]) <= first; });
    its.high = its.low;
    if (static_cast<uint32_t>(ends[its.low]) <= last) {
      its.high = first_not(its.low, high, [&](uint32_t i) { return static_cast<uint32_t>(ends[i]) <= last; });
    }
    its.center = centers[its.low];
    its.threshold = magnitude_key(thresholds[its.low]);
    return its;
  }

  __device__ __forceinline__ uint32_t operator()(float x, uint32_t index) const {
    float from = center;
    uint32_t least = threshold;
    if (low != high) {
      const uint32_t layer = layer_of(index);
      from = centers[layer];
      least = magnitude_key(thresholds[layer]);
    }
    const uint32_t key = magnitude_key(x - from);
    return key > least ? key : 0;
  }

  // The first layer that ends behind the entry; empty ones never do.
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
    mark_passing(BucketReader reader, MovingHand hand, uint32_t n, Passing passing, uint32_t room, Plan plan) {
  const uint32_t tile = blockIdx.x * kTile;
  const Passing its = passing.over(tile, n - tile < kTile ? n - 1 : tile + kTile - 1);
  if (!mark_tile(reader, n, plan, [&](float x, uint32_t index) { return its(x, index) != 0; })) return;
  const uint32_t found = scan_in_place<kThreads>(plan.tile_listed, gridDim.x);
  if (threadIdx.x != 0) return;
  const bool listed = found <= plan.capacity;
  *plan.choice = {0, room, found <= room ? 0 : listed ? found : n, listed ? 1u : 0u};
  hand.announce(found);
}

__global__ void __launch_bounds__(kThreads) take_or_list(MovingHand hand, Plan plan) {
  if (plan.choice->sources == 0) {
    for_each_marked(plan, [&](uint32_t place, uint32_t index) { hand.take(place, index, hand.value[index]); });
  } else if (plan.choice->listed != 0) {
    for_each_marked(plan, [&](uint32_t place, uint32_t index) { plan.list[place] = index; });
  }
}

}  // namespace

int64_t take_above_scratch(int64_t n, int64_t room) { return Plan(n, room, nullptr).words; }

void take_above(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> /* peaks */,
                Span<const int32_t> ends, Span<const float> centers, Span<const float> thresholds, Span<float> values,
                Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const Plan plan(value.size, values.size, scratch.data);
  EXPECTS(scratch.size >= plan.words, "take_above: scratch has ", scratch.size, " words; ", plan.words, " are needed");
  const auto n = static_cast<uint32_t>(value.size);
  const auto room = static_cast<uint32_t>(values.size < value.size ? values.size : value.size);
  const unsigned tiles = blocks_for(n, kTile);
  const BucketReader reader = {value.data};
  const MovingHand hand = {value.data, velocity.data, values.data, indices.data, flag.data, header.data};
  const auto last_layer = static_cast<uint32_t>(ends.size - 1);
  const Passing passing = {ends.data, centers.data, thresholds.data, 0, last_layer, 0.0f, 0};
  const auto count_first = count_digits<BucketReader, Passing, kFirstDigits>;

  CUDA_TRY(cudaMemsetAsync(scratch.data, 0, plan.zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  LAUNCH(mark_passing, tiles, kThreads, 0, queue, reader, hand, n, passing, room, plan);
  LAUNCH(take_or_list, tiles, kThreads, 0, queue, hand, plan);
  LAUNCH(count_first, source_blocks(n), kThreads, 0, queue, reader, passing, kFirstShift, plan.first_counts, plan.tickets + 0,
         plan);
  choose_and_take(reader, hand, n, passing, plan, queue);
}

}  // namespace gradcomp::cuda
