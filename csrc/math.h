// The arithmetic both twins share, so that a result cannot depend on the device: number formats, comparison order, hash.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SHARED_MATH __host__ __device__ inline
#else
#define SHARED_MATH inline
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

SHARED_MATH float not_a_number() { return float_of(0x7fc00000u); }

// The order of top-k: a larger key is a larger magnitude (true for all finite floats and infinity). Ties go to the lower index.
SHARED_MATH uint32_t magnitude_key(float x) { return bits_of(x) & 0x7fffffffu; }

SHARED_MATH float bf16_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

// To nearest, ties to even; a NaN stays a (quiet) NaN.
SHARED_MATH uint16_t float_to_bf16(float x) {
  const uint32_t b = bits_of(x);
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const uint32_t nan = (b >> 16) | 0x40u;
  return static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

SHARED_MATH float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  // A half's exponent and mantissa placed in a float's are too small by 2^112: one exact multiplication mends normal and
  // subnormal numbers alike; infinities and NaNs get the largest exponent.
  const float scaled = float_of(magnitude << 13) * float_of(0x77800000u);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return float_of(sign | (magnitude >= 0x7c00u ? special : bits_of(scaled)));
}

// To nearest, ties to even; above the largest half, infinity; a NaN stays a NaN. Without branches, so that loops vectorise.
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

// A good 32-bit mixer (multiply and xor-shift; the constants are those of the "lowbias32" family found by exhaustive search).
SHARED_MATH uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

}  // namespace gradcomp
