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

}  // namespace gradcomp::cuda
