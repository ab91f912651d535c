// Vectors of eight lanes, and choices without branches: loops that compilers do not vectorise by themselves.
#pragma once

#include <cstdint>
#include <cstring>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between functions of one file only

#include "../math.h"

namespace gradcomp::cpu {
namespace {

// A typedef of its own lowers the alignment: beside vector_size, Clang ignores the attribute and moves as if aligned.
using AlignedFloats = float __attribute__((vector_size(32), may_alias));
typedef AlignedFloats Floats __attribute__((aligned(4)));
using Longs = uint64_t __attribute__((vector_size(32), may_alias));
using Words = uint32_t __attribute__((vector_size(32), may_alias));
typedef Words Unaligned __attribute__((aligned(4)));

constexpr Words kLanes = {0, 1, 2, 3, 4, 5, 6, 7};

#define INLINE inline __attribute__((always_inline))

// Choose yes or no without a branch, which would keep a loop from being vectorised.
inline float either(bool which, float yes, float no) {
  const uint32_t mask = which ? ~0u : 0u;
  return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

INLINE Floats in_all_lanes(float x) { return Floats{x, x, x, x, x, x, x, x}; }  // x + 0 would make -0 into 0

// Permute: lane i comes from lane lanes[i], modulo 8.
INLINE Floats chosen(const Floats& x, const Words& lanes) {
#ifdef __clang__
  Floats y;
  for (int i = 0; i < 8; ++i) y[i] = x[lanes[i] % 8];
  return y;
#else
  return __builtin_shuffle(x, lanes);
#endif
}

// Read eight bytes into a lane each, on a little-endian machine.
INLINE Words eight_bytes(const uint8_t* bytes) {
  uint64_t all;
  memcpy(&all, bytes, sizeof all);
  const Longs four = Longs{} + all;
  const Words halves = reinterpret_cast<Words>(chosen(reinterpret_cast<Floats>(four), kLanes / 4));
  return halves >> (kLanes % 4 * 8) & 0xff;
}

}  // namespace
}  // namespace gradcomp::cpu
