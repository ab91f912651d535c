// The levels of each group, on a GPU. A warp looks through a group as often as its form needs, in shared memory if it fits.
// Bytes: 4 an entry, and 4 more from shared memory, or from the first cache, for each look.

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

// Entries of a group that fits into its warp's part of shared memory: of 2,048, and the rest that belongs to the last group.
constexpr uint32_t kStaged = 2048 + Groups::kShortest;
static_assert(kStaged * kWorth <= UINT32_MAX, "all that such a group's entries are worth fits 32 bits");

// A group in shared memory. Lane i reads the fours i, i + 32, i + 64 and so on.
struct Staged {
  using Worth = uint32_t;
  int64_t n;

  static __device__ __forceinline__ float* place() {
    DYNAMIC_SHARED(float, staged);
    return staged + threadIdx.x / kWarp * kStaged;
  }

  // Fetch the group, within bounds if it has any.
  template <bool kBounded>
  __device__ __forceinline__ void fetch(const float* x, Ends bounds) const {
    const auto bounded = [&](float its) {
      if constexpr (kBounded) {
        its = its < bounds.low ? bounds.low : its;
        its = its > bounds.high ? bounds.high : its;
      }
      return its;
    };
    copy_share<kWarp, 8>(place(), x, static_cast<uint32_t>(n), threadIdx.x % kWarp, is_aligned(x), bounded);
    __syncwarp();
  }

  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
    const float* const from = place();
    const uint32_t lane = threadIdx.x % kWarp, count = static_cast<uint32_t>(n), whole = count / 4 * 4;
    UNROLLED for (uint32_t i = 4 * lane; i < whole; i += 4 * kWarp) {
      const Four four = load_whole(from + i);
      for (const float its : four.x) use(its);
    }
    if (lane < count - whole) use(from[whole + lane]);
  }
};

// A longer group, which is read where it lies for each look.
template <bool kBounded>
struct Direct {
  using Worth = unsigned long long;
  int64_t n;
  const float* x;
  Ends bounds;

  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
    const auto bounded = [&](float its) {
      if constexpr (kBounded) {
        its = its < bounds.low ? bounds.low : its;
        its = its > bounds.high ? bounds.high : its;
      }
      use(its);
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
};

// Looks through a group's entries, or their magnitudes. All lanes get the same answers.
template <class Group, bool kMagnitudes = false>
struct View : Group {
  template <class Use>
  __device__ __forceinline__ void each(Use use) const {
    Group::each([&](float its) { use(kMagnitudes ? float_of(magnitude_key(its)) : its); });
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
  ONE_COPY __device__ int64_t worth(Way way) const {
    typename Group::Worth sum = 0;
    if (way.is_tiny()) {
      each([&](float its) { sum += way.worth_bits(its) - bits_of(Way::kRounded); });
    } else {
      each([&](float its) { sum += way.worth_bits<false>(its) - bits_of(Way::kRounded); });
    }
    return warp_sum(sum);
  }
  ONE_COPY __device__ int64_t squares(double unit) const {
    long long sum = 0;
    each([&](float its) { sum += whole(static_cast<double>(its) * its, unit); });
    return warp_sum(sum);
  }
  __device__ View<Group, true> magnitudes() const { return {*this}; }
};

// The number of groups comes from the launch: no thread divides.
template <bool kBounded, bool kFits, int kLast>
__global__ void __launch_bounds__(kThreads)
    find(const float* flat, const float* bounds, const __grid_constant__ Groups groups, int64_t all, Form form, int64_t count,
         float* levels, float* cuts, const int32_t* flag, int32_t* header) {
  if (header != nullptr && blockIdx.x + threadIdx.x == 0) {
    header[0] = 0;
    header[1] = flag != nullptr ? *flag : 0;
  }
  const int64_t group = int64_t{blockIdx.x} * kGroups + threadIdx.x / kWarp;
  if (group >= all) return;
  const Ends ends = kBounded ? Ends{bounds[2 * group], bounds[2 * group + 1]} : Ends{};
  const float* const x = flat + groups.begin(group);
  const int64_t n = (group + 1 == all ? groups.n : groups.begin(group + 1)) - groups.begin(group);
  float own[kLast > 0 ? kLast + 1 : 9], cut;
  if constexpr (kFits) {
    const View<Staged> view{{n}};
    view.template fetch<kBounded>(x, ends);
    levels_of<kLast>(view, form, count, own, cut);
  } else {
    levels_of<kLast>(View<Direct<kBounded>>{{n, x, ends}}, form, count, own, cut);
  }
  if (threadIdx.x % kWarp != 0) return;
  if constexpr (kLast > 0) {
    UNROLLED for (int i = 0; i <= kLast; ++i) levels[group * (kLast + 1) + i] = own[i];
  } else {
    for (int64_t i = 0; i < count; ++i) levels[group * count + i] = own[i];
  }
  cuts[group] = cut;
}

}  // namespace

void find_levels(Span<const float> flat, OptionalSpan<const float> bounds, OptionalSpan<const int32_t> flag, int64_t form,
                 int64_t group, int64_t count, Span<float> levels, Span<float> cuts, OptionalSpan<int32_t> header,
                 Queue queue) {
  const Groups groups{flat.size, group};
  const bool fits = groups.longest() <= kStaged;
  const auto rule = static_cast<Form>(form);
  with_last(rule, count, [&](auto last) {
    constexpr int kLast = decltype(last)::value;
    const auto find_in = bounds.given() ? (fits ? find<true, true, kLast> : find<true, false, kLast>)
                         : fits         ? find<false, true, kLast>
                                        : find<false, false, kLast>;
    LAUNCH(find_in, blocks_for(groups.count(), kGroups), kThreads, fits ? kGroups * kStaged * sizeof(float) : 0, queue,
           flat.data, bounds.data, groups, groups.count(), rule, count, levels.data, cuts.data, flag.data, header.data);
  });
}

}  // namespace gradcomp::cuda
