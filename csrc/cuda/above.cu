// Thresholds of a bucket's layers from their moments, the steering of lam, and the taking of the entries above, on a GPU: one
// launch each, or one in all. A take's blocks list what passes, and choose the largest where these are too many
// (device_select.cuh); before that they may set thresholds, and then steer and pack.
//
// Bytes: 48 a layer for thresholds, 20 to steer. An entry of the bucket: 4.1; 20 for one that passes; 12 more for each where
// they are too many, and 16 an entry of the bucket without a list. Predicted for 6 M entries of which 1 % pass: 12 us to list,
// 6 meetings of 1.5 us, 10 us for 161 layers' thresholds, 6 us for 60,000 taken ones: 37 us. Of 25 M: 90 us.

#include "../math.h"
#include "../ops.h"
#include "device_pack.cuh"
#include "device_select.cuh"

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
    its.threshold = magnitude_key(__ldcg(thresholds + its.low));
    return its;
  }

  __device__ __forceinline__ uint32_t operator()(float x, uint32_t index) const {
    const uint32_t least = low == high ? threshold : magnitude_key(__ldcg(thresholds + layer_of(index)));
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

struct Layers {
  const double* moments;
  const int32_t* ends;
  int64_t count;
};

__device__ __forceinline__ Moments<double> moments_of(const Layers& layers, int64_t layer) {
  const int64_t begin = layer == 0 ? 0 : layers.ends[layer - 1];
  return load_moments(layers.moments + kMoments * layer, static_cast<double>(layers.ends[layer] - begin));
}

// Set the thresholds, as all blocks of a launch. Where layers are pooled, the first block does all: one thread merges the
// moments in the order of the layers, and the others fetch them.
template <unsigned kThreads>
__device__ __forceinline__ void set_thresholds(const Layers& layers, const float* lam, bool pooled, float* thresholds) {
  if (!pooled) {
    for (int64_t layer = int64_t{blockIdx.x} * kThreads + threadIdx.x; layer < layers.count; layer += gridDim.x * kThreads) {
      thresholds[layer] = threshold_of(moments_of(layers, layer), *lam);
    }
    return;
  }
  if (blockIdx.x != 0) return;
  constexpr unsigned kFetched = 128;
  __shared__ Moments<double> fetched[kFetched];
  __shared__ float found;
  Moments<double> all = {};
  for (int64_t first = 0; first < layers.count; first += kFetched) {
    const int64_t layer = first + threadIdx.x;
    if (threadIdx.x < kFetched && layer < layers.count) fetched[threadIdx.x] = moments_of(layers, layer);
    __syncthreads();
    for (int64_t i = 0; threadIdx.x == 0 && i < kFetched && first + i < layers.count; ++i) all = merge(all, fetched[i]);
    __syncthreads();
  }
  if (threadIdx.x == 0) found = threshold_of(all, *lam);
  __syncthreads();
  for (int64_t layer = threadIdx.x; layer < layers.count; layer += kThreads) thresholds[layer] = found;
}

// Steer after a count.
__device__ __forceinline__ void steer(float* lam, uint32_t found, double target) {
  const Steered next = steered({lam[0], lam[1]}, static_cast<double>(static_cast<int32_t>(found)), target);
  lam[0] = next.lam;
  lam[1] = next.gain;
}

__global__ void __launch_bounds__(kSelecting) set_all(Layers layers, const float* lam, bool pooled, float* thresholds) {
  set_thresholds<kSelecting>(layers, lam, pooled, thresholds);
}

__global__ void steer_lam(float* lam, const int32_t* header, double target) {
  steer(lam, static_cast<uint32_t>(header[0]), target);
}

// What a launch does beside taking: it sets thresholds, if there are moments, and steers, if there is a target.
struct Rule {
  Layers layers;
  float* lam;
  float* thresholds;
  bool pooled;
  int64_t target;
};

__global__ void __launch_bounds__(kSelecting)
    select_above(const __grid_constant__ ResidualReader reader, MovingHand hand, uint32_t n,
                 const __grid_constant__ Passing passing, uint32_t capacity, const __grid_constant__ Plan plan,
                 const __grid_constant__ Rule rule, const __grid_constant__ Packing packing, uint32_t* ticket) {
  const Counted own = shared_digits();
  Meeting meeting = {ticket};
  plan.clear();
  if (rule.layers.moments != nullptr) set_thresholds<kSelecting>(rule.layers, rule.lam, rule.pooled, rule.thresholds);
  meeting.wait();
  for_each_own_tile(plan, [&](uint32_t tile) {
    const uint32_t first = tile * kSelectTile, last = min(n - first, kSelectTile) - 1;
    const Passing its = passing.over(first, first + last);
    list_tile(reader, n, tile, plan, [&](float x, uint32_t index) { return its(x, index) != 0; });
  });
  meeting.wait();
  const uint32_t found = __ldcg(plan.found);
  if (blockIdx.x + threadIdx.x == 0) {
    hand.announce(found);
    if (rule.target > 0) steer(rule.lam, found, static_cast<double>(rule.target));
  }
  const bool fits = found <= capacity;
  const Choice choice = {0, fits ? 0 : capacity, fits ? kAllDigits : 0};
  choose_and_take(Sources<ResidualReader, Passing>{reader, passing, plan, n, found <= plan.longest_list}, hand, choice, own,
                  meeting);
  pack_taken<kSelecting>(packing, found, meeting);
  meeting.end();
}

void select(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, Span<const int32_t> ends,
            const float* thresholds, Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch,
            const Rule& rule, const Packing& packing, uint32_t* ticket, Queue queue) {
  const Plan plan(residual.size, values.size, scratch.data);
  const MovingHand hand = {residual.data, ages.data, values.data, indices.data, flag.data, header.data};
  const Passing passing = {ends.data, thresholds, 0, static_cast<uint32_t>(ends.size - 1), 0};
  const int64_t capacity = values.size < residual.size ? values.size : residual.size;
  LAUNCH_TOGETHER(select_above, plan.blocks(), kSelecting, queue, ResidualReader{residual.data}, hand,
                  static_cast<uint32_t>(residual.size), passing, static_cast<uint32_t>(capacity), plan, rule, packing, ticket);
}

}  // namespace

void set_thresholds(Span<const double> moments, Span<const int32_t> ends, Span<const float> lam, bool pooled,
                    Span<float> thresholds, Queue queue) {
  if (ends.size == 0) return;
  const Layers layers = {moments.data, ends.data, ends.size};
  LAUNCH(set_all, pooled ? 1 : blocks_for(ends.size, kSelecting), kSelecting, 0, queue, layers, lam.data, pooled,
         thresholds.data);
}

void steer(Span<float> lam, Span<const int32_t> header, int64_t target, Queue queue) {
  LAUNCH(steer_lam, 1, 1, 0, queue, lam.data, header.data, static_cast<double>(target));
}

// Behind the plan lies the ticket of a call that has no counters.
int64_t take_above_scratch(int64_t n, int64_t capacity) { return Plan(n, capacity, nullptr).words + 1; }

void take_above(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, Span<const int32_t> ends,
                Span<const float> thresholds, Span<float> values, Span<int32_t> indices, Span<int32_t> header,
                Span<uint32_t> scratch, Queue queue) {
  uint32_t* const ticket = zeroed_ticket(scratch, take_above_scratch(residual.size, values.size), queue);
  select(residual, ages, flag, ends, thresholds.data, values, indices, header, scratch, {}, {}, ticket, queue);
}

void take_and_pack(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, const Bar& bar,
                   const Taken& taken, Span<uint32_t> scratch, uint32_t* ticket, Queue queue) {
  const Rule rule = {
      {bar.moments.data, bar.ends.data, bar.ends.size}, bar.lam.data, bar.thresholds.data, bar.pooled, bar.target};
  select(residual, ages, flag, bar.ends, bar.thresholds.data, taken.values, taken.indices, taken.header, scratch, rule,
         packing_of(residual, taken), ticket, queue);
}

}  // namespace gradcomp::cuda
