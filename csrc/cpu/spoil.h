// Adding a payload's entries to a target on CPUs, and making the target's first entry NaN for others to see that all is not
// well.
#pragma once

#include "../math.h"
#include "../span.h"

namespace gradcomp::cpu {

// target[index] += x; false where there is no such entry: a wrong index is never written to.
inline bool add_at(Span<float> target, Span<uint8_t> marks, int64_t index, float x) {
  if (index < 0 || index >= target.size) return false;
  target.data[index] += x;
  if (marks.given()) marks.data[index / kLine] = 1;
  return true;
}

inline void spoil(Span<float> target, Span<uint8_t> marks) {
  target.data[0] = not_a_number();
  if (marks.given()) marks.data[0] = 1;
}

}  // namespace gradcomp::cpu
