// Stands in for CUDA's header of this name: the bfloat16 type and its conversions.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 h) { return std::bit_cast<float>(static_cast<uint32_t>(h.bits) << 16); }

// Round to nearest, ties to even: choose between the two neighbours, whose bits are consecutive numbers, infinity included.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (std::isnan(x)) return {0x7fff};
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto below = static_cast<uint16_t>(bits >> 16);
  const uint32_t rest = bits & 0xffffu;
  const bool up = rest > 0x8000u || (rest == 0x8000u && below % 2 == 1);
  return {static_cast<uint16_t>(below + up)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
