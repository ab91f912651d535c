// Updates out, on CPUs: written into the gradients, and wiped.

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

// Write past the cache, so that no line is fetched before it is written. Arrays beyond the cache take 0.75 of the time.
void scale_past_cache(const float* from, float* to, int64_t n, float scale) {
  int64_t i = 0;
#ifdef __SSE__
  for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 16 != 0; ++i) to[i] = scale * from[i];
  for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_mul_ps(_mm_set1_ps(scale), _mm_loadu_ps(from + i)));
#endif
  for (; i < n; ++i) to[i] = scale * from[i];
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

}  // namespace

void spread(Span<float> flat, Span<const float> first, OptionalSpan<uint8_t> marks, const Pieces& grads, float scale,
            bool wipes, Queue queue) {
  const bool past_cache = flat.size >= kPastCache, failed = !is_finite(first.data[0]);
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
        if (!marked) {
          clear(piece, offset + done, stretch);
        } else if (past_cache && grads.dtype[piece] == Dtype::f32) {
          scale_past_cache(flat.data + at + done, static_cast<float*>(grads.data[piece]) + offset + done, stretch, scale);
        } else {
          write(flat.data + at + done, grads, piece, offset + done, stretch, scale);
        }
      });
    });
    end_past_cache();
  });
  if (failed) {
    const float mark = not_a_number();
    for (int piece = 0; piece < grads.count; ++piece) {
      if (grads.begin[piece] < grads.begin[piece + 1]) write(&mark, grads, piece, 0, 1, 1.0f);
    }
  }
  if (wipes) wipe(flat, marks, queue);
}

void wipe(Span<float> flat, Span<uint8_t> marks, Queue) {
  for (int64_t line = 0; line < marks.size; ++line) {
    if (marks.data[line] == 0) continue;
    std::fill_n(flat.data + line * kLine, std::min(kLine, flat.size - line * kLine), 0.0f);
    marks.data[line] = 0;
  }
}

}  // namespace gradcomp::cpu
