// One entry of a payload on CPUs: added to a target, or refused, for which the target's first entry becomes NaN.
#pragma once

#include "../math.h"
#include "../span.h"

namespace gradcomp::cpu {

// Add x to target[index]. Returns false, and writes nothing, if there is no such entry.
inline bool add_at(Span<float> target, Span<uint8_t> marks, int64_t index, float x) {
  if (index < 0 || index >= target.size) return false;
  target.data[index] += x;
  if (marks.given()) marks.data[index / kLine] = 1;
  return true;
}

// Make target[0] NaN, which tells every rank that a payload failed.
inline void spoil(Span<float> target, Span<uint8_t> marks) {
  target.data[0] = not_a_number();
  if (marks.given()) marks.data[0] = 1;
}

}  // namespace gradcomp::cpu
