// The levels of each group, on CPUs. A group stays in the fastest cache while it is looked through as often as its form needs:
// nothing is sorted. Bytes: 4 an entry.

#include "../levels.h"

#include <cmath>
#include <vector>

#include "../ops.h"
#include "groups.h"

namespace gradcomp::cpu {
namespace {

constexpr int64_t kLanes = 32;  // sums are taken in as many lanes, each in order, as a warp has threads

double in_pairs(double (&lanes)[kLanes]) {
  for (int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (int64_t i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

HOT int64_t count_from(const float* x, int64_t n, float low) {
  int32_t found = 0;
  for (int64_t i = 0; i < n; ++i) found += x[i] >= low;
  return found;
}

HOT float least_from(const float* x, int64_t n, float low) {
  float least = INFINITY;
  for (int64_t i = 0; i < n; ++i) least = std::min(least, x[i] >= low ? x[i] : INFINITY);
  return least;
}

HOT bool are_finite(const float* x, int64_t n) {
  uint32_t other = 0;
  for (int64_t i = 0; i < n; ++i) other |= (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u;
  return other == 0;
}

HOT Part sum_between(const float* x, int64_t n, float low, float high, float from) {
  double lanes[kLanes] = {};
  int32_t count = 0;
  const auto add = [&](int64_t i, int64_t lane) {
    const bool inside = x[i] >= low && x[i] <= high;
    count += inside;
    lanes[lane] += static_cast<double>(inside ? x[i] - from : 0.0f);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (int64_t lane = 0; i + lane < n; ++lane) add(i + lane, lane);
  return {count, in_pairs(lanes)};
}

HOT double sum_squares_of(const float* x, int64_t n) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(x[i + lane]) * x[i + lane];
  }
  for (int64_t lane = 0; i + lane < n; ++lane) lanes[lane] += static_cast<double>(x[i + lane]) * x[i + lane];
  return in_pairs(lanes);
}

HOT Ends ends_of(const float* x, int64_t n) {
  float low = x[0], high = x[0];
  for (int64_t i = 0; i < n; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  return {low, high};
}

HOT void copy_between(const float* x, int64_t n, Ends ends, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = std::min(std::max(x[i], ends.low), ends.high);
}

HOT void copy_magnitudes(const float* x, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = std::fabs(x[i]);
}

// A group's entries; and room for their magnitudes.
struct View {
  const float* x;
  int64_t n;
  float* room;

  bool finite() const { return are_finite(x, n); }
  Ends ends() const { return ends_of(x, n); }
  double squares() const { return sum_squares_of(x, n); }
  int64_t count_from(float low) const { return gradcomp::cpu::count_from(x, n, low); }
  float least_from(float low) const { return gradcomp::cpu::least_from(x, n, low); }
  Part between(float low, float high, float from) const { return sum_between(x, n, low, high, from); }
  Part above(float low, float from) const { return sum_between(x, n, std::nextafter(low, INFINITY), INFINITY, from); }
  View magnitudes() const {
    copy_magnitudes(x, n, room);
    return {room, n, nullptr};
  }
};

}  // namespace

void find_levels(Span<const float> value, Span<const float> bounds, int64_t form, int64_t group, int64_t count,
                 Span<float> levels, Span<float> cuts, Queue queue) {
  const Groups groups{value.size, group};
  parallel_groups(groups, queue.threads, [&](int64_t begin, int64_t end) {
    std::vector<float> within(static_cast<size_t>(groups.longest())), room(within.size());
    for (int64_t g = begin; g < end; ++g) {
      const float* x = value.data + groups.begin(g);
      const int64_t n = groups.end(g) - groups.begin(g);
      if (bounds.given()) {
        copy_between(x, n, {bounds.data[2 * g], bounds.data[2 * g + 1]}, within.data());
        x = within.data();
      }
      levels_of(View{x, n, room.data()}, static_cast<Form>(form), count, levels.data + g * count, cuts.data[g]);
    }
  });
}

}  // namespace gradcomp::cpu
