// The levels of each group, on a GPU. A warp looks through a group as often as its form needs. Bytes: 4 an entry, and 4 more
// from the first cache for each look.

#include "../math_levels.h"
#include "../math_rounding.h"
#include "../ops.h"
#include "launch.cuh"
#include "thread_four.cuh"
#include "warp.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 128;
// Groups of a block.
constexpr unsigned kGroups = kThreads / kWarp;

template <class T, class Join>
__device__ __forceinline__ T joined(T x, Join join) {
  for (unsigned step = 1; step < kWarp; step *= 2) x = join(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
  return joined(x, [](T a, T b) { return a + b; });
}

template <class T>
__device__ __forceinline__ T warp_least(T x) {
  return joined(x, [](T a, T b) { return a < b ? a : b; });
}

// A group's entries, within bounds if it has any. Lane i reads the fours i, i + 32, i + 64 and so on. All lanes get the same
// answers.
template <bool kBounded>
struct View {
  const float* x;
  int64_t n;
  Ends bounds;
  uint32_t kept = 0xffffffff;  // the bits of an entry that count: all but the sign for magnitudes

  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
    const auto bounded = [&](float its) {
      if constexpr (kBounded) {
        its = its < bounds.low ? bounds.low : its;
        its = its > bounds.high ? bounds.high : its;
      }
      use(float_of(bits_of(its) & kept));
    };
    const auto count = static_cast<uint32_t>(n);
    for (uint32_t i = 4 * (threadIdx.x % kWarp); i < count; i += 4 * kWarp) {
      const uint32_t left = count - i;
      const Four four = load_four(x + i, left);
      if (left >= 4) {
        for (const float its : four.x) bounded(its);
      } else {
        for (uint32_t entry = 0; entry < 3; ++entry) {
          if (entry < left) bounded(four.x[entry]);
        }
      }
    }
  }

  ONE_COPY __device__ Ends ends() const {
    int32_t low = INT32_MAX, high = INT32_MAX;
    each([&](float its) {
      const int32_t order = order_of(its);
      low = order < low ? order : low;
      high = ~order < high ? ~order : high;
    });
    return {at_order(warp_least(low)), at_order(~warp_least(high))};
  }
  ONE_COPY __device__ int64_t count_from(float low) const {
    unsigned count = 0;
    each([&](float its) { count += its >= low; });
    return warp_sum(count);
  }
  ONE_COPY __device__ float least_from(float low) const {
    uint32_t least = UINT32_MAX;
    each([&](float its) {
      const uint32_t order = order_from(low, its);
      least = order < least ? order : least;
    });
    return at_order_from(low, warp_least(least));
  }
  ONE_COPY __device__ Part from(float low, double unit) const {
    unsigned count = 0;
    long long sum = 0;
    each([&](float its) {
      const bool there = its >= low;
      count += there;
      sum += whole(there ? its : 0.0f, unit);
    });
    return {warp_sum(count), warp_sum(sum)};
  }
  ONE_COPY __device__ int64_t squares(double unit) const {
    long long sum = 0;
    each([&](float its) { sum += whole(static_cast<double>(its) * its, unit); });
    return warp_sum(sum);
  }
  __device__ View magnitudes() const { return {x, n, bounds, 0x7fffffff}; }
};

template <bool kBounded>
__global__ void __launch_bounds__(kThreads) find(const float* flat, const float* bounds, const __grid_constant__ Groups groups,
                                                 Form form, int64_t count, float* levels, float* cuts) {
  const int64_t group = int64_t{blockIdx.x} * kGroups + threadIdx.x / kWarp;
  if (group >= groups.count()) return;
  const Ends ends = kBounded ? Ends{bounds[2 * group], bounds[2 * group + 1]} : Ends{};
  const View<kBounded> view{flat + groups.begin(group), groups.end(group) - groups.begin(group), ends};
  float own[9], cut;
  levels_of(view, form, count, own, cut);
  if (threadIdx.x % kWarp != 0) return;
  for (int64_t i = 0; i < count; ++i) levels[group * count + i] = own[i];
  cuts[group] = cut;
}

}  // namespace

void find_levels(Span<const float> flat, OptionalSpan<const float> bounds, int64_t form, int64_t group, int64_t count,
                 Span<float> levels, Span<float> cuts, Queue queue) {
  const Groups groups{flat.size, group};
  const auto find_within = bounds.given() ? find<true> : find<false>;
  LAUNCH(find_within, blocks_for(groups.count(), kGroups), kThreads, 0, queue, flat.data, bounds.data, groups,
         static_cast<Form>(form), count, levels.data, cuts.data);
}

}  // namespace gradcomp::cuda
