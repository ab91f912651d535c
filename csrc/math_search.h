// The search in a group for the last entry that meets a condition: an order of floats, exact sums, and guesses.
#pragma once

#include <cmath>
#include <cstdint>

#include "math.h"

namespace gradcomp {

// The order of floats as an order of integers, which a search can halve.
SHARED_MATH int32_t order_of(float x) {
  const auto bits = static_cast<int32_t>(bits_of(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
SHARED_MATH float at_order(int32_t order) { return float_of(static_cast<uint32_t>(order ^ ((order >> 31) & 0x7fffffff))); }

// The same order, counted from low on: numbers below low come last. Both zeros count as 0.
SHARED_MATH uint32_t first_order(float low) { return static_cast<uint32_t>(order_of(low == 0 ? -0.0f : low)); }
SHARED_MATH uint32_t order_from(float low, float x) { return static_cast<uint32_t>(order_of(x)) - first_order(low); }
SHARED_MATH float at_order_from(float low, uint32_t order) { return at_order(static_cast<int32_t>(first_order(low) + order)); }

SHARED_MATH float after(float x) { return at_order(order_of(x + 0.0f) + 1); }

// Bits of the largest entry as a whole number of units. Sums of whole numbers are exact, in any order.
constexpr int kWholeBits = 50;

// The unit for n entries with magnitudes up to peak.
SHARED_MATH double unit_for(float peak, int64_t n) {
  int bits = kWholeBits;
  while (n > int64_t{1} << (61 - bits)) --bits;
  return ldexp(1.0, 1 + exponent_of(magnitude_key(peak)) - bits);
}

// Units that push a number into the last bits of a double, which rounds it to nearest, ties to even.
constexpr double kShift = 0x1.8p52;

SHARED_MATH uint64_t last_bits(double x, double unit) {
  const double shifted = x + kShift * unit;
  uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  return bits;
}
SHARED_MATH int64_t whole(double x, double unit) { return static_cast<int64_t>(last_bits(x, unit) - last_bits(0, unit)); }

// Some of a group's entries: their count, and their sum in units.
struct Part {
  int64_t count, sum;
};

SHARED_MATH float mean_of(int64_t sum, int64_t count, double unit) {
  return static_cast<float>(static_cast<double>(sum) / static_cast<double>(count) * unit);
}

// The largest level of most rules, so that two levels differ by a number that a residual may hold.
constexpr float kFurthest = kLargest / 2;
SHARED_MATH float near(float x) { return x < -kFurthest ? -kFurthest : x > kFurthest ? kFurthest : x; }

struct Ends {
  float low, high;
};

// Below, a View is a group's entries, or their magnitudes, as a twin holds them:
//   n                  the number of entries
//   ends()             the smallest and the largest in the order above, which are finite if all are
//   count_from(low)    the number of entries not below low
//   least_from(low)    the smallest of these
//   from(low, unit)    the count and the sum of these
//   worth(way)         the sum of what all entries are worth on a Way, in parts of kWorth
//   squares(unit)      the sum of all squares
//   magnitudes()       a View of the magnitudes

// The lesser and the greater of two numbers that are not NaN; of two zeros, either. On a GPU they are one instruction.
SHARED_MATH float lesser(float a, float b) {
#ifdef __CUDA_ARCH__
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}
SHARED_MATH float greater(float a, float b) {
#ifdef __CUDA_ARCH__
  return fmaxf(a, b);
#else
  return a > b ? a : b;
#endif
}

// The way from a level to the next. An entry is worth its share of it: nothing at its low end and below, kWorth at its high end
// and above, in whole numbers. Differences of tiny numbers are made larger first.
constexpr int64_t kWorth = int64_t{1} << 20;

struct Way {
  static constexpr float kRounded = 0x1.8p23f;  // pushes a number into the last bits of a float, which rounds it

  float low, high, larger, scale;

  SHARED_MATH Way(float from, float to) : low(from), high(to), larger(to - from < 0x1p-60f ? 0x1p100f : 1.0f) {
    scale = static_cast<float>(kWorth) / ((high - low) * larger);
  }
  SHARED_MATH bool is_tiny() const { return larger != 1; }
  // What an entry is worth, plus bits_of(kRounded). kMayBeTiny: false where the caller knows that the way is not tiny.
  template <bool kMayBeTiny = true>
  SHARED_MATH uint32_t worth_bits(float x) const {
    const float below = lesser(high, x), within = greater(low, below), passed = within - low;
    return bits_of((kMayBeTiny ? passed * larger : passed) * scale + kRounded);
  }
};

// A number, and the surplus by which a condition is met there. A negative surplus means that it is not met.
struct Edge {
  float at;
  double surplus;
};

// Guesses of a search before it halves the rest.
constexpr int kGuesses = 8;

// Find the last entry that meets a condition, which holds at `low`, fails at `high` and never holds again once it failed. If it
// ends between two entries, either may be returned, and so may a number whose surplus is near enough to 0 for the condition.
// Each entry from x on lowers the surplus by at least condition.each(x).
//
// `first` is the first guess, if it lies between. Later guesses follow a straight line through the surpluses of both ends, in
// which an end that stays counts half as much each time (the Illinois rule). After kGuesses guesses, the search halves the
// rest and tries the next entry, in turn.
template <class View, class Condition>
SHARED_MATH Edge last_entry(const View& view, const Condition& condition, Edge low, Edge high, float first) {
  double left = low.surplus, right = high.surplus;
  int moved = 0;  // the end that the last look moved: 1 low, -1 high
  for (int look = 0; low.surplus >= condition.each(low.at); ++look) {
    const int64_t from = order_of(low.at), to = order_of(high.at);
    const bool next = to - from <= 1 || (look > kGuesses && look % 2 == 0);
    const float entry = next ? view.least_from(low.at) + 0.0f : 0.0f;  // + 0.0f turns -0 into +0
    float x = next ? after(entry) : first;
    first = high.at;
    if (!next && !(x > low.at && x < high.at)) {
      x = static_cast<float>(low.at + (static_cast<double>(high.at) - low.at) * (left / (left - right)));
      if (look >= kGuesses || !(x > low.at && x < high.at)) x = at_order(static_cast<int32_t>(from + (to - from) / 2));
    }
    const double found = condition.surplus(x);
    if (condition.is_near(found)) return {x, found};
    if (found >= 0) {
      if (moved > 0) right /= 2;
      low = {x, found};
      left = found;
      moved = 1;
    } else {
      if (next) return {entry, low.surplus};
      if (moved < 0) left /= 2;
      high = {x, found};
      right = found;
      moved = -1;
    }
  }
  return {view.least_from(low.at) + 0.0f, low.surplus};
}

// The condition that holds up to the k-th largest entry.
template <class View>
struct AmongLargest {
  const View& view;
  int64_t k, slack;

  SHARED_MATH double of(int64_t count) const { return static_cast<double>(count - k) + 0.5; }
  SHARED_MATH double surplus(float x) const { return of(view.count_from(x)); }
  SHARED_MATH double each(float) const { return 1; }
  SHARED_MATH bool is_near(double surplus) const {
    const double off = surplus - of(k);
    return off < 0 ? -off < static_cast<double>(slack) : off < static_cast<double>(slack);
  }
};

// A number, and how many entries are not below it.
struct Rung {
  float at;
  int64_t count;
};

// Find the k-th largest entry, between low and high, or, with a slack, a number that fewer than `slack` entries more or less
// than k are not below.
template <class View>
ONE_COPY SHARED_MATH Rung kth_largest(const View& view, int64_t k, Rung low, Rung high, float first, int64_t slack = 0) {
  if (high.count >= k) return high;
  const AmongLargest<View> condition{view, k, slack};
  const Edge found = last_entry(view, condition, {low.at, condition.of(low.count)}, {high.at, condition.of(high.count)}, first);
  return {found.at, k + static_cast<int64_t>(found.surplus - condition.of(k))};
}

}  // namespace gradcomp
