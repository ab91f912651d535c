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

// Read p[0 .. count), and zeros up to four.
template <class Element>
static __device__ __forceinline__ FourOf<std::remove_const_t<Element>> load_four(Element* p, int64_t count) {
  using Loaded = FourOf<std::remove_const_t<Element>>;
  Loaded four = {};
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(typename Loaded::Word) == 0) {
    const auto v = *reinterpret_cast<const typename Loaded::Word*>(p);
    memcpy(four.x, &v, sizeof v);
    return four;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.x[i] = p[i];
  }
  return four;
}

// Write the first `count` of four.
template <class Element>
static __device__ __forceinline__ void store_four(Element* p, int64_t count, const FourOf<Element>& four) {
  using Word = typename FourOf<Element>::Word;
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(Word) == 0) {
    Word v;
    memcpy(&v, four.x, sizeof v);
    *reinterpret_cast<Word*>(p) = v;
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) p[i] = four.x[i];
  }
}

}  // namespace gradcomp::cuda
