// Chains of kernels on CPUs.

#include "../math_payload.h"
#include "../ops.h"

namespace gradcomp::cpu {

void write_header(OptionalSpan<const int32_t> flag, Span<int32_t> header, Queue) {
  header.data[0] = 0;
  header.data[1] = flag.given() ? flag.data[0] : 0;
}

namespace {

void pack(Span<float> residual, const Taken& taken, Queue queue) {
  pack_sparse({residual, true}, {taken.values.data, taken.values.size}, {taken.indices.data, taken.indices.size},
              {taken.header.data, taken.header.size}, residual.size, taken.blocks, taken.entries, queue);
}

void take_and_pack(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, int64_t k,
                   const Taken& taken, Span<uint32_t> scratch, uint32_t*, Queue queue) {
  take_topk(residual, ages, flag, k, taken.values, taken.indices, taken.header, scratch, queue);
  pack(residual, taken, queue);
}

void take_and_pack(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, const Bar& bar,
                   const Taken& taken, Span<uint32_t> scratch, uint32_t*, Queue queue) {
  set_thresholds(bar.moments, bar.ends, {bar.lam.data, bar.lam.size}, bar.pooled, bar.thresholds, queue);
  take_above(residual, ages, flag, bar.ends, {bar.thresholds.data, bar.thresholds.size}, taken.values, taken.indices,
             taken.header, scratch, queue);
  if (bar.target > 0) steer(bar.lam, {taken.header.data, taken.header.size}, bar.target, queue);
  pack(residual, taken, queue);
}

void add_and_settle(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                    const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, int64_t capacity, float scale,
                    Span<float> residual, const OwnPacked& own, float keep, float* first, uint32_t*, Queue queue) {
  add_packed(target, marks, blocks, entries, headers, capacity, scale, queue);
  settle_packed(residual, own.blocks, own.entries, own.header, {target.data, target.size}, capacity, keep, queue);
  if (first != nullptr) *first = target.data[0];
}

void add_and_settle(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                    const Spans<const int32_t>& headers, int64_t group, int64_t count, float scale, Span<float> residual,
                    const OwnLevels& own, uint32_t*, Queue queue) {
  add_levels(target, levels, words, headers, group, count, scale, queue);
  settle_levels(residual, own.levels, own.words, group, count, {target.data, target.size}, queue);
}

}  // namespace

#include "../chains.inc"

}  // namespace gradcomp::cpu
