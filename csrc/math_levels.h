// The levels of a group, found by looks through its entries (math_search.h) and without a sort.
#pragma once

#include "math_rounding.h"
#include "math_search.h"

namespace gradcomp {

// The rules that levels follow from, in the order of kernels.FORMS.
enum class Form : int64_t { optimal, partly, mean, lloyd, peak, norm, range, quantile, sign };
constexpr int64_t kForms = 9;

// Level i of `last` even steps.
SHARED_MATH float even(Ends ends, int64_t i, int64_t last) {
  const float share = static_cast<float>(i) / static_cast<float>(last);
  return ends.low * (1 - share) + ends.high * share;
}

// Find the level between two others for which rounding at random errs least. The entries between it and the upper level are as
// many as all entries between the two others are worth together, each by its place between them. Their average worth gives the
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
  return kth_largest(view, k, low, from_low.count, high, from_high.count, static_cast<float>(first));
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
// others beside it, where few entries are. Refined even steps may then err by half less, and the better ones are taken.
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
      other.at[i] = even(ends, i, last);
      other.from[i] = view.from(other.at[i], unit);
    }
    refine(view, unit, other);
    if (error_of(other, unit) < error_of(ladder, unit)) ladder = other;
  }
  for (int64_t i = 0; i < count; ++i) levels[i] = ladder.at[i];
}

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
  SHARED_MATH float mean(const Part& from) const { return mean_of(from.sum, magnitudes.n, unit); }
};

// Find BinGrad-pb's b: the sum of the magnitudes above b, over n, or the entry at which the sum jumps across it.
template <class View>
SHARED_MATH float partly_of(const View& magnitudes, float peak, double unit) {
  const WithinSum<View> condition{magnitudes, unit};
  const double at_peak = condition.surplus(peak);
  if (at_peak >= 0) return peak;
  const Part all = magnitudes.from(0.0f, unit);
  const float first = 0.8f * condition.mean(all);  // a good guess for many distributions
  const float entry = last_entry(magnitudes, condition, {0.0f, condition.of(0.0f, all)}, {peak, at_peak}, first);
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

// Halvings of the range, at most.
constexpr int kDeepest = 40;
// The factor by which a bound must exceed the best gain to be worth a look.
constexpr double kNearly = 1 + 1e-9;

// Find the cut that gains most, where Lloyd's conditions hold. The range is halved from the left, as long as a half may have a
// better cut.
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

// The largest level, so that two levels differ by a finite float.
constexpr float kFurthest = 0x1.fffffep126f;

// The Euclidean norm, at most kFurthest.
template <class View>
SHARED_MATH float norm_of(const View& view, float peak) {
  const double unit = ldexp(unit_for(peak, view.n), 1 + exponent_of(magnitude_key(peak)));
  const double norm = sqrt(static_cast<double>(view.squares(unit)) * unit);
  return norm < kFurthest ? static_cast<float>(norm) : kFurthest;
}

template <class View>
SHARED_MATH void quantile_levels(const View& view, Ends ends, int64_t count, float* levels) {
  const int64_t from_high = view.count_from(ends.high);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rank = ((view.n - 1) * i + (count - 1) / 2) / (count - 1);  // from the smallest
    levels[i] = kth_largest(view, view.n - rank, ends.low, view.n, ends.high, from_high, ends.high);
  }
}

// Find BinGrad-b's levels: the means on both sides of the mean, or of the best cut.
template <class View>
SHARED_MATH void mean_levels(const View& view, Ends ends, double unit, bool best, float* levels, float& cut) {
  const Split<View> split{view, unit, view.from(ends.low, unit)};
  cut = split.high(split.all);
  if (best) cut = best_cut(split, ends, cut);
  const Part from = view.from(cut, unit);
  levels[1] = from.count > 0 ? split.high(from) : cut;
  levels[0] = from.count < view.n ? split.low(from) : levels[1];
}

// levels <- the `count` levels of a group, in order; cut <- where two levels that are not drawn start to round up.
template <class View>
SHARED_MATH void levels_of(const View& view, Form form, int64_t count, float* levels, float& cut) {
  const auto spread = [&](float low, float high) {
    for (int64_t i = 0; i < count; ++i) levels[i] = even({low, high}, i, count - 1);
  };
  const auto both_sides = [&](float b) { spread(-b, b); };
  cut = 0;
  Ends ends = view.ends();
  if (!is_finite(ends.low) || !is_finite(ends.high)) return both_sides(not_a_number());
  ends.low = ends.low < -kFurthest ? -kFurthest : ends.low;
  ends.high = ends.high > kFurthest ? kFurthest : ends.high;
  const float peak = -ends.low > ends.high ? -ends.low : ends.high;
  const double unit = unit_for(peak, view.n);
  switch (form) {
    case Form::optimal:
      optimal_levels(view, ends, unit, count, levels);
      break;
    case Form::partly:
      both_sides(partly_of(view.magnitudes(), peak, unit));
      break;
    case Form::mean:
      mean_levels(view, ends, unit, false, levels, cut);
      break;
    case Form::lloyd:
      mean_levels(view, ends, unit, true, levels, cut);
      break;
    case Form::peak:
      both_sides(peak);
      break;
    case Form::norm:
      both_sides(norm_of(view, peak));
      break;
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
