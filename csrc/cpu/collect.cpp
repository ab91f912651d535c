// Gradients in, on CPUs. Each is one pass over memory, in blocks, so that casts of half types stay in the cache.

#include <atomic>

#include "../math.h"
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

// Copy g, with 0 for an entry that is not finite. Returns whether there was one.
HOT bool copy_finite(const float* __restrict g, float* __restrict to, int64_t n) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool good = is_finite(g[i]);
    refused |= good ? 0u : 1u;
    to[i] = good ? within_largest(g[i]) : 0.0f;
  }
  return refused != 0;
}

HOT double squares_of(const float* __restrict x, int64_t n) {
  double sums[kLanes] = {};
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) sums[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (int64_t i = whole; i < n; ++i) sums[i - whole] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return add_lanes(sums);
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

void collect(const Pieces& grads, Span<float> flat, Span<int32_t> flag, OptionalSpan<double> moments,
             OptionalSpan<uint32_t> scratch, Queue queue) {
  const Runs runs(grads, scratch);
  std::atomic<bool> refused = false;
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock];
    bool mine = false;
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      float* to = flat.data + at;
      mine |= copy_finite(read(grads, piece, offset, count, buffer), to, count);
      if (moments.given()) runs.store(piece, at, measure(to, count));
    });
    if (mine) refused = true;
  });
  flag.data[0] = refused ? 1 : 0;
  if (moments.given()) runs.merge_into(moments.data);
}

int64_t collect_scratch(int64_t n, int64_t pieces) { return Runs::words(n, pieces); }

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
