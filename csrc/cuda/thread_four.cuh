// Four entries in one access of a thread, if their address allows it, otherwise one by one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gradcomp::cuda {

// Four floats, 16-bit patterns or bytes, and the word that holds them.
template <class Element>
struct FourOf {
  using Word = std::conditional_t<sizeof(Element) == 4, float4, std::conditional_t<sizeof(Element) == 2, uint2, uint32_t>>;
  Element x[4];
};
using Four = FourOf<float>;
using FourHalves = FourOf<uint16_t>;
using FourBytes = FourOf<uint8_t>;

// Whether fours can be read and written from p on, and so from every fourth entry behind it.
template <class Element>
static __device__ __forceinline__ bool is_aligned(const Element* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(typename FourOf<std::remove_const_t<Element>>::Word) == 0;
}

// Read four that are there and aligned. A loop that streams decides this once for all its fours: a choice for each would keep
// it from issuing the next load before it uses this one.
template <class Element>
static __device__ __forceinline__ FourOf<std::remove_const_t<Element>> load_whole(Element* p) {
  FourOf<std::remove_const_t<Element>> four;
  const auto v = *reinterpret_cast<const typename FourOf<std::remove_const_t<Element>>::Word*>(p);
  memcpy(four.x, &v, sizeof v);
  return four;
}

template <class Element>
static __device__ __forceinline__ void store_whole(Element* p, const FourOf<Element>& four) {
  typename FourOf<Element>::Word v;
  memcpy(&v, four.x, sizeof v);
  *reinterpret_cast<typename FourOf<Element>::Word*>(p) = v;
}

// Read p[0 .. count), and zeros up to four.
template <class Element>
static __device__ __forceinline__ FourOf<std::remove_const_t<Element>> load_four(Element* p, int64_t count) {
  if (count >= 4 && is_aligned(p)) return load_whole(p);
  FourOf<std::remove_const_t<Element>> four = {};
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.x[i] = p[i];
  }
  return four;
}

// Write the first `count` of four.
template <class Element>
static __device__ __forceinline__ void store_four(Element* p, int64_t count, const FourOf<Element>& four) {
  if (count >= 4 && is_aligned(p)) return store_whole(p, four);
  for (int i = 0; i < 4; ++i) {
    if (i < count) p[i] = four.x[i];
  }
}

// Read and write fours that are there and aligned, or any.
template <bool kWhole, class Element>
static __device__ __forceinline__ auto load(Element* p, int64_t count) {
  if constexpr (kWhole) return load_whole(p);
  return load_four(p, count);
}

template <bool kWhole, class Element>
static __device__ __forceinline__ void store(Element* p, int64_t count, const FourOf<Element>& four) {
  if constexpr (kWhole) return store_whole(p, four);
  store_four(p, count, four);
}

// Copy from[0 .. count), changed, as number `thread` of kThreads: in fours where they are `aligned` in both arrays. A thread
// asks for kShare fours before it uses the first.
template <uint32_t kThreads, int kShare, class Change>
static __device__ __forceinline__ void copy_share(float* to, const float* from, uint32_t count, uint32_t thread, bool aligned,
                                                  Change change) {
  constexpr uint32_t kStep = 4 * kThreads;
  const uint32_t whole = aligned ? count / 4 * 4 : 0;
  uint32_t first = 4 * thread;
  for (; first + (kShare - 1) * kStep < whole; first += kShare * kStep) {
    Four share[kShare];
    UNROLLED for (int i = 0; i < kShare; ++i) share[i] = load_whole(from + first + i * kStep);
    UNROLLED for (int i = 0; i < kShare; ++i) {
      for (float& its : share[i].x) its = change(its);
      store_whole(to + first + i * kStep, share[i]);
    }
  }
  for (; first < whole; first += kStep) {
    Four four = load_whole(from + first);
    for (float& its : four.x) its = change(its);
    store_whole(to + first, four);
  }
  for (uint32_t i = whole + thread; i < count; i += kThreads) to[i] = change(from[i]);
}

}  // namespace gradcomp::cuda
