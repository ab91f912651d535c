// Stands in for CUDA's header of this name: the half type and its conversions, in plain arithmetic.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
using half = __half;
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half h) {
  const int exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
  const float magnitude = exponent == 31  ? (mantissa == 0 ? INFINITY : NAN)
                          : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  return h.bits >> 15 ? -magnitude : magnitude;
}

// Round to nearest, ties to even: count the steps of halves of this size, which are consecutive numbers.
inline __half __float2half_rn(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return {0x7fff};
  if (std::isinf(x)) return {static_cast<uint16_t>(sign | 0x7c00)};
  const int exponent = x == 0 ? -13 : std::ilogb(x) + 1;
  const int unit = std::max(exponent, -13) - 11;
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(static_cast<double>(x)), -unit)));
  return {static_cast<uint16_t>(sign | std::min((unit + 24) * 1024 + steps, 0x7c00))};
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline uint16_t __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
