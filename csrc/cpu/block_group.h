// A group's entries as a View (math_search.h), on CPUs.
#pragma once

#include <algorithm>
#include <cmath>

#include "../math_levels.h"
#include "lane_hot.h"
#include "lane_vectors.h"

namespace gradcomp::cpu {
namespace {

// Two sums, so that one addition need not wait for the other.
HOT int64_t count_from(const float* x, int64_t n, float low) {
  const int64_t half = n / 2;
  const float* const second = x + half;
  int32_t found = n % 2 != 0 && x[n - 1] >= low, too = 0;
#pragma GCC unroll 4
  for (int64_t i = 0; i < half; ++i) {
    found += x[i] >= low;
    too += second[i] >= low;
  }
  return found + too;
}

HOT Part sum_from(const float* x, int64_t n, float low, double unit) {
  int32_t count = 0;
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool there = x[i] >= low;
    count += there;
    sum += last_bits(either(there, x[i], 0.0f), unit);
  }
  return {count, static_cast<int64_t>(sum - static_cast<uint64_t>(n) * last_bits(0, unit))};
}

template <bool kMayBeTiny>
HOT int64_t sum_worth(const float* x, int64_t n, Way way) {
  constexpr int64_t kBlock = 2048;  // the worth of so many entries fits into 32 bits
  uint64_t all = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    uint32_t sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += way.worth_bits<kMayBeTiny>(x[i]);
    all += sum - static_cast<uint32_t>(end - begin) * bits_of(Way::kRounded);
  }
  return static_cast<int64_t>(all);
}

HOT int64_t sum_squares(const float* x, int64_t n, double unit) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += last_bits(static_cast<double>(x[i]) * x[i], unit);
  return static_cast<int64_t>(sum - static_cast<uint64_t>(n) * last_bits(0, unit));
}

HOT float least_from(const float* x, int64_t n, float low) {
  uint32_t least = UINT32_MAX;
  for (int64_t i = 0; i < n; ++i) least = std::min(least, order_from(low, x[i]));
  return at_order_from(low, least);
}

HOT Ends ends_of(const float* x, int64_t n) {
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t i = 0; i < n; ++i) {
    low = std::min(low, order_of(x[i]));
    high = std::max(high, order_of(x[i]));
  }
  return {at_order(low), at_order(high)};
}

HOT void copy_between(const float* x, int64_t n, Ends ends, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = std::min(std::max(x[i], ends.low), ends.high);
}

HOT void copy_magnitudes(const float* x, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = std::fabs(x[i]);
}

// A group's entries, and memory for their magnitudes.
struct View {
  const float* x;
  int64_t n;
  float* buffer;

  Ends ends() const { return ends_of(x, n); }
  int64_t count_from(float low) const { return cpu::count_from(x, n, low); }
  float least_from(float low) const { return cpu::least_from(x, n, low); }
  Part from(float low, double unit) const { return sum_from(x, n, low, unit); }
  int64_t worth(Way way) const { return way.is_tiny() ? sum_worth<true>(x, n, way) : sum_worth<false>(x, n, way); }
  int64_t squares(double unit) const { return sum_squares(x, n, unit); }
  View magnitudes() const {
    copy_magnitudes(x, n, buffer);
    return {buffer, n, nullptr};
  }
};

}  // namespace
}  // namespace gradcomp::cpu
