// Gradients in, on CPUs. Each is one pass over memory, in blocks, so that casts of half types stay in the cache.

#include <atomic>

#include "../math_feedback.h"
#include "../ops.h"
#include "block_moments.h"
#include "block_pieces.h"
#include "lane_hot.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

HOT void copy(const float* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}

HOT void multiply(const float* from, float* to, int64_t n, float factor) {  // which may be one array
  for (int64_t i = 0; i < n; ++i) to[i] = factor * from[i];
}

// Add g to the residual. Returns whether an entry was refused because it is not finite.
HOT bool add(const float* __restrict g, float* __restrict residual, int64_t n, Rule rule) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool good = is_finite(g[i]);
    refused |= good ? 0u : 1u;
    residual[i] = rule.next_residual(residual[i], good ? g[i] : 0.0f);
  }
  return refused != 0;
}

// Do the same with momentum.
HOT bool add_with_momentum(const float* __restrict g, float* __restrict residual, float* __restrict velocity, int64_t n,
                           Rule rule) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float u = rule.next_velocity(velocity[i], g[i]);
    const float ahead = rule.ahead(g[i], u);
    const bool good = is_finite(g[i]);
    refused |= good ? 0u : 1u;
    velocity[i] = good ? u : velocity[i];
    residual[i] = rule.next_residual(residual[i], good ? ahead : 0.0f);
  }
  return refused != 0;
}

// Note which entries were empty, and write only where that is news.
HOT void note_empty(const float* __restrict residual, uint8_t* __restrict sent_in, int64_t n, uint8_t step) {
  uint32_t news = 0;
  for (int64_t i = 0; i < n; ++i) news |= static_cast<uint32_t>(last_sent(sent_in[i], step, residual[i]) ^ sent_in[i]);
  if (news == 0) return;
  for (int64_t i = 0; i < n; ++i) sent_in[i] = last_sent(sent_in[i], step, residual[i]);
}

// Find out which entries have waited, in words as wide as the entries, so that the loop below is vectorised.
HOT void find_waiting(const uint8_t* __restrict sent_in, uint32_t* __restrict waited, int64_t n, uint8_t step) {
  for (int64_t i = 0; i < n; ++i) waited[i] = has_waited(sent_in[i], step);
}

// Do the same with momentum and a second moment.
HOT bool add_with_second(const float* __restrict g, float* __restrict residual, float* __restrict velocity,
                         float* __restrict second, const uint32_t* __restrict waited, int64_t n, Rule rule) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float used = within_root(g[i]);
    const float u = rule.next_velocity(velocity[i], used), s = rule.next_second(second[i], used);
    const float ahead = rule.ahead(used, u, s, waited[i] != 0);
    const bool good = is_finite(g[i]);
    refused |= good ? 0u : 1u;
    velocity[i] = good ? u : velocity[i];
    second[i] = good ? s : second[i];
    residual[i] = rule.next_residual(residual[i], good ? ahead : 0.0f);
  }
  return refused != 0;
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

void accumulate(const Pieces& grads, OptionalSpan<const float> scales, OptionalSpan<const float> loss_scale,
                Span<float> residual, OptionalSpan<float> velocity, OptionalSpan<float> second, OptionalSpan<uint8_t> sent_in,
                Span<int32_t> flag, OptionalSpan<double> moments, OptionalSpan<uint32_t> peaks, OptionalSpan<uint32_t> scratch,
                float of_residual, float momentum, float fresh, float of_gradient, float of_velocity, float decay,
                float fresh_square, float root_scale, float epsilon, float waiting, int64_t step, bool whole, bool raw,
                Queue queue) {
  const Rule rule = {of_residual, momentum, fresh, of_gradient, of_velocity, decay, fresh_square, root_scale, epsilon, waiting};
  const Runs runs(grads, scratch);
  const float unscale = loss_scale.given() ? 1.0f / loss_scale.data[0] : 1.0f;
  std::atomic<bool> refused = false;
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock];
    uint32_t waited[kBlock] = {};
    bool mine = false;
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      const float* g = read(grads, piece, offset, count, buffer);
      if (scales.given() || loss_scale.given()) {
        multiply(g, buffer, count, (scales.given() ? scales.data[piece] : 1.0f) * unscale);
        g = buffer;
      }
      float* sums = residual.data + at;
      if (sent_in.given() && whole) note_empty(sums, sent_in.data + at, count, static_cast<uint8_t>(step));
      if (sent_in.given() && second.given()) find_waiting(sent_in.data + at, waited, count, static_cast<uint8_t>(step));
      const bool refused_here = second.given()
                                    ? add_with_second(g, sums, velocity.data + at, second.data + at, waited, count, rule)
                                : velocity.given() ? add_with_momentum(g, sums, velocity.data + at, count, rule)
                                                   : add(g, sums, count, rule);
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

}  // namespace gradcomp::cpu
