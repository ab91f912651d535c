// Stands in for CUDA's header of this name: the half type and its conversions, done by the compiler's own _Float16.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
using half = __half;
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half h) { return static_cast<float>(std::bit_cast<_Float16>(h.bits)); }
inline __half __float2half_rn(float x) { return {std::bit_cast<uint16_t>(static_cast<_Float16>(x))}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline uint16_t __half_as_ushort(__half h) { return h.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
