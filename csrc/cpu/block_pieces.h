// A bucket's gradients, walked in blocks of the cache, in which halves are cast.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../math.h"
#include "../span.h"
#include "lane_hot.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

HOT void widen_bf16(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(from[i]);
}

HOT void widen_f16(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = f16_to_float(from[i]);
}

// Call work(piece, offset inside the piece, entry of the bucket, count) for every run in [begin, end). A run is the part of a
// piece that lies in one block of the bucket.
template <class Work>
void blocks(const Pieces& grads, int64_t begin, int64_t end, Work work) {
  int piece = static_cast<int>(std::upper_bound(grads.begin, grads.begin + grads.count + 1, begin) - grads.begin) - 1;
  for (int64_t at = begin; at < end;) {
    while (grads.begin[piece + 1] <= at) ++piece;
    const int64_t count = std::min({kBlock - at % kBlock, end - at, grads.begin[piece + 1] - at});
    work(piece, at - grads.begin[piece], at, count);
    at += count;
  }
}

// Call use(offset inside the run, count, marked) for one stretch of a run after the other, whose lines are all marked, or all
// not. Without marks, the run is one stretch.
template <class Use>
void stretches(OptionalSpan<uint8_t> marks, int64_t at, int64_t count, Use use) {
  if (!marks.given()) return use(int64_t{0}, count, true);
  for (int64_t done = 0; done < count;) {
    const int64_t first = (at + done) / kLine;
    const bool marked = marks.data[first] != 0;
    int64_t line = first + 1;
    while (line * kLine < at + count && (marks.data[line] != 0) == marked) ++line;
    const int64_t stretch = std::min(count, line * kLine - at) - done;
    use(done, stretch, marked);
    done += stretch;
  }
}

// Read a run as float32: in place, or cast into the buffer.
inline const float* read(const Pieces& grads, int piece, int64_t offset, int64_t count, float* buffer) {
  const auto* halves = static_cast<const uint16_t*>(grads.data[piece]) + offset;
  switch (grads.dtype[piece]) {
    case Dtype::f32:
      return static_cast<const float*>(grads.data[piece]) + offset;
    case Dtype::f16:
      widen_f16(halves, buffer, count);
      return buffer;
    case Dtype::bf16:
      widen_bf16(halves, buffer, count);
      return buffer;
  }
  return buffer;
}

HOT void scale_f32(const float* __restrict from, float* __restrict to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) to[i] = scale * from[i];
}

HOT void scale_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(scale * from[i]);
}

HOT void scale_f16(const float* __restrict from, uint16_t* __restrict to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_f16(scale * from[i]);
}

// Write a run, cast to its piece's type.
inline void write(const float* from, const Pieces& grads, int piece, int64_t offset, int64_t count, float factor) {
  auto* const halves = static_cast<uint16_t*>(grads.data[piece]) + offset;
  switch (grads.dtype[piece]) {
    case Dtype::f32:
      return scale_f32(from, static_cast<float*>(grads.data[piece]) + offset, count, factor);
    case Dtype::f16:
      return scale_f16(from, halves, count, factor);
    case Dtype::bf16:
      return scale_bf16(from, halves, count, factor);
  }
}

template <class Work>
void parallel_over(const Pieces& grads, Queue queue, Work work) {
  const int64_t n = grads.size();
  if (n == 0) return;
  parallel(n, parts(n, queue.threads), [&](int, int64_t begin, int64_t end) { work(begin, end); });
}

}  // namespace
}  // namespace gradcomp::cpu
