// Taking the entries above their layer's threshold, on a GPU.
//
//   mark_passing         a bit for each entry that passes, and their number
//   take_or_list         moves all entries that pass out, if the capacity is enough, and the other kernels return at once;
//                        otherwise lists them in order, if they are not too many; a histogram of their keys' leading 11 bits
//   count_digits         the next digit of the key of the last entry within the capacity, from the list
//   count_last_digits, count_taken, take_chosen   as in topk.cu
//
// The last five read all entries if those that pass are too many for the list. Six launches and one memset. Bytes an entry of
// the bucket: 4.3, or 0.5 where peaks leave a tenth of the lines; 24 for a taken one, or about 60 for a listed one; 24 without
// a list.

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

__global__ void __launch_bounds__(kThreads) mark_passing(ResidualReader reader, MovingHand hand, uint32_t n, Passing passing,
                                                         uint32_t capacity, const uint32_t* peaks, Plan plan) {
  const uint32_t tile = blockIdx.x * kTile;
  const Passing its = passing.over(tile, n - tile < kTile ? n - 1 : tile + kTile - 1);
  const auto exceeds = [least = its.threshold](uint32_t key) { return key > least; };
  const auto passes = [&](float x) { return exceeds(magnitude_key(x)); };
  const auto passes_at = [&](float x, uint32_t index) { return its(x, index) != 0; };
  const bool alike = its.low == its.high;
  const uint32_t marks = alike && peaks != nullptr ? marks_by_peaks(reader, n, peaks, exceeds)
                                                   : marks_of_tile(reader, n, alike, passes, passes_at);
  uint32_t found;
  if (!note_marks(plan, marks, &found)) return;
  if (threadIdx.x != 0) return;
  const bool listed = found <= plan.longest_list;
  *plan.choice = {0, capacity, found <= capacity ? 0 : listed ? found : n, listed ? 1u : 0u, 0};
  hand.announce(found);
}

// Call use(place, index) for each entry of this block's tile that passes; its place is that among all. Returns their number.
template <class Use>
__device__ __forceinline__ uint32_t for_each_passing(const Plan& plan, Use use) {
  const uint32_t marks = plan.bits[blockIdx.x * kThreads + threadIdx.x];
  uint32_t total;
  uint32_t place = plan.tile_begin[blockIdx.x] + block_exclusive_sum<kThreads>(__popc(marks), total);
  for_each_bit(marks, [&](uint32_t bit) { use(place++, blockIdx.x * kTile + threadIdx.x * 32 + bit); });
  return total;
}

__global__ void __launch_bounds__(kThreads) take_or_list(ResidualReader reader, MovingHand hand, Passing passing, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  if (plan.choice->sources == 0) {
    for_each_passing(plan, [&](uint32_t place, uint32_t index) { hand.take(place, index, hand.residual[index]); });
    return;
  }
  const uint32_t blocks = plan.choice->listed != 0 ? gridDim.x : blocks_with_work(plan);
  if (blockIdx.x >= blocks) return;
  const Choice choice = *plan.choice;
  clear_digits<kThreads, kFirstDigits>(counts);
  if (choice.listed != 0) {
    const uint32_t found = for_each_passing(plan, [&](uint32_t place, uint32_t index) {
      const float x = hand.residual[index];
      plan.list[place] = index;
      plan.values[place] = x;
      count_digit<kFirstDigits>(counts, magnitude_key(x) >> kFirstShift);
    });
    if (threadIdx.x == 0) plan.tile_count[blockIdx.x] = found;
  } else {
    count_all<kFirstDigits>(reader, passing, choice, kFirstShift, blocks, counts);
  }
  pick_next<kFirstDigits>(counts, plan.first_counts, plan.tickets + 0, blocks, choice, kFirstShift, plan, &picked);
}

}  // namespace

int64_t take_above_scratch(int64_t n, int64_t capacity) { return Plan(n, capacity, true, nullptr).words; }

void take_above(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag,
                OptionalSpan<const uint32_t> peaks, Span<const int32_t> ends, Span<const float> thresholds, Span<float> values,
                Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const Plan plan(residual.size, values.size, true, scratch.data);
  const auto n = static_cast<uint32_t>(residual.size);
  const auto capacity = static_cast<uint32_t>(values.size < residual.size ? values.size : residual.size);
  const unsigned tiles = blocks_for(n, kTile);
  const ResidualReader reader = {residual.data};
  const MovingHand hand = {residual.data, ages.data, values.data, indices.data, flag.data, header.data};
  const Passing passing = {ends.data, thresholds.data, 0, static_cast<uint32_t>(ends.size - 1), 0};
  const auto count_second = count_digits<ResidualReader, Passing>;

  plan.clear(queue);
  LAUNCH(mark_passing, tiles, kThreads, 0, queue, reader, hand, n, passing, capacity, peaks.data, plan);
  LAUNCH(take_or_list, tiles, kThreads, 0, queue, reader, hand, passing, plan);
  LAUNCH(count_second, source_blocks(n), kThreads, 0, queue, reader, passing, plan);
  choose_and_take(reader, hand, n, passing, plan, queue);
}

}  // namespace gradcomp::cuda
