// The levels of a group, as both twins find them, by looking through its entries as often as needed (search.h).
#pragma once

#include "rounding.h"
#include "search.h"

namespace gradcomp {

// What a group's levels follow from. Python names them in this order (kernels.FORMS).
enum class Form : int64_t { orq, partly, mean, lloyd, peak, norm, range, quantile, sign };
constexpr int64_t kForms = 9;

// Between two levels, that for which rounding at random errs least: as many entries are from it on, beside those from the upper
// one on, as all between them are worth together. What they are worth on average also hints at where they lie.
template <class View>
SHARED_MATH float level_between(const View& view, float low, const Part& from_low, float high, const Part& from_high,
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

// ORQ: a level into each interval, then into each half of it, and so on.
template <class View>
SHARED_MATH void optimal_levels(const View& view, Ends ends, double unit, int64_t count, float* levels) {
  Part from[9];
  const int64_t last = count - 1;
  levels[0] = ends.low;
  levels[last] = ends.high;
  from[0] = view.from(ends.low, unit);
  const int64_t largest = view.count_from(ends.high);
  from[last] = {largest, largest * whole(ends.high, unit)};
  for (int64_t step = last; step > 1; step /= 2) {
    for (int64_t i = 0; i < last; i += step) {
      const int64_t middle = i + step / 2;
      levels[middle] = level_between(view, levels[i], from[i], levels[i + step], from[i + step], unit);
      if (step > 2) from[middle] = view.from(levels[middle], unit);
    }
  }
}

// Holds up to where the magnitudes from x on add up to n x.
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

// BinGrad-pb: b = the sum of the magnitudes above b, over n; or the entry that the sum jumps across.
template <class View>
SHARED_MATH float partly_of(const View& magnitudes, float peak, double unit) {
  const WithinSum<View> condition{magnitudes, unit};
  const double at_peak = condition.surplus(peak);
  if (at_peak >= 0) return peak;
  const Part all = magnitudes.from(0.0f, unit);
  const float first = 0.8f * condition.mean(all);  // of many distributions
  const float entry = last_entry(magnitudes, condition, {0.0f, condition.of(0.0f, all)}, {peak, at_peak}, first);
  const float from = condition.mean(magnitudes.from(entry, unit));
  if (from < entry) return from;  // the sum comes down to it between two entries
  const float above = condition.mean(magnitudes.from(after(entry), unit));
  return above > entry ? above : entry;
}

// Two levels, the means of the entries below a cut and from it on: the more they differ from the mean of all, the less they
// err.
template <class View>
struct Split {
  const View& view;
  double unit;
  Part all;

  SHARED_MATH float high(const Part& from) const { return mean_of(from.sum, from.count, unit); }
  SHARED_MATH float low(const Part& from) const { return mean_of(all.sum - from.sum, all.count - from.count, unit); }

  // What the levels take off the sum of squares, in units; count may be a fraction.
  SHARED_MATH double gain(double count, double sum) const {
    const double n = static_cast<double>(all.count), rest = n - count;
    if (!(count > 0 && rest > 0)) return 0;
    const double above = sum - count * (static_cast<double>(all.sum) / n);
    return above * above * n / (count * rest);
  }
  SHARED_MATH double gain(const Part& from) const {
    return gain(static_cast<double>(from.count), static_cast<double>(from.sum));
  }

  // No cut between low and high gains more: the gain is convex in count and sum, which stay in a triangle, since no entry
  // between is below low or above high.
  SHARED_MATH double most(float low, const Part& from_low, float high, const Part& from_high) const {
    const double l = low / unit, h = high / unit, count = static_cast<double>(from_high.count);
    const double sum = static_cast<double>(from_high.sum), rise = static_cast<double>(from_low.sum - from_high.sum);
    const double more = (rise - l * static_cast<double>(from_low.count - from_high.count)) / (h - l);
    const double corner = gain(count + more, sum + h * more), one = gain(from_low), other = gain(from_high);
    const double ends = one > other ? one : other;
    return corner > ends ? corner : ends;
  }
};

constexpr int kDeepest = 40;
constexpr double kNearly = 1 + 1e-9;

// The cut that gains most (Lloyd's conditions hold there): halves of halves of what lies between the ends, from the left, as
// long as they may have a better one.
template <class View>
SHARED_MATH float best_cut(const Split<View>& split, Ends ends, float cut) {
  const View& view = split.view;
  double best = split.gain(view.from(cut, split.unit));
  const double wide = static_cast<double>(ends.high) - ends.low;
  float low = ends.low;
  Part from_low = split.all;
  int64_t place = 0;  // of so many of the deepest halves
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

// The Euclidean norm; of an overflow, the largest float.
template <class View>
SHARED_MATH float norm_of(const View& view, float peak) {
  const double unit = ldexp(unit_for(peak, view.n), 1 + exponent_of(magnitude_key(peak)));
  const double norm = sqrt(static_cast<double>(view.squares(unit)) * unit);
  return norm < 0x1.fffffep127 ? static_cast<float>(norm) : 0x1.fffffep127f;
}

template <class View>
SHARED_MATH void quantile_levels(const View& view, Ends ends, int64_t count, float* levels) {
  const int64_t from_high = view.count_from(ends.high);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t rank = ((view.n - 1) * i + (count - 1) / 2) / (count - 1);  // from the smallest
    levels[i] = kth_largest(view, view.n - rank, ends.low, view.n, ends.high, from_high, ends.high);
  }
}

// BinGrad-b: the means on both sides of the mean, or of the best cut.
template <class View>
SHARED_MATH void mean_levels(const View& view, Ends ends, double unit, bool best, float* levels, float& cut) {
  const Split<View> split{view, unit, view.from(ends.low, unit)};
  cut = split.high(split.all);
  if (best) cut = best_cut(split, ends, cut);
  const Part from = view.from(cut, unit);
  levels[1] = from.count > 0 ? split.high(from) : cut;
  levels[0] = from.count < view.n ? split.low(from) : levels[1];
}

// levels <- those of a group, in order, `count` of them; cut <- from where on two levels round up, if they do not draw.
template <class View>
SHARED_MATH void levels_of(const View& view, Form form, int64_t count, float* levels, float& cut) {
  const auto spread = [&](float low, float high) {  // evenly, from end to end
    for (int64_t i = 0; i < count; ++i) {
      const float share = static_cast<float>(i) / static_cast<float>(count - 1);
      levels[i] = low * (1 - share) + high * share;
    }
  };
  const auto both_sides = [&](float b) { spread(-b, b); };
  cut = 0;
  const Ends ends = view.ends();
  if (!is_finite(ends.low) || !is_finite(ends.high)) return both_sides(not_a_number());
  const float peak = -ends.low > ends.high ? -ends.low : ends.high;
  const double unit = unit_for(peak, view.n);
  switch (form) {
    case Form::orq:
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
