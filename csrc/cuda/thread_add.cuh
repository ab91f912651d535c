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

// Change the target's first entry to change(entry). No other thread does, but another may spoil it: the NaN stays, whichever
// thread comes first.
template <class Change>
static __device__ __forceinline__ void change_first(float* target, Change change) {
  auto* const word = reinterpret_cast<unsigned*>(target);
  unsigned seen = *static_cast<volatile unsigned*>(word);
  while (float_of(seen) == float_of(seen)) {
    const unsigned before = atomicCAS(word, seen, bits_of(change(float_of(seen))));
    if (before == seen) break;
    seen = before;
  }
}

// Add x to target[index]. Returns false, and writes nothing, if there is no such entry. No other thread adds to this entry, but
// another may spoil the first one.
static __device__ __forceinline__ bool add_at(Span<float> target, Span<uint8_t> marks, int64_t index, float x) {
  if (index < 0 || index >= target.size) return false;
  if (marks.data != nullptr) marks.data[index / kLine] = 1;
  if (index > 0) {
    target.data[index] += x;
  } else {
    change_first(target.data, [x](float seen) { return seen + x; });
  }
  return true;
}

}  // namespace gradcomp::cuda
