// Quantisation, as both twins know it: groups of entries with levels of their own, the draws that round, and codes in words.
#pragma once

#include <cstdint>

#include "math.h"

namespace gradcomp {

// What a group's levels follow from. Python names them in this order (kernels.FORMS).
enum class Form : int64_t { orq, partly, mean, lloyd, peak, norm, range, quantile, sign };
constexpr int64_t kForms = 9;

// n entries are cut into groups of `size`; what is left over is a group of its own, or the end of the last if it is short.
struct Groups {
  static constexpr int64_t kShortest = 32;

  int64_t n, size;

  SHARED_MATH int64_t count() const { return n < size ? 1 : n / size + (n % size >= kShortest); }
  SHARED_MATH int64_t begin(int64_t group) const { return group * size; }
  SHARED_MATH int64_t end(int64_t group) const { return group + 1 == count() ? n : (group + 1) * size; }
  SHARED_MATH int64_t longest() const { return (n < size ? n : size) + kShortest - 1; }
};

// How codes lie in a word of 64 bits: digits of a base, in each so many codes of s levels; the first ones count least.
struct Packing {
  int64_t levels, codes, digits;
  uint64_t base;

  SHARED_MATH int64_t per_word() const { return codes * digits; }
  SHARED_MATH int64_t words(int64_t entries) const { return (entries + per_word() - 1) / per_word(); }
  SHARED_MATH int64_t words(const Groups& groups) const {
    const int64_t last = groups.count() - 1;
    return last * words(groups.size) + words(groups.n - groups.begin(last));
  }
};

constexpr Packing kPackings[] = {{2, 8, 8, 256}, {3, 5, 8, 243}, {5, 3, 9, 125}, {9, 2, 10, 81}};

constexpr const Packing* packing_of(int64_t levels) {
  for (const Packing& packing : kPackings) {
    if (packing.levels == levels) return &packing;
  }
  return nullptr;
}

// The draws of a group: a number in [0, 1) for each of its entries.
SHARED_MATH uint32_t draws_of(int64_t key, int64_t group) {
  return mix(mix(static_cast<uint32_t>(key)) ^ mix(static_cast<uint32_t>(key >> 32) + 0x9e3779b9u) ^
             static_cast<uint32_t>(group));
}
SHARED_MATH float draw(uint32_t draws, uint32_t entry) { return static_cast<float>(mix(draws + entry) >> 8) * 0x1p-24f; }

// What turns a way above a level into a share of the way to the next.
SHARED_MATH float level_inverse(float level, float next) { return next > level ? 1 / (next - level) : 0.0f; }

// The order of floats as that of integers, for halving an interval between two of them.
SHARED_MATH int32_t order_of(float x) {
  const auto bits = static_cast<int32_t>(bits_of(x));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
SHARED_MATH float at_order(int32_t order) { return float_of(static_cast<uint32_t>(order ^ ((order >> 31) & 0x7fffffff))); }

// Some of a group's entries: how many, and their sum.
struct Part {
  int64_t count;
  double sum;
};

struct Ends {
  float low, high;
};

// Below, a View is a group's entries, magnitudes or both, as a twin holds them:
//   n, finite(), ends(), squares(): how many, whether all are finite, the smallest and the largest, the sum of their squares;
//   count_from(low), least_from(low): of those not below low how many there are, and which is the smallest;
//   above(low, from), between(low, high, from): those above low, or in [low, high], and the sum of x - from over them.
// Sums are taken in 32 lanes, each in its order, which then add up in pairs, so that twins agree.

// The k-th largest of at least k entries that are not below low, where less than k are above high.
template <class View>
SHARED_MATH float kth_largest(const View& view, int64_t k, float low, float high) {
  int64_t from = order_of(low), to = int64_t{order_of(high)} + 1;  // so many: from on k at least, to on less
  while (to - from > 1) {
    const int64_t middle = from + (to - from) / 2;
    const float x = at_order(static_cast<int32_t>(middle));
    const int64_t found = view.count_from(x);
    if (found == k) return view.least_from(x) + 0.0f;  // of two zeros +0
    (found > k ? from : to) = middle;
  }
  return at_order(static_cast<int32_t>(from)) + 0.0f;
}

SHARED_MATH float within_floats(double x) { return x < 0x1.fffffep127 ? static_cast<float>(x) : 0x1.fffffep127f; }
SHARED_MATH int64_t clamp_to(int64_t low, int64_t x, int64_t high) { return x < low ? low : x > high ? high : x; }

// Between two levels, that for which rounding at random errs least: so many of the entries are at or above it as are worth the
// sum of what all are above the lower one.
template <class View>
SHARED_MATH float level_between(const View& view, float low, float high) {
  if (!(high > low)) return low;
  const Part inside = view.between(low, high, low);
  if (inside.count == 0) return low;
  const double wanted = inside.sum / (static_cast<double>(high) - low);
  const int64_t k = clamp_to(1, static_cast<int64_t>(ceil(wanted)), inside.count);
  return kth_largest(view, view.above(high, high).count + k, low, high);
}

// The one level of BinGrad-pb: b = sum of the magnitudes above b, over n; or where that sum jumps across b, the place.
template <class View>
SHARED_MATH float partly_of(const View& magnitudes) {
  const auto sum_above = [&](float b) {
    const Part above = magnitudes.above(b, 0.0f);
    return static_cast<float>(above.sum / static_cast<double>(magnitudes.n));
  };
  int64_t from = 0, to = order_of(magnitudes.ends().high);  // the sum is above `from`, but not above `to`
  while (to - from > 1) {
    const int64_t middle = from + (to - from) / 2;
    const float b = at_order(static_cast<int32_t>(middle)), found = sum_above(b);
    if (sum_above(found) == found) return found;
    if (found > b) {
      from = middle;
      to = to < order_of(found) ? to : order_of(found);
    } else {
      to = middle;
      from = from > order_of(found) ? from : order_of(found);
    }
  }
  return at_order(static_cast<int32_t>(to));
}

struct Two {
  float low, high, cut;
};

// The means of the entries below the cut, and of those from it on.
template <class View>
SHARED_MATH Two means_about(const View& view, Ends ends, float cut) {
  const Part high = view.between(cut, ends.high, 0.0f), all = view.between(ends.low, ends.high, 0.0f);
  const int64_t rest = all.count - high.count;
  const float above = high.count ? static_cast<float>(high.sum / static_cast<double>(high.count)) : cut;
  const float below = rest ? static_cast<float>((all.sum - high.sum) / static_cast<double>(rest)) : above;
  return {below, high.count ? above : below, cut};
}

constexpr int kMostTurns = 64;

// Of Lloyd's conditions, each level the mean of its entries and the cut half way between them, the solution next to the mean.
template <class View>
SHARED_MATH Two lloyd_of(const View& view, Ends ends, Two two) {
  for (int i = 0; i < kMostTurns; ++i) {
    const float half = 0.5f * two.low + 0.5f * two.high;
    if (half == two.cut) break;
    two = means_about(view, ends, half);
  }
  return two;
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
  if (!view.finite()) return both_sides(not_a_number());
  const Ends ends = view.ends();
  const float peak = -ends.low > ends.high ? -ends.low : ends.high;
  switch (form) {
    case Form::orq:
      levels[0] = ends.low;
      levels[count - 1] = ends.high;
      for (int64_t step = count - 1; step > 1; step /= 2) {
        for (int64_t i = 0; i + 1 < count; i += step) levels[i + step / 2] = level_between(view, levels[i], levels[i + step]);
      }
      break;
    case Form::partly:
      both_sides(partly_of(view.magnitudes()));
      break;
    case Form::mean:
    case Form::lloyd: {
      const Part all = view.between(ends.low, ends.high, 0.0f);
      Two two = means_about(view, ends, static_cast<float>(all.sum / static_cast<double>(all.count)));
      if (form == Form::lloyd) two = lloyd_of(view, ends, two);
      levels[0] = two.low;
      levels[1] = two.high;
      cut = two.cut;
      break;
    }
    case Form::peak:
      both_sides(peak);
      break;
    case Form::norm:
      both_sides(within_floats(sqrt(view.squares())));
      break;
    case Form::range:
      spread(ends.low, ends.high);
      break;
    case Form::quantile:
      for (int64_t i = 0; i < count; ++i) {
        const int64_t rank = ((view.n - 1) * i + (count - 1) / 2) / (count - 1);  // from the smallest
        levels[i] = kth_largest(view, view.n - rank, ends.low, ends.high);
      }
      break;
    case Form::sign:
      both_sides(static_cast<float>(view.magnitudes().between(0.0f, peak, 0.0f).sum / static_cast<double>(view.n)));
      break;
  }
}

}  // namespace gradcomp
