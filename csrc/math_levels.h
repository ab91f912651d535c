// The levels of a group, found by looks through its entries (math_search.h) and without a sort: those by which rounding at
// random errs least (ORQ), found by halves and refined, and those of other rules.
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

// Levels, in order. Their number is known when the loops over them are compiled, so that they stay in registers.
template <int kLast>
struct Ladder {
  Rung rungs[kLast + 1];
};

// The squared error of rounding at random, in units, without the part that all levels with the same ends share.
template <int kLast, class View>
SHARED_MATH double error_of(const View& view, const Ladder<kLast>& ladder, double unit) {
  double error = 0;
  Part from_low = view.from(ladder.rungs[0].at, unit);
  UNROLLED for (int i = 0; i < kLast; ++i) {
    const int64_t low = whole(ladder.rungs[i].at, unit), high = whole(ladder.rungs[i + 1].at, unit);
    const Rung& end = ladder.rungs[kLast];
    const Part from_high = i + 1 < kLast ? view.from(ladder.rungs[i + 1].at, unit) : Part{end.count, end.count * high};
    const Part part = {from_low.count - from_high.count, from_low.sum - from_high.sum};
    error += (static_cast<double>(low) + static_cast<double>(high)) * static_cast<double>(part.sum);
    error -= static_cast<double>(low) * static_cast<double>(high) * static_cast<double>(part.count);
    from_low = from_high;
  }
  return error;
}

// Put a level into each interval, then into each half, and so on.
template <int kLast, class View>
SHARED_MATH void bisect(const View& view, Ladder<kLast>& ladder) {
  UNROLLED for (int step = kLast; step > 1; step /= 2) {
    UNROLLED for (int i = 0; i < kLast; i += step) {
      ladder.rungs[i + step / 2] = level_between(view, ladder.rungs[i], ladder.rungs[i + step], not_a_number());
    }
  }
}

// Move each level in turn to the place between its neighbours where it errs least, twice.
template <int kLast, class View>
SHARED_MATH void refine(const View& view, Ladder<kLast>& ladder) {
  for (int turn = 0; turn < 2; ++turn) {
    UNROLLED for (int i = 1; i < kLast; ++i) {
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
template <int kLast, class View>
SHARED_MATH void optimal_levels(const View& view, Ends ends, double unit, float* levels) {
  Ladder<kLast> ladder{};
  ladder.rungs[0] = {ends.low, ends.low == -kFurthest ? view.count_from(ends.low) : view.n};
  ladder.rungs[kLast] = {ends.high, view.count_from(ends.high)};
  Ladder<kLast> other = ladder;
  bisect(view, ladder);
  Rung& middle = ladder.rungs[kLast / 2];
  const int64_t above = middle.count - ladder.rungs[kLast].count, below = view.n - middle.count;
  const bool lopsided = kLast > 2 && 3 * (above < below ? above : below) < view.n;
  bool moves = lopsided;
  if constexpr (kLast == 4) {
    if (!lopsided) {
      const int64_t before = middle.count, beside = ladder.rungs[1].count - ladder.rungs[3].count;
      middle = level_between(view, ladder.rungs[1], ladder.rungs[3], middle.at);
      const int64_t by = middle.count - before;
      moves = kMoved * (by < 0 ? -by : by) > beside;
    }
  }
  if (moves) refine(view, ladder);
  if (lopsided) {
    UNROLLED for (int i = 1; i < kLast; ++i) {
      const float at = even(ends, i, kLast, other.rungs[i - 1].at);
      other.rungs[i] = {at, view.count_from(at)};
    }
    refine(view, other);
    if (error_of(view, other, unit) < error_of(view, ladder, unit)) ladder = other;
  }
  UNROLLED for (int i = 0; i <= kLast; ++i) levels[i] = ladder.rungs[i].at;
}

// The rules that levels follow from, in the order of kernels.LEVEL_RULES.
enum class Form : int64_t { optimal, partly, mean, lloyd, peak, norm, range, quantile, sign };
constexpr int64_t kForms = 9;

// The condition that the magnitudes from x on add up to at least n x.
template <class View>
struct WithinSum {
  const View& magnitudes;
  double unit;

  SHARED_MATH double of(float x, const Part& from) const {
    return static_cast<double>(from.sum - magnitudes.n * whole(x, unit));
  }
  SHARED_MATH double surplus(float x) const { return of(x, magnitudes.from(x, unit)); }
  SHARED_MATH double each(float x) const { return static_cast<double>(whole(x, unit)); }
  SHARED_MATH bool is_near(double) const { return false; }
  SHARED_MATH float mean(const Part& from) const { return mean_of(from.sum, magnitudes.n, unit); }
};

// Find BinGrad-pb's b, which equals the sum of the magnitudes above b, over n. The sum may jump past b at an entry; b is then
// that entry.
template <class View>
SHARED_MATH float partly_of(const View& magnitudes, float peak, double unit) {
  const WithinSum<View> condition{magnitudes, unit};
  const double at_peak = condition.surplus(peak);
  if (at_peak >= 0) return peak;
  const Part all = magnitudes.from(0.0f, unit);
  const float first = 0.8f * condition.mean(all);  // a good guess for many distributions
  const float entry = last_entry(magnitudes, condition, {0.0f, condition.of(0.0f, all)}, {peak, at_peak}, first).at;
  const float from = condition.mean(magnitudes.from(entry, unit));
  if (from < entry) return from;  // the sum meets b between two entries
  const float above = condition.mean(magnitudes.from(after(entry), unit));
  return above > entry ? above : entry;
}

// Two levels: the means of the entries below a cut, and from it on. They err less the more they differ from the common mean.
template <class View>
struct Split {
  const View& view;
  double unit;
  Part all;

  SHARED_MATH float high(const Part& from) const { return mean_of(from.sum, from.count, unit); }
  SHARED_MATH float low(const Part& from) const { return mean_of(all.sum - from.sum, all.count - from.count, unit); }

  // The part of the sum of squares that the levels remove, in units. count may be a fraction.
  SHARED_MATH double gain(double count, double sum) const {
    const double n = static_cast<double>(all.count), rest = n - count;
    if (!(count > 0 && rest > 0)) return 0;
    const double above = sum - count * (static_cast<double>(all.sum) / n);
    return above * above * n / (count * rest);
  }
  SHARED_MATH double gain(const Part& from) const {
    return gain(static_cast<double>(from.count), static_cast<double>(from.sum));
  }

  // A bound on the gain of every cut between low and high. The gain is convex in count and sum, and these stay in a triangle,
  // since all entries between lie in [low, high].
  SHARED_MATH double most(float low, const Part& from_low, float high, const Part& from_high) const {
    const double l = low / unit, h = high / unit, count = static_cast<double>(from_high.count);
    const double sum = static_cast<double>(from_high.sum), rise = static_cast<double>(from_low.sum - from_high.sum);
    const double more = (rise - l * static_cast<double>(from_low.count - from_high.count)) / (h - l);
    const double corner = gain(count + more, sum + h * more), one = gain(from_low), other = gain(from_high);
    const double ends = one > other ? one : other;
    return corner > ends ? corner : ends;
  }
};

// The largest number of halvings of the range.
constexpr int kDeepest = 40;
// The factor by which a bound must exceed the best gain to be worth a look.
constexpr double kNearly = 1 + 1e-9;

// Find the cut with the largest gain, which meets Lloyd's conditions. The range is halved from the left. A half is searched
// only if its bound exceeds the best gain.
template <class View>
SHARED_MATH float best_cut(const Split<View>& split, Ends ends, float cut) {
  const View& view = split.view;
  double best = split.gain(view.from(cut, split.unit));
  const double wide = static_cast<double>(ends.high) - ends.low;
  float low = ends.low;
  Part from_low = split.all;
  int64_t place = 0;  // in deepest halves
  for (int depth = 0; place < int64_t{1} << kDeepest;) {
    const int64_t size = int64_t{1} << (kDeepest - depth);
    const float high = static_cast<float>(ends.low + wide * ldexp(static_cast<double>(place + size), -kDeepest));
    const Part from_high = view.from(high, split.unit);
    const double gain = split.gain(from_high);
    if (gain > best) {
      best = gain;
      cut = high;
    }
    if (from_low.count - from_high.count > 1 && depth < kDeepest && high > low &&
        split.most(low, from_low, high, from_high) > best * kNearly) {
      ++depth;
      continue;
    }
    low = high;
    from_low = from_high;
    place += size;
    while (depth > 0 && place % (int64_t{2} << (kDeepest - depth)) == 0) --depth;
  }
  return cut;
}

// The Euclidean norm, at most kFurthest.
template <class View>
SHARED_MATH float norm_of(const View& view, float peak) {
  const double unit = ldexp(unit_for(peak, view.n), 1 + exponent_of(magnitude_key(peak)));
  const double norm = sqrt(static_cast<double>(view.squares(unit)) * unit);
  return norm < kFurthest ? static_cast<float>(norm) : kFurthest;
}

template <class View>
SHARED_MATH void quantile_levels(const View& view, Ends ends, int64_t count, float* levels) {
  const int64_t from_low = ends.low == -kFurthest ? view.count_from(ends.low) : view.n;
  const int64_t from_high = view.count_from(ends.high);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rank = ((view.n - 1) * i + (count - 1) / 2) / (count - 1);  // from the smallest
    const int64_t k = view.n - rank;
    levels[i] = k > from_low ? ends.low : kth_largest(view, k, {ends.low, from_low}, {ends.high, from_high}, ends.high).at;
  }
}

// Find BinGrad-b's levels: the means on both sides of the mean, or of the best cut. No entry is further than kLargest from its
// level.
template <class View>
SHARED_MATH void mean_levels(const View& view, Ends ends, double unit, bool best, float* levels, float& cut) {
  const Split<View> split{view, unit, view.from(ends.low, unit)};
  cut = split.high(split.all);
  if (best) cut = best_cut(split, ends, cut);
  const Part from = view.from(cut, unit);
  levels[1] = from.count > 0 ? split.high(from) : cut;
  levels[0] = from.count < view.n ? split.low(from) : levels[1];
  const auto between = [](float x, float low, float high) { return x < low ? low : x > high ? high : x; };
  levels[0] = between(levels[0], cut - kLargest, ends.low + kLargest);
  levels[1] = between(levels[1], ends.high - kLargest, cut + kLargest);
}

// The number of ORQ's levels less one, as a constant that their search is compiled for; 0 for all other rules, and for two
// levels.
template <int kLast>
struct Last {
  static constexpr int value = kLast;
};

template <class Work>
inline void with_last(Form form, int64_t count, Work work) {
  if (form != Form::optimal || count < 3) return work(Last<0>{});
  if (count == 3) return work(Last<2>{});
  if (count == 5) return work(Last<4>{});
  work(Last<8>{});
}

// Find the levels of a group: levels <- `count` levels, in order; cut <- where two levels that are not drawn start to round up.
template <int kLast, class View>
SHARED_MATH void levels_of(const View& view, Form form, int64_t count, float* levels, float& cut) {
  const auto spread = [&](float low, float high) {
    for (int64_t i = 0; i < count; ++i) levels[i] = even({low, high}, i, count - 1, i == 0 ? low : levels[i - 1]);
  };
  const auto both_sides = [&](float b) { spread(-b, b); };
  cut = 0;
  Ends ends = view.ends();
  if (!is_finite(ends.low) || !is_finite(ends.high)) return both_sides(not_a_number());
  const Ends farthest = ends;
  ends = {near(ends.low), near(ends.high)};
  const auto peak_of = [](Ends of) { return -of.low > of.high ? -of.low : of.high; };
  const float peak = peak_of(ends);
  const double unit = unit_for(peak_of(farthest), view.n);
  const auto two_means = [&](bool best) {
    mean_levels(view, farthest, unit, best, levels, cut);
    for (int64_t i = 2; i < count; ++i) levels[i] = levels[1];
  };
  if constexpr (kLast > 0) return optimal_levels<kLast>(view, ends, unit, levels);
  switch (form) {
    case Form::partly:
      both_sides(partly_of(view.magnitudes(), peak, unit));
      break;
    case Form::mean:
      two_means(false);
      break;
    case Form::lloyd:
      two_means(true);
      break;
    case Form::peak:
      both_sides(peak);
      break;
    case Form::norm:
      both_sides(norm_of(view, peak_of(farthest)));
      break;
    case Form::optimal:  // two levels: the ends
    case Form::range:
      spread(ends.low, ends.high);
      break;
    case Form::quantile:
      quantile_levels(view, ends, count, levels);
      break;
    case Form::sign: {
      const Part all = view.magnitudes().from(0.0f, unit);
      both_sides(mean_of(all.sum, all.count, unit));
      break;
    }
  }
}

}  // namespace gradcomp
