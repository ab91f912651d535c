// Updates out, on CPUs: written into the gradients, taken back after a step that failed, and wiped.

#include <atomic>

#include "../math.h"
#include "../ops.h"
#include "block_pieces.h"
#include "lane_hot.h"
#include "thread_parts.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace gradcomp::cpu {
namespace {

// Entries of a bucket that no cache keeps until they are used.
constexpr int64_t kPastCache = 1 << 22;

// Write past the cache, so that no line is fetched before it is written. Arrays beyond the cache take 0.75 of the time. Returns
// whether all that was written is finite, as the loops below do.
bool scale_past_cache(const float* from, float* to, int64_t n, float scale) {
  int64_t i = 0;
  bool finite = true;
#ifdef __SSE__
  for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 16 != 0; ++i) finite &= is_finite(to[i] = scale * from[i]);
  __m128 differences = _mm_setzero_ps();  // x - x is 0, or not a number
  for (; i + 4 <= n; i += 4) {
    const __m128 four = _mm_mul_ps(_mm_set1_ps(scale), _mm_loadu_ps(from + i));
    differences = _mm_or_ps(differences, _mm_sub_ps(four, four));
    _mm_stream_ps(to + i, four);
  }
  finite &= _mm_movemask_ps(_mm_cmpunord_ps(differences, differences)) == 0;
#endif
  for (; i < n; ++i) finite &= is_finite(to[i] = scale * from[i]);
  return finite;
}

void clear_past_cache(float* to, int64_t n) {
  int64_t i = 0;
#ifdef __SSE__
  for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 16 != 0; ++i) to[i] = 0.0f;
  for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_setzero_ps());
#endif
  for (; i < n; ++i) to[i] = 0.0f;
}

void end_past_cache() {
#ifdef __SSE__
  _mm_sfence();
#endif
}

HOT bool scale_f32(const float* __restrict from, float* __restrict to, int64_t n, float scale) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    to[i] = scale * from[i];
    bad |= is_finite(to[i]) ? 0u : 1u;
  }
  return bad == 0;
}

HOT bool scale_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t n, float scale) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    to[i] = float_to_bf16(scale * from[i]);
    bad |= is_finite(bf16_to_float(to[i])) ? 0u : 1u;
  }
  return bad == 0;
}

HOT bool scale_f16(const float* __restrict from, uint16_t* __restrict to, int64_t n, float scale) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    to[i] = float_to_f16(scale * from[i]);
    bad |= is_finite(f16_to_float(to[i])) ? 0u : 1u;
  }
  return bad == 0;
}

HOT void add_delivered(const float* __restrict delivered, float* __restrict residual, int64_t n, float back) {
  for (int64_t i = 0; i < n; ++i) residual[i] = add_if_finite(residual[i], delivered[i] * back);
}

// Write a run, cast to its piece's type. Returns whether all that was written is finite.
bool cast(const float* from, const Pieces& grads, int piece, int64_t offset, int64_t count, float factor, bool past_cache) {
  auto* const floats = static_cast<float*>(grads.data[piece]) + offset;
  auto* const halves = static_cast<uint16_t*>(grads.data[piece]) + offset;
  switch (grads.dtype[piece]) {
    case Dtype::f32:
      return (past_cache ? scale_past_cache : scale_f32)(from, floats, count, factor);
    case Dtype::f16:
      return scale_f16(from, halves, count, factor);
    case Dtype::bf16:
      return scale_bf16(from, halves, count, factor);
  }
  return true;
}

}  // namespace

void spread(Span<const float> flat, Span<const float> first, OptionalSpan<const uint8_t> marks, const Pieces& grads,
            OptionalSpan<int32_t> verdict, float scale, int64_t step, Queue queue) {
  const bool past_cache = flat.size >= kPastCache, failed = !is_finite(first.data[0]);
  std::atomic<bool> all_finite = true;
  const auto write = [&](int piece, int64_t offset, int64_t at, int64_t count) {
    if (!cast(flat.data + at, grads, piece, offset, count, scale, past_cache)) all_finite = false;
  };
  const auto clear = [&](int piece, int64_t offset, int64_t count) {
    if (grads.dtype[piece] != Dtype::f32) {
      std::fill_n(static_cast<uint16_t*>(grads.data[piece]) + offset, count, uint16_t{0});
    } else if (past_cache) {
      clear_past_cache(static_cast<float*>(grads.data[piece]) + offset, count);
    } else {
      std::fill_n(static_cast<float*>(grads.data[piece]) + offset, count, 0.0f);
    }
  };
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      stretches(marks, at, count, [&](int64_t done, int64_t stretch, bool marked) {
        if (marked) {
          write(piece, offset + done, at + done, stretch);
        } else {
          clear(piece, offset + done, stretch);
        }
      });
    });
    end_past_cache();
  });
  if (failed) {
    const float mark = not_a_number();
    for (int piece = 0; piece < grads.count; ++piece) {
      if (grads.begin[piece] < grads.begin[piece + 1]) cast(&mark, grads, piece, 0, 1, 1.0f, false);
    }
  }
  if (verdict.given() && (failed || !all_finite)) verdict.data[0] = std::max(verdict.data[0], verdict_of(step, failed));
}

void add_back(const Pieces& grads, Span<float> residual, Span<const int32_t> verdicts, int64_t bucket, float scale,
              int64_t step, Queue queue) {
  const auto of_step = [&](int32_t verdict) { return is_of_step(verdict, step); };
  if (std::none_of(verdicts.data, verdicts.data + verdicts.size, of_step)) return;
  if (verdicts.data[bucket] == verdict_of(step, true)) return;
  const float back = 1.0f / scale;
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock];
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      add_delivered(read(grads, piece, offset, count, buffer), residual.data + at, count, back);
    });
  });
}

void wipe(Span<float> flat, Span<uint8_t> marks, Queue) {
  for (int64_t line = 0; line < marks.size; ++line) {
    if (marks.data[line] == 0) continue;
    std::fill_n(flat.data + line * kLine, std::min(kLine, flat.size - line * kLine), 0.0f);
    marks.data[line] = 0;
  }
}

}  // namespace gradcomp::cpu
