// The plain takes and adds, on CPUs: the whole of a bucket, and sparse entries in and out of it.

#include "../math.h"
#include "../ops.h"
#include "parallel.h"

namespace gradcomp::cpu {
namespace {

HOT void copy(const float* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

HOT void shrink(float* x, int64_t n, float keep) {
  for (int64_t i = 0; i < n; ++i) x[i] *= keep;
}

// Adds the payload's entries; false where it is malformed. A wrong index is passed over, never written to.
bool add_entries(Span<float> target, Span<uint8_t> marks, Span<const float> values, Span<const int32_t> indices, int32_t count,
                 float scale) {
  if (count < 0) return false;
  bool well_formed = true;
  for (int64_t i = 0; i < std::min<int64_t>(count, values.size); ++i) {
    const int32_t index = indices.data[i];
    if (index >= 0 && index < target.size) {
      target.data[index] += scale * values.data[i];
      if (marks.given()) marks.data[index / kLine] = 1;
    } else {
      well_formed = false;
    }
  }
  return well_formed;
}

}  // namespace

void offer_all(Span<const float> value, Span<const int32_t> flag, Span<float> taken, Queue queue) {
  parallel(value.size, parts(value.size, queue.threads),
           [&](int, int64_t begin, int64_t end) { copy(value.data + begin, taken.data + begin, end - begin); });
  if (flag.given() && flag.data[0] != 0 && taken.size > 0) taken.data[0] = not_a_number();
}

void settle_all(Span<float> value, Span<const float> update, float keep, Queue queue) {
  if (value.size == 0 || !is_finite(update.data[0])) return;
  parallel(value.size, parts(value.size, queue.threads), [&](int, int64_t begin, int64_t end) {
    if (keep == 0) {
      std::fill(value.data + begin, value.data + end, 0.0f);
    } else {
      shrink(value.data + begin, end - begin, keep);
    }
  });
}

void add_sparse(Span<float> target, Span<uint8_t> marks, Span<const float> values, Span<const int32_t> indices,
                Span<const int32_t> header, float scale, Queue) {
  const bool flagged = header.data[1] != 0;
  if (!flagged && add_entries(target, marks, values, indices, header.data[0], scale)) return;
  target.data[0] = not_a_number();
  if (marks.given()) marks.data[0] = 1;
}

void settle_sparse(Span<float> value, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                   Span<const float> update, float keep, Queue) {
  const float share = is_finite(update.data[0]) ? keep : 1.0f;
  if (share != 0) add_entries(value, {}, values, indices, header.data[0], share);
}

}  // namespace gradcomp::cpu
