// The plain takes and adds, on CPUs: of a whole bucket, and of sparse entries.

#include "../math.h"
#include "../ops.h"
#include "entry_add.h"
#include "lane_hot.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

HOT void copy_scaled(const float* __restrict from, float* __restrict to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) to[i] = scale * from[i];
}

HOT void shrink(float* x, int64_t n, float keep) {
  for (int64_t i = 0; i < n; ++i) x[i] *= keep;
}

// Add the payload's entries. Returns false if it is malformed.
bool add_entries(Span<float> target, Span<uint8_t> marks, Span<const float> values, Span<const int32_t> indices, int32_t count,
                 float scale) {
  if (count < 0) return false;
  bool well_formed = true;
  for (int64_t i = 0; i < entries_there(count, values.size); ++i) {
    well_formed &= add_at(target, marks, indices.data[i], scale * values.data[i]);
  }
  return well_formed;
}

}  // namespace

void offer_all(Span<const float> residual, OptionalSpan<const int32_t> flag, Span<float> taken, float scale, Queue queue) {
  parallel(residual.size, parts(residual.size, queue.threads), [&](int, int64_t begin, int64_t end) {
    copy_scaled(residual.data + begin, taken.data + begin, end - begin, scale);
  });
  if (flag.given() && flag.data[0] != 0 && taken.size > 0) taken.data[0] = not_a_number();
}

void settle_all(Span<float> residual, Span<const float> update, float keep, Queue queue) {
  if (residual.size == 0 || !is_finite(update.data[0])) return;
  parallel(residual.size, parts(residual.size, queue.threads), [&](int, int64_t begin, int64_t end) {
    if (keep == 0) {
      std::fill(residual.data + begin, residual.data + end, 0.0f);
    } else {
      shrink(residual.data + begin, end - begin, keep);
    }
  });
}

void add_sparse(Span<float> target, OptionalSpan<uint8_t> marks, Span<const float> values, Span<const int32_t> indices,
                Span<const int32_t> header, float scale, Queue) {
  const bool flagged = header.data[1] != 0;
  if (flagged || !add_entries(target, marks, values, indices, header.data[0], scale)) spoil(target, marks);
}

void settle_sparse(Span<float> residual, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                   Span<const float> update, float keep, Queue) {
  const float share = share_to_keep(update.data, keep);
  if (share != 0) add_entries(residual, {}, values, indices, header.data[0], share);
}

}  // namespace gradcomp::cpu
