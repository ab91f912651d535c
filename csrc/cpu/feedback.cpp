// Gradients in and updates out, on CPUs: each is one pass over memory, in blocks so that casts of half types stay in the cache.

#include <atomic>

#include "../math.h"
#include "../ops.h"
#include "parallel.h"

namespace gradcomp::cpu {
namespace {

constexpr int64_t kBlock = 2048;

HOT void widen_bf16(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(from[i]);
}

HOT void widen_f16(const uint16_t* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = f16_to_float(from[i]);
}

HOT void copy(const float* __restrict from, float* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
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

// Both return whether an entry was refused because its result would not be finite.
HOT bool add(const float* __restrict g, float* __restrict value, int64_t n) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float sum = value[i] + g[i];
    const bool good = is_finite(sum);
    refused |= good ? 0u : 1u;
    value[i] = good ? sum : value[i];
  }
  return refused != 0;
}

HOT bool add_with_momentum(const float* __restrict g, float* __restrict value, float* __restrict velocity, int64_t n,
                           float momentum, float ahead_gradient, float ahead_velocity) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float u = momentum * velocity[i] + g[i];
    const float sum = value[i] + (ahead_gradient * g[i] + ahead_velocity * u);
    const bool good = is_finite(sum) & is_finite(u);
    refused |= good ? 0u : 1u;
    velocity[i] = good ? u : velocity[i];
    value[i] = good ? sum : value[i];
  }
  return refused != 0;
}

// work(piece, offset inside the piece, entry of the bucket, count) for every run of at most kBlock entries in [begin, end).
template <class Work>
void blocks(const Pieces& grads, int64_t begin, int64_t end, Work work) {
  int piece = static_cast<int>(std::upper_bound(grads.begin, grads.begin + grads.count + 1, begin) - grads.begin) - 1;
  for (int64_t at = begin; at < end;) {
    while (grads.begin[piece + 1] <= at) ++piece;
    const int64_t count = std::min({kBlock, end - at, grads.begin[piece + 1] - at});
    work(piece, at - grads.begin[piece], at, count);
    at += count;
  }
}

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
  const int64_t n = grads.begin[grads.count];
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

void accumulate(const Pieces& grads, Span<float> value, Span<float> velocity, Span<int32_t> flag, float momentum, bool nesterov,
                Queue queue) {
  std::atomic<bool> refused = false;
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock];
    bool mine = false;
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      const float* g = read(grads, piece, offset, count, buffer);
      float* sums = value.data + at;
      mine |= velocity.given() ? add_with_momentum(g, sums, velocity.data + at, count, momentum, nesterov ? 1.0f : 0.0f,
                                                   nesterov ? momentum : 1.0f)
                               : add(g, sums, count);
    });
    if (mine) refused = true;
  });
  flag.data[0] = refused ? 1 : 0;
}

void spread(Span<const float> flat, const Pieces& grads, float scale, Queue queue) {
  parallel_over(grads, queue, [&](int64_t begin, int64_t end) {
    blocks(grads, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      const float* from = flat.data + at;
      auto* halves = static_cast<uint16_t*>(grads.data[piece]) + offset;
      switch (grads.dtype[piece]) {
        case Dtype::f32:
          return scale_f32(from, static_cast<float*>(grads.data[piece]) + offset, count, scale);
        case Dtype::f16:
          return scale_f16(from, halves, count, scale);
        case Dtype::bf16:
          return scale_bf16(from, halves, count, scale);
      }
    });
  });
}

}  // namespace gradcomp::cpu
