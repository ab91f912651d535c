// Stands in for CUDA's header of this name: the language, the types and the calls that kernels here use, for a C++ compiler.
// A kernel that needs more adds it here, with CUDA's meaning.
#pragma once

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// There is one copy of a shared variable. The linker (shared.ld) puts all of them together, so that the emulator can fill them
// with garbage for every block, and put them aside while another block runs.
#define __shared__ static

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- The host's calls. They are complete when they return, whatever the stream.

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3, cudaMemcpyDefault = 4 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

namespace simt {
cudaError_t allow_shared(const void* kernel, int bytes);
bool accept(const Shape& shape);  // false, and an error for cudaGetLastError, if no device would take this launch
}  // namespace simt

template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute, int bytes) {
  return simt::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

// ---- Barriers, votes and shuffles.

#define SIMT_SITE simt::Site site = simt::Site::here(__builtin_FILE(), __builtin_LINE())

inline void __syncthreads(SIMT_SITE) { simt::meet_block("__syncthreads", false, site); }
inline int __syncthreads_or(int vote, SIMT_SITE) { return simt::meet_block("__syncthreads_or", vote != 0, site).yes > 0; }
inline int __syncthreads_and(int vote, SIMT_SITE) {
  const simt::Tally tally = simt::meet_block("__syncthreads_and", vote != 0, site);
  return tally.yes == tally.present;
}
inline int __syncthreads_count(int vote, SIMT_SITE) {
  return static_cast<int>(simt::meet_block("__syncthreads_count", vote != 0, site).yes);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) {
  simt::meet_warp("__syncwarp", mask, 0, simt::lane(), true, site);
}
inline unsigned __ballot_sync(unsigned mask, int vote, SIMT_SITE) {
  return simt::meet_warp("__ballot_sync", mask, vote != 0, simt::lane(), false, site).nonzero;
}
inline int __any_sync(unsigned mask, int vote, SIMT_SITE) {
  return simt::meet_warp("__any_sync", mask, vote != 0, simt::lane(), false, site).nonzero != 0;
}
inline int __all_sync(unsigned mask, int vote, SIMT_SITE) {
  return simt::meet_warp("__all_sync", mask, vote != 0, simt::lane(), false, site).nonzero == mask;
}

namespace simt {

template <class T>
T shuffle(const char* what, unsigned mask, T x, unsigned source, Site site) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  bits = meet_warp(what, mask, bits, source, false, site).value;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Shuffles stay inside segments of `width` lanes; a lane whose source lies outside gets its own value back.
inline unsigned segment(int width) { return lane() & ~static_cast<unsigned>(width - 1); }

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T x, int source, int width = 32, SIMT_SITE) {
  return simt::shuffle("__shfl_sync", mask, x, simt::segment(width) | (static_cast<unsigned>(source) & (width - 1)), site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32, SIMT_SITE) {
  const unsigned lane = simt::lane();
  return simt::shuffle("__shfl_up_sync", mask, x, lane < simt::segment(width) + delta ? lane : lane - delta, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32, SIMT_SITE) {
  const unsigned lane = simt::lane();
  return simt::shuffle("__shfl_down_sync", mask, x, lane + delta < simt::segment(width) + width ? lane + delta : lane, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32, SIMT_SITE) {
  const unsigned lane = simt::lane(), source = lane ^ static_cast<unsigned>(bits);
  return simt::shuffle("__shfl_xor_sync", mask, x, source < simt::segment(width) + width ? source : lane, site);
}

inline void __threadfence() { simt::fence(); }
inline void __threadfence_block() {}

// ---- Atomics, for CUDA's types. One thread runs at a time, so that they need nothing special but the shadow's consent.

namespace simt {

template <class T, class... Types>
concept OneOf = (std::same_as<T, Types> || ...);
template <class T>
concept Integer = OneOf<T, int, unsigned, unsigned long long>;
template <class T>
concept Number = OneOf<T, int, unsigned, unsigned long long, float, double>;

// Functions that the shadow does not watch: they tell it themselves.
#define SIMT_UNWATCHED __attribute__((no_sanitize("thread"), noinline))
#define SIMT_CALLER __builtin_extract_return_addr(__builtin_return_address(0))

template <class T, class Change>
SIMT_UNWATCHED T exchange(T* at, Change change) {
  touch_atomic(at, sizeof *at, SIMT_CALLER);
  const T before = *at;
  *at = change(before);
  return before;
}

}  // namespace simt

template <simt::Number T>
T atomicAdd(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return static_cast<T>(old + x); });
}
template <simt::Integer T>
T atomicOr(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old | x; });
}
template <simt::Integer T>
T atomicAnd(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old & x; });
}
template <simt::Integer T>
T atomicMax(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old < x ? x : old; });
}
template <simt::Integer T>
T atomicMin(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return x < old ? x : old; });
}
template <simt::Integer T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old == expected ? x : old; });
}
template <class T>
  requires simt::Integer<T> || std::same_as<T, float>
T atomicExch(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T) { return x; });
}

// ---- Small functions.

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

template <class T>
T __ldg(const T* at) {
  return *at;
}
// Kernels here read other blocks' results with __ldcg, and nothing else.
template <class T>
SIMT_UNWATCHED T __ldcg(const T* at) {
  simt::touch_second_level(at, sizeof *at, SIMT_CALLER);
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, std::type_identity_t<T> x) {
  *at = x;
}

// Of a number and a NaN, CUDA gives the number.
template <simt::Number T>
T min(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
  return b < a ? b : a;
}
template <simt::Number T>
T max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a < b ? b : a;
}
