// Gradients in and updates out, on CPUs. Each is one pass over memory, in blocks, so that casts of half types stay in the
// cache.

#include <atomic>

#include "../math.h"
#include "../ops.h"
#include "block_moments.h"
#include "lane_hot.h"
#include "thread_parts.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace gradcomp::cpu {
namespace {

// Entries of a bucket that no cache keeps until they are used.
constexpr int64_t kPastCache = 1 << 22;

HOT void widen_bf16(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(from[i]);
}

HOT void widen_f16(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = f16_to_float(from[i]);
}

HOT void copy(const float* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

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

HOT void scale_f32(const float* __restrict from, float* __restrict to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) to[i] = scale * from[i];
}

HOT void scale_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(scale * from[i]);
}

HOT void scale_f16(const float* __restrict from, uint16_t* __restrict to, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_f16(scale * from[i]);
}

// Add g to the residual. Returns whether an entry was refused because it is not finite.
HOT bool add(const float* __restrict g, float* __restrict residual, int64_t n) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float sum = within_largest(residual[i] + g[i]);
    const bool good = is_finite(g[i]);
    refused |= good ? 0u : 1u;
    residual[i] = good ? sum : residual[i];
  }
  return refused != 0;
}

// Do the same with momentum.
HOT bool add_with_momentum(const float* __restrict g, float* __restrict residual, float* __restrict velocity, int64_t n,
                           float momentum, float ahead_gradient, float ahead_velocity) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float u = within_largest(momentum * velocity[i] + g[i]);
    const float sum = within_largest(residual[i] + (ahead_gradient * g[i] + ahead_velocity * u));
    const bool good = is_finite(g[i]);
    refused |= good ? 0u : 1u;
    velocity[i] = good ? u : velocity[i];
    residual[i] = good ? sum : residual[i];
  }
  return refused != 0;
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

// Read a run as float32: in place, or cast into the buffer.
const float* read(const Pieces& grads, int piece, int64_t offset, int64_t count, float* buffer) {
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

template <class Work>
void parallel_over(const Pieces& grads, Queue queue, Work work) {
  const int64_t n = grads.size();
  if (n == 0) return;
  parallel(n, parts(n, queue.threads), [&](int, int64_t begin, int64_t end) { work(begin, end); });
}

}  // namespace

void flatten(const Pieces& grads, Span<float> flat, Queue queue) {
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock];
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      copy(read(grads, piece, offset, count, buffer), flat.data + at, count);
    });
  });
}

void accumulate(const Pieces& grads, OptionalSpan<const float> scales, Span<float> residual, OptionalSpan<float> velocity,
                Span<int32_t> flag, OptionalSpan<double> moments, OptionalSpan<uint32_t> peaks, OptionalSpan<uint32_t> scratch,
                float momentum, bool nesterov, bool raw, Queue queue) {
  const Runs runs(grads, scratch);
  std::atomic<bool> refused = false;
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock];
    bool mine = false;
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      const float* g = read(grads, piece, offset, count, buffer);
      if (scales.given()) {
        scale_f32(g, buffer, count, scales.data[piece]);
        g = buffer;
      }
      float* sums = residual.data + at;
      const bool refused_here = velocity.given() ? add_with_momentum(g, sums, velocity.data + at, count, momentum,
                                                                     nesterov ? 1.0f : 0.0f, nesterov ? momentum : 1.0f)
                                                 : add(g, sums, count);
      mine |= refused_here;
      if (peaks.given()) note_peaks(sums, at, count, peaks.data);
      if (!moments.given()) return;
      Measured found = measure(sums, count);
      if (raw) {
        Measured of_gradient = measure(refused_here ? without_infinities(g, buffer, count) : g, count);
        of_gradient.moments.low = found.moments.low;
        of_gradient.moments.high = found.moments.high;
        found = of_gradient;
      }
      runs.store(piece, at, found);
    });
    if (mine) refused = true;
  });
  flag.data[0] = refused ? 1 : 0;
  if (moments.given()) runs.merge_into(moments.data);
}

int64_t accumulate_scratch(int64_t n, int64_t pieces) { return Runs::words(n, pieces); }

void sum_squares(const Pieces& grads, Span<double> squares, Span<uint32_t> scratch, Queue queue) {
  const Runs runs(grads, scratch);
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock];
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      const double sum = squares_of(read(grads, piece, offset, count, buffer), count);
      memcpy(runs.of(piece, at), &sum, sizeof sum);
    });
  });
  runs.sum_into(squares.data);
}

void spread(Span<const float> flat, OptionalSpan<const uint8_t> marks, const Pieces& grads, float scale, Queue queue) {
  const bool past_cache = flat.size >= kPastCache;
  const auto write = [&](int piece, int64_t offset, int64_t at, int64_t count) {
    const float* from = flat.data + at;
    auto* halves = static_cast<uint16_t*>(grads.data[piece]) + offset;
    switch (grads.dtype[piece]) {
      case Dtype::f32:
        return (past_cache ? scale_past_cache : scale_f32)(from, static_cast<float*>(grads.data[piece]) + offset, count, scale);
      case Dtype::f16:
        return scale_f16(from, halves, count, scale);
      case Dtype::bf16:
        return scale_bf16(from, halves, count, scale);
    }
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
      if (!marks.given()) return write(piece, offset, at, count);
      // One stretch after the other of lines that are all marked, or all not.
      for (int64_t done = 0; done < count;) {
        const int64_t first = (at + done) / kLine;
        const bool marked = marks.data[first] != 0;
        int64_t line = first + 1;
        while (line * kLine < at + count && (marks.data[line] != 0) == marked) ++line;
        const int64_t stretch = std::min(count, line * kLine - at) - done;
        if (marked) {
          write(piece, offset + done, at + done, stretch);
        } else {
          clear(piece, offset + done, stretch);
        }
        done += stretch;
      }
    });
    end_past_cache();
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
