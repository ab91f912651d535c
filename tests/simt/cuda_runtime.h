// Stands in for CUDA's header of this name: the language, the types and the calls that kernels here use, for a C++ compiler.
// A kernel that needs more adds it here, with CUDA's meaning.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// There is one copy of a shared variable. The linker (shared.ld) puts all of them together, so that the emulator can fill them
// with garbage for every block, and put them aside while another block runs.
#define __shared__ static

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// ---- The host's calls. They are complete when they return, whatever the stream.

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t stream);

namespace simt {
bool accept(const Shape& shape);  // false, and an error for cudaGetLastError, if no device would take this launch
}  // namespace simt

// ---- Barriers, votes and shuffles.

#define SIMT_SITE simt::Site site = simt::Site::here(__builtin_FILE(), __builtin_LINE())

inline void __syncthreads(SIMT_SITE) { simt::meet_block("__syncthreads", false, site); }
inline int __syncthreads_or(int vote, SIMT_SITE) { return simt::meet_block("__syncthreads_or", vote != 0, site); }

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) {
  simt::meet_warp("__syncwarp", mask, 0, simt::lane(), true, site);
}
inline unsigned __ballot_sync(unsigned mask, int vote, SIMT_SITE) {
  return simt::meet_warp("__ballot_sync", mask, vote != 0, simt::lane(), false, site).nonzero;
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

}  // namespace simt

// Of segments of `width` lanes, each reads from its own.
template <class T>
T __shfl_sync(unsigned mask, T x, int source, int width = 32, SIMT_SITE) {
  const unsigned segment = simt::lane() & ~static_cast<unsigned>(width - 1);
  return simt::shuffle("__shfl_sync", mask, x, segment | (static_cast<unsigned>(source) & (width - 1)), site);
}
// Of the others, a lane whose source lies outside of the warp gets its own value back.
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta, SIMT_SITE) {
  const unsigned lane = simt::lane();
  return simt::shuffle("__shfl_up_sync", mask, x, lane < delta ? lane : lane - delta, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta, SIMT_SITE) {
  const unsigned lane = simt::lane();
  return simt::shuffle("__shfl_down_sync", mask, x, lane + delta < 32 ? lane + delta : lane, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits, SIMT_SITE) {
  return simt::shuffle("__shfl_xor_sync", mask, x, simt::lane() ^ static_cast<unsigned>(bits), site);
}

inline void __threadfence() { simt::fence(); }

// ---- Atomics, for CUDA's types. One thread runs at a time, so that they need nothing special but the shadow's consent.

namespace simt {

template <class T>
concept Integer = std::same_as<T, int> || std::same_as<T, unsigned>;

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

template <simt::Integer T>
T atomicAdd(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old + x; });
}
template <simt::Integer T>
T atomicOr(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old | x; });
}
template <simt::Integer T>
T atomicMax(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old < x ? x : old; });
}
template <simt::Integer T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T old) { return old == expected ? x : old; });
}
template <simt::Integer T>
T atomicExch(T* at, std::type_identity_t<T> x) {
  return simt::exchange(at, [&](T) { return x; });
}

// ---- Small functions.

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (unsigned bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}

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

template <simt::Integer T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <simt::Integer T>
T max(T a, T b) {
  return a < b ? b : a;
}
