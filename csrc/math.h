// The arithmetic that both twins share, so that no result depends on the device: number formats, comparison order, hash.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SHARED_MATH __host__ __device__ inline
#else
#define SHARED_MATH inline
#endif
// Before a loop whose arrays belong in a GPU's registers.
#ifdef __CUDACC__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED
#endif
// Keep one copy of a long function that a kernel calls in many places: instructions have a cache, too.
#ifdef __CUDA_ARCH__
#define ONE_COPY __noinline__
#else
#define ONE_COPY
#endif

namespace gradcomp {

SHARED_MATH uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

SHARED_MATH float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

SHARED_MATH bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// The largest magnitude in a residual. It is a little below the largest float, so that rounding a sum of all
// ranks' shares cannot overflow.
constexpr float kLargest = 0x1.fep127f;

// The nearest number that a residual may hold. A NaN stays one.
SHARED_MATH float within_largest(float x) {
  const float below = kLargest < x ? kLargest : x;  // in this form one instruction each
  return -kLargest > below ? -kLargest : below;
}

// A residual after something is added to it. factor: of the old one.
SHARED_MATH float next_residual(float residual, float added, float factor) { return within_largest(factor * residual + added); }

SHARED_MATH float not_a_number() { return float_of(0x7fc00000u); }

// The order of top-k: a larger key is a larger magnitude, for all finite floats and infinity. Ties go to the lower index.
SHARED_MATH uint32_t magnitude_key(float x) { return bits_of(x) & 0x7fffffffu; }

SHARED_MATH float bf16_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

// Round to nearest, ties to even. A NaN stays a (quiet) NaN.
SHARED_MATH uint16_t float_to_bf16(float x) {
  const uint32_t b = bits_of(x);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const uint32_t nan = (b >> 16) | 0x40u;
  return static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

SHARED_MATH float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  // A half's exponent and mantissa in a float's place make a number that is too small by 2^112. One exact multiplication mends
  // normal and subnormal numbers alike. Infinities and NaNs get the largest exponent.
  const float scaled = float_of(magnitude << 13) * float_of(0x77800000u);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return float_of(sign | (magnitude >= 0x7c00u ? special : bits_of(scaled)));
}

// Round to nearest, ties to even; to infinity above the largest half. A NaN stays a NaN. No branches, so that loops vectorise.
SHARED_MATH uint16_t float_to_f16(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
  const uint32_t b = magnitude_key(x);
  const uint32_t normal = (b + 0xfffu + ((b >> 13) & 1u) - 0x38000000u) >> 13;
  // Below the normal halves, adding 0.5 leaves the wanted bits, correctly rounded, at the bottom of the mantissa.
  const uint32_t subnormal = bits_of(float_of(b) + 0.5f) - 0x3f000000u;
  uint32_t half = b < 0x38800000u ? subnormal : normal;
  half = b >= 0x477ff000u ? 0x7c00u : half;
  half = b > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(sign | half);
}

// 2^exponent for -126 <= exponent <= 127.
SHARED_MATH float power_of_two(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

// The exponent of a finite magnitude's largest bit, not below that of the smallest normal number.
SHARED_MATH int exponent_of(uint32_t magnitude) {
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  return exponent < -126 ? -126 : exponent;
}

// Count the entries of a payload: the header's count, at most its capacity. The count must not be negative.
SHARED_MATH int64_t entries_there(int32_t count, int64_t capacity) { return count < capacity ? count : capacity; }

// Add to an entry of a residual, unless x is not finite.
SHARED_MATH float add_if_finite(float to, float x) { return is_finite(x) ? within_largest(to + x) : to; }

// The share of a payload's entries that goes back once the update is known: all of them if it is not finite.
SHARED_MATH float share_to_keep(const float* update, float keep) { return is_finite(update[0]) ? keep : 1.0f; }

// The number of numbers in memory for a layer's moments. The layer's number of entries is not among them.
constexpr int kMoments = 5;

// The statistics of some entries.
template <class T>
struct Moments {
  T count, mean, squares, low, high, nonzero;
};

// Join the statistics of two lots (Chan, Golub and LeVeque), which is accurate wherever the mean lies.
template <class T>
SHARED_MATH Moments<T> merge(const Moments<T>& a, const Moments<T>& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const T count = a.count + b.count, apart = b.mean - a.mean, share = b.count / count;
  return {count,
          a.mean + apart * share,
          a.squares + b.squares + apart * apart * a.count * share,
          a.low < b.low ? a.low : b.low,
          a.high > b.high ? a.high : b.high,
          a.nonzero + b.nonzero};
}

template <class T>
SHARED_MATH Moments<double> load_moments(const T* five, double count) {
  return {count, five[0], five[1], five[2], five[3], five[4]};
}

template <class T>
SHARED_MATH void store_moments(const Moments<T>& moments, T* five) {
  five[0] = moments.mean;
  five[1] = moments.squares;
  five[2] = moments.low;
  five[3] = moments.high;
  five[4] = moments.nonzero;
}

// The threshold of a layer with these moments (set_thresholds in ops.inc).
SHARED_MATH float threshold_of(const Moments<double>& all, float lam) {
  const float below = -static_cast<float>(all.low), above = static_cast<float>(all.high);
  const float largest = below > above ? below : above;
  // Squares of entries beyond 10^17 may overflow. With an infinite sigma nothing would pass: take half of the largest.
  if (!(all.squares < kLargest)) return largest / 2;
  double count = all.count, squares = all.squares;
  if (all.nonzero > 0 && all.nonzero < count) {
    // Leave the zeros out: each lies the mean away from it, and the other entries have a mean of their own.
    const double zeros = count - all.nonzero;
    squares -= all.mean * all.mean * count * zeros / all.nonzero;
    count = all.nonzero;
  }
  const double sigma = count > 0 && squares > 0 ? sqrt(squares / count) : 0.0;
  const float threshold = static_cast<float>(lam * sigma);
  return largest > 0 && !(threshold < largest) ? float_of(bits_of(largest) - 1) : threshold;
}

SHARED_MATH double within(double x, double least, double most) { return x < least ? least : x > most ? most : x; }

// A multiple of the standard deviation, and the gain of its steering: positive if too many passed last, negative if too few
// did.
struct Steered {
  float lam, gain;
};

// What follows (steer in ops.inc).
SHARED_MATH Steered steered(Steered last, double count, double target) {
  constexpr double kLeastGain = 0.01, kMostGain = 0.1, kLeastLam = 1.0 / 1024, kMostLam = 1024;
  const bool above = count >= target, same_side = above == (last.gain > 0);
  const double size = last.gain < 0 ? -last.gain : last.gain, moved = same_side ? 1.25 * size : size / 2;
  const double gain = within(moved, kLeastGain, kMostGain), seen = within(count, target / 2, 2 * target);
  const double next = above ? last.lam * (1 + gain * (seen / target - 1)) : last.lam / (1 + gain * (target / seen - 1));
  return {static_cast<float>(within(next, kLeastLam, kMostLam)), static_cast<float>(above ? gain : -gain)};
}

// Hash 32 bits, by the constants of the "lowbias32" family, which an exhaustive search found.
template <class Bits>
SHARED_MATH __attribute__((always_inline)) Bits mix(Bits x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

}  // namespace gradcomp
