// The levels for which rounding at random errs least (ORQ), found by halves and refined.
#pragma once

#include <cstdint>

#include "math_search.h"

namespace gradcomp {

// Level i of `last` even steps, not below the one before: steps of subnormal numbers round up and down.
SHARED_MATH float even(Ends ends, int64_t i, int64_t last, float before) {
  const float share = static_cast<float>(i) / static_cast<float>(last);
  const float x = ends.low * (1 - share) + ends.high * share;
  return x < before ? before : x > ends.high ? ends.high : x;
}

// Find the level between two others for which rounding at random errs least. An entry's worth is its share of the way from low
// to high. As many entries lie between the level and high as the worths of all entries add up to. The average worth gives the
// first guess.
template <class View>
ONE_COPY SHARED_MATH float level_between(const View& view, float low, const Part& from_low, float high, const Part& from_high,
                                         double unit) {
  const int64_t bottom = whole(low, unit), apart = whole(high, unit) - bottom;
  if (apart <= 0) return low;
  const int64_t between = from_low.count - from_high.count;
  const int64_t worth = from_low.sum - from_high.sum - bottom * between;
  const int64_t k = from_high.count + (worth + apart - 1) / apart;
  const double average = static_cast<double>(worth) / (static_cast<double>(apart) * static_cast<double>(between));
  const double first = low + (static_cast<double>(high) - low) * (0.5 + 0.55 * (average - 0.5));
  const float found = kth_largest(view, k, low, from_low.count, high, from_high.count, static_cast<float>(first));
  return found > high ? high : found;  // entries may lie beyond the last level
}

// Levels, and the entries from each of them on.
struct Ladder {
  int64_t last;
  float at[9];
  Part from[9];
};

// The squared error of rounding at random, in units, without the part that all levels with the same ends share.
SHARED_MATH double error_of(const Ladder& ladder, double unit) {
  double error = 0;
  for (int64_t i = 0; i < ladder.last; ++i) {
    const double low = static_cast<double>(whole(ladder.at[i], unit)),
                 high = static_cast<double>(whole(ladder.at[i + 1], unit));
    const Part &from_low = ladder.from[i], &from_high = ladder.from[i + 1];
    error += (low + high) * static_cast<double>(from_low.sum - from_high.sum);
    error -= low * high * static_cast<double>(from_low.count - from_high.count);
  }
  return error;
}

// Put a level into each interval, then into each half, and so on. The entries from the last levels on are not counted.
template <class View>
SHARED_MATH void bisect(const View& view, double unit, Ladder& ladder) {
  for (int64_t step = ladder.last; step > 1; step /= 2) {
    for (int64_t i = 0; i < ladder.last; i += step) {
      const int64_t middle = i + step / 2, end = i + step;
      ladder.at[middle] = level_between(view, ladder.at[i], ladder.from[i], ladder.at[end], ladder.from[end], unit);
      if (step > 2) ladder.from[middle] = view.from(ladder.at[middle], unit);
    }
  }
}

// Move each level in turn to the place between its neighbours where it errs least, twice.
template <class View>
SHARED_MATH void refine(const View& view, double unit, Ladder& ladder) {
  for (int turn = 0; turn < 2; ++turn) {
    for (int64_t i = 1; i < ladder.last; ++i) {
      const float before = ladder.at[i];
      ladder.at[i] = level_between(view, ladder.at[i - 1], ladder.from[i - 1], ladder.at[i + 1], ladder.from[i + 1], unit);
      if (ladder.at[i] != before) ladder.from[i] = view.from(ladder.at[i], unit);
    }
  }
}

// Find ORQ's levels by halves. Five levels err up to 1 % less after they are refined; nine hardly gain. In a lopsided group,
// where one side of the middle level has less than a third of the entries, the first level lies near an end, and half of the
// others beside it, where few entries are. Evenly spaced levels, once refined, may then halve the error. The better set of
// levels is taken.
template <class View>
SHARED_MATH void optimal_levels(const View& view, Ends ends, double unit, int64_t count, float* levels) {
  const int64_t last = count - 1, middle = last / 2, largest = view.count_from(ends.high);
  Ladder ladder{last, {}, {}};
  ladder.at[0] = ends.low;
  ladder.at[last] = ends.high;
  ladder.from[0] = view.from(ends.low, unit);
  ladder.from[last] = {largest, largest * whole(ends.high, unit)};
  Ladder other = ladder;
  bisect(view, unit, ladder);
  const int64_t above = ladder.from[middle].count - largest, below = view.n - ladder.from[middle].count;
  const bool lopsided = last > 2 && 3 * (above < below ? above : below) < view.n;
  if (last == 4 || lopsided) {
    for (int64_t i = 1; i < last; i += 2) ladder.from[i] = view.from(ladder.at[i], unit);
    refine(view, unit, ladder);
  }
  if (lopsided) {
    for (int64_t i = 1; i < last; ++i) {
      other.at[i] = even(ends, i, last, other.at[i - 1]);
      other.from[i] = view.from(other.at[i], unit);
    }
    refine(view, unit, other);
    if (error_of(other, unit) < error_of(ladder, unit)) ladder = other;
  }
  for (int64_t i = 0; i < count; ++i) levels[i] = ladder.at[i];
}

}  // namespace gradcomp
