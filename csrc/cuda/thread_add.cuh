// One entry of a payload on a GPU: added to a target whose first entry another thread may set to NaN meanwhile.
#pragma once

#include <cuda_runtime.h>

#include "../math.h"
#include "../span.h"

namespace gradcomp::cuda {

// Make target[0] NaN, which tells every rank that a payload failed.
static __device__ __forceinline__ void spoil(Span<float> target, Span<uint8_t> marks) {
  if (marks.data != nullptr) marks.data[0] = 1;
  atomicExch(reinterpret_cast<unsigned*>(target.data), bits_of(not_a_number()));
}

// Add x to target[index]. Returns false, and writes nothing, if there is no such entry. No other thread adds to this entry, but
// another may spoil the first one: the NaN stays, whichever thread comes first.
static __device__ __forceinline__ bool add_at(Span<float> target, Span<uint8_t> marks, int64_t index, float x) {
  if (index < 0 || index >= target.size) return false;
  if (marks.data != nullptr) marks.data[index / kLine] = 1;
  if (index > 0) {
    target.data[index] += x;
    return true;
  }
  auto* const word = reinterpret_cast<unsigned*>(target.data);
  unsigned seen = *static_cast<volatile unsigned*>(word);
  while (float_of(seen) == float_of(seen)) {
    const unsigned before = atomicCAS(word, seen, bits_of(float_of(seen) + x));
    if (before == seen) break;
    seen = before;
  }
  return true;
}

}  // namespace gradcomp::cuda
