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

// The part of the entries on the emptier side of a level that may lie on the wrong side of it. Where there are fewer entries
// than this, the level is found exactly: beside a gap, one entry matters.
constexpr int64_t kSlack = 20;

// Find the level between two others for which rounding at random errs least: as many entries lie between it and high as the
// worths of all entries add up to. `first` is the first guess; where it is not between, the average worth gives one.
template <class View>
ONE_COPY SHARED_MATH Rung level_between(const View& view, Rung low, Rung high, float first) {
  if (!(high.at > low.at)) return low;
  const int64_t worth = view.worth({low.at, high.at}), between = low.count - high.count;
  if (!(first > low.at && first < high.at)) {
    const double average = static_cast<double>(worth - high.count * kWorth) / static_cast<double>(between * kWorth);
    first = static_cast<float>(low.at + (static_cast<double>(high.at) - low.at) * (0.5 + 0.55 * (average - 0.5)));
  }
  const int64_t k = (worth + kWorth - 1) / kWorth, above = k - high.count, below = low.count - k;
  const int64_t fewer = above < below ? above : below;
  const Rung found = kth_largest(view, k, low, high, first, fewer < kSlack ? 0 : 1 + fewer / kSlack);
  return found.at > high.at ? high : found;  // entries may lie beyond the last level
}

// Levels, in order.
struct Ladder {
  int64_t last;
  Rung rungs[9];
};

// The squared error of rounding at random, in units, without the part that all levels with the same ends share.
template <class View>
SHARED_MATH double error_of(const View& view, const Ladder& ladder, double unit) {
  double error = 0;
  Part from_low = view.from(ladder.rungs[0].at, unit);
  for (int64_t i = 0; i < ladder.last; ++i) {
    const int64_t low = whole(ladder.rungs[i].at, unit), high = whole(ladder.rungs[i + 1].at, unit);
    const Rung& end = ladder.rungs[ladder.last];
    const Part from_high = i + 1 < ladder.last ? view.from(ladder.rungs[i + 1].at, unit) : Part{end.count, end.count * high};
    const Part part = {from_low.count - from_high.count, from_low.sum - from_high.sum};
    error += (static_cast<double>(low) + static_cast<double>(high)) * static_cast<double>(part.sum);
    error -= static_cast<double>(low) * static_cast<double>(high) * static_cast<double>(part.count);
    from_low = from_high;
  }
  return error;
}

// Put a level into each interval, then into each half, and so on.
template <class View>
SHARED_MATH void bisect(const View& view, Ladder& ladder) {
  for (int64_t step = ladder.last; step > 1; step /= 2) {
    for (int64_t i = 0; i < ladder.last; i += step) {
      ladder.rungs[i + step / 2] = level_between(view, ladder.rungs[i], ladder.rungs[i + step], not_a_number());
    }
  }
}

// Move each level in turn to the place between its neighbours where it errs least, twice.
template <class View>
SHARED_MATH void refine(const View& view, Ladder& ladder) {
  for (int turn = 0; turn < 2; ++turn) {
    for (int64_t i = 1; i < ladder.last; ++i) {
      Rung& own = ladder.rungs[i];
      own = level_between(view, ladder.rungs[i - 1], ladder.rungs[i + 1], own.at);
    }
  }
}

// Five levels have found their places if the middle one would move by less than this part of the entries beside it.
constexpr int64_t kMoved = 16;

// Find ORQ's levels by halves. Five levels err up to 1 % less after they are refined, in groups whose middle level moves; nine
// hardly gain. In a lopsided group, where one side of the middle level has less than a third of the entries, the first level
// lies near an end, and half of the others beside it, where few entries are. Evenly spaced levels, once refined, may then halve
// the error. The better set of levels is taken.
template <class View>
SHARED_MATH void optimal_levels(const View& view, Ends ends, double unit, int64_t count, float* levels) {
  const int64_t last = count - 1;
  Ladder ladder{last, {}};
  ladder.rungs[0] = {ends.low, ends.low == -kFurthest ? view.count_from(ends.low) : view.n};
  ladder.rungs[last] = {ends.high, view.count_from(ends.high)};
  Ladder other = ladder;
  bisect(view, ladder);
  Rung& middle = ladder.rungs[last / 2];
  const int64_t above = middle.count - ladder.rungs[last].count, below = view.n - middle.count;
  const bool lopsided = last > 2 && 3 * (above < below ? above : below) < view.n;
  bool moves = lopsided;
  if (last == 4 && !lopsided) {
    const int64_t before = middle.count, beside = ladder.rungs[1].count - ladder.rungs[3].count;
    middle = level_between(view, ladder.rungs[1], ladder.rungs[3], middle.at);
    const int64_t by = middle.count - before;
    moves = kMoved * (by < 0 ? -by : by) > beside;
  }
  if (moves) refine(view, ladder);
  if (lopsided) {
    for (int64_t i = 1; i < last; ++i) {
      const float at = even(ends, i, last, other.rungs[i - 1].at);
      other.rungs[i] = {at, view.count_from(at)};
    }
    refine(view, other);
    if (error_of(view, other, unit) < error_of(view, ladder, unit)) ladder = other;
  }
  for (int64_t i = 0; i < count; ++i) levels[i] = ladder.rungs[i].at;
}

}  // namespace gradcomp
