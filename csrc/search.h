// Looking through a group for the entry where something ends, as both twins do: its order, exact sums, and guesses.
#pragma once

#include <cmath>
#include <cstdint>

#include "math.h"

namespace gradcomp {

// The order of floats as that of integers, which can be halved between two of them.
SHARED_MATH int32_t order_of(float x) {
  const auto bits = static_cast<int32_t>(bits_of(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
SHARED_MATH float at_order(int32_t order) { return float_of(static_cast<uint32_t>(order ^ ((order >> 31) & 0x7fffffff))); }

// The same counted from low on: what is below low comes last. Both zeros are from 0 on.
SHARED_MATH uint32_t first_order(float low) { return static_cast<uint32_t>(order_of(low == 0 ? -0.0f : low)); }
SHARED_MATH uint32_t order_from(float low, float x) { return static_cast<uint32_t>(order_of(x)) - first_order(low); }
SHARED_MATH float at_order_from(float low, uint32_t order) { return at_order(static_cast<int32_t>(first_order(low) + order)); }

SHARED_MATH float after(float x) { return at_order(order_of(x + 0.0f) + 1); }

// Entries as whole numbers of a unit that depends on the largest: their sums are exact, in whatever order.
constexpr int kWholeBits = 50;

// The unit for n entries of which none is further from 0 than peak.
SHARED_MATH double unit_for(float peak, int64_t n) {
  int bits = kWholeBits;
  while (n > int64_t{1} << (61 - bits)) --bits;
  return ldexp(1.0, 1 + exponent_of(magnitude_key(peak)) - bits);
}

// To the nearest, ties to even: what adding so many units leaves in the last bits of a double, and what 0 leaves there.
constexpr double kShift = 0x1.8p52;

SHARED_MATH uint64_t last_bits(double x, double unit) {
  const double shifted = x + kShift * unit;
  uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  return bits;
}
SHARED_MATH int64_t whole(double x, double unit) { return static_cast<int64_t>(last_bits(x, unit) - last_bits(0, unit)); }

// Some of a group's entries: how many, and their sum in units.
struct Part {
  int64_t count, sum;
};

SHARED_MATH float mean_of(int64_t sum, int64_t count, double unit) {
  return static_cast<float>(static_cast<double>(sum) / static_cast<double>(count) * unit);
}

struct Ends {
  float low, high;
};

// Below, a View is a group's entries, or their magnitudes, as a twin holds them:
//   n, ends(): how many, and the first and the last in the order above, which are finite if all are;
//   count_from(low), least_from(low): how many are not below low, and the first of those;
//   from(low, unit), squares(unit): the count and the sum of those not below low; the sum of all squares.
//   magnitudes(): their View.

// A number, and by how much a condition is met at it; below 0 it is not.
struct Edge {
  float at;
  double surplus;
};

constexpr int kGuesses = 8;

// Of a condition that holds at `low`, but not at `high`, and never again once it does not: the last entry that meets it, or if
// it ends between two entries, either of them. An entry from x on takes condition.each(x) off the surplus at least. `first` is
// the first guess if it lies between. Others are made as if the surplus fell in a straight line, where an end that stays counts
// half as much each time (the Illinois rule). After so many guesses, it halves what is left, and tries the next entry, in turn.
template <class View, class Condition>
SHARED_MATH float last_entry(const View& view, const Condition& condition, Edge low, Edge high, float first) {
  double left = low.surplus, right = high.surplus;
  int moved = 0;  // which end the last look moved
  for (int look = 0; low.surplus >= condition.each(low.at); ++look) {
    const int64_t from = order_of(low.at), to = order_of(high.at);
    const bool next = to - from <= 1 || (look > kGuesses && look % 2 == 0);
    const float entry = next ? view.least_from(low.at) + 0.0f : 0.0f;  // of two zeros +0
    float x = next ? after(entry) : first;
    first = high.at;
    if (!next && !(x > low.at && x < high.at)) {
      x = static_cast<float>(low.at + (static_cast<double>(high.at) - low.at) * (left / (left - right)));
      if (look >= kGuesses || !(x > low.at && x < high.at)) x = at_order(static_cast<int32_t>(from + (to - from) / 2));
    }
    const double found = condition.surplus(x);
    if (found >= 0) {
      if (moved > 0) right /= 2;
      low = {x, found};
      left = found;
      moved = 1;
    } else {
      if (next) return entry;
      if (moved < 0) left /= 2;
      high = {x, found};
      right = found;
      moved = -1;
    }
  }
  return view.least_from(low.at) + 0.0f;
}

// Holds up to the k-th largest entry.
template <class View>
struct AmongLargest {
  const View& view;
  int64_t k;

  SHARED_MATH double of(int64_t count) const { return static_cast<double>(count - k) + 0.5; }
  SHARED_MATH double surplus(float x) const { return of(view.count_from(x)); }
  SHARED_MATH double each(float) const { return 1; }
};

// The k-th largest entry, of which there are as many from low on, and known numbers from both on.
template <class View>
ONE_COPY SHARED_MATH float kth_largest(const View& view, int64_t k, float low, int64_t from_low, float high, int64_t from_high,
                                       float first) {
  if (from_high >= k) return high;
  const AmongLargest<View> condition{view, k};
  return last_entry(view, condition, {low, condition.of(from_low)}, {high, condition.of(from_high)}, first);
}

}  // namespace gradcomp
