// Progress out of the weights and updates into them, on CPUs. Each is one pass over memory, in blocks of the cache.

#include <algorithm>
#include <atomic>

#include "../math_progress.h"
#include "../ops.h"
#include "block_moments.h"
#include "block_pieces.h"
#include "lane_hot.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

// Make every entry a step older, and look up the share for its age.
HOT void grow_older(uint8_t* __restrict ages, const float* __restrict shares, float* __restrict found, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t age = next_age(ages[i]);
    ages[i] = age;
    found[i] = shares[age];
  }
}

HOT void look_up(const uint8_t* __restrict ages, const float* __restrict shares, float* __restrict found, int64_t n) {
  for (int64_t i = 0; i < n; ++i) found[i] = shares[ages[i]];
}

// Offer a run, and return its weights to their start. Returns whether an entry was refused because it is not finite.
HOT bool offer(float* __restrict weights, float* __restrict start, float* __restrict residual, const float* __restrict of_all,
               const float* __restrict of_made, int64_t n, Progress rule, float decay) {
  uint32_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float from = start[i], whole = from - weights[i], found = rule.made(whole, decay * from);
    const bool good = is_finite(whole);
    refused |= good ? 0u : 1u;
    const float made = good ? found : 0.0f, all = rule.all(residual[i], made);
    const float offered = offered_of(all, made, of_all[i], of_made[i]);
    weights[i] = from;
    start[i] = offered;
    residual[i] = kept_of(all, offered);
  }
  return refused != 0;
}

HOT void narrow_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(from[i]);
}

HOT void narrow_f16(const float* __restrict from, uint16_t* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_f16(from[i]);
}

// Write a run of 16-bit entries.
void narrow(const float* from, Dtype dtype, uint16_t* to, int64_t n) {
  (dtype == Dtype::f16 ? narrow_f16 : narrow_bf16)(from, to, n);
}

HOT void add_rest(const float* __restrict rest, float* __restrict residual, int64_t n) {
  for (int64_t i = 0; i < n; ++i) residual[i] = within_largest(residual[i] + rest[i]);
}

HOT void update_f32(const float* __restrict update, float* __restrict weights, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) weights[i] = update[i] != 0.0f ? updated(weights[i], update[i], scale) : weights[i];
}

// Update weights of 16 bits, given as floats too. Unless the exchange failed, the residual gets what the cast leaves out.
HOT void update_bf16(const float* __restrict update, const float* __restrict was, uint16_t* __restrict weights,
                     float* __restrict residual, int64_t n, float scale, bool failed) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t next = float_to_bf16(updated(was[i], update[i], scale));
    const float kept = add_if_finite(residual[i], left_of_update(update[i], was[i], bf16_to_float(next), scale));
    residual[i] = failed || update[i] == 0.0f ? residual[i] : kept;
    weights[i] = update[i] == 0.0f ? weights[i] : next;
  }
}

HOT void update_f16(const float* __restrict update, const float* __restrict was, uint16_t* __restrict weights,
                    float* __restrict residual, int64_t n, float scale, bool failed) {
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t next = float_to_f16(updated(was[i], update[i], scale));
    const float kept = add_if_finite(residual[i], left_of_update(update[i], was[i], f16_to_float(next), scale));
    residual[i] = failed || update[i] == 0.0f ? residual[i] : kept;
    weights[i] = update[i] == 0.0f ? weights[i] : next;
  }
}

}  // namespace

void offer_progress(const Pieces& weights, OptionalSpan<const float> decays, Span<float> start, Span<float> residual,
                    OptionalSpan<uint8_t> ages, Span<const float> shares, Span<int32_t> flag, OptionalSpan<double> moments,
                    OptionalSpan<uint32_t> scratch, float factor, float of_residual, Queue queue) {
  const Progress rule = {factor, of_residual};
  const bool decays_apart = decays.given() && factor != 1.0f;
  const float* const shares_of_made = shares.data + kAges;
  // They are 0 but for Nesterov's momentum, and looking one up takes as long as reading an entry.
  const bool shares_made = std::any_of(shares_of_made, shares_of_made + kAges, [](float share) { return share != 0.0f; });
  const Runs runs(weights, scratch);
  std::atomic<bool> refused = false;
  parallel_over(weights, queue, [&](int64_t begin, int64_t end) {
    float buffer[kBlock], of_all[kBlock], of_made[kBlock];
    bool mine = false;
    std::fill_n(of_all, kBlock, shares.data[1]);
    std::fill_n(of_made, kBlock, shares_of_made[1]);
    blocks(weights, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      const bool wide = weights.dtype[piece] == Dtype::f32;
      if (!wide) read(weights, piece, offset, count, buffer);
      float* const now = wide ? static_cast<float*>(weights.data[piece]) + offset : buffer;
      float* const offered = start.data + at;
      if (ages.given()) grow_older(ages.data + at, shares.data, of_all, count);
      if (ages.given() && shares_made) look_up(ages.data + at, shares_of_made, of_made, count);
      const float decay = decays_apart ? decays.data[piece] : 0.0f;
      mine |= offer(now, offered, residual.data + at, of_all, of_made, count, rule, decay);
      if (!wide) narrow(buffer, weights.dtype[piece], static_cast<uint16_t*>(weights.data[piece]) + offset, count);
      if (moments.given()) runs.store(piece, at, measure(offered, count));
    });
    if (mine) refused = true;
  });
  flag.data[0] = refused ? 1 : 0;
  if (moments.given()) runs.merge_into(moments.data);
}

void deliver_progress(Span<float> update, Span<const float> first, OptionalSpan<uint8_t> marks, const Pieces& weights,
                      Span<const float> rest, Span<float> residual, float scale, bool wipes, Queue queue) {
  const bool failed = !is_finite(first.data[0]);
  const auto move = [&](int piece, int64_t offset, int64_t at, int64_t count) {
    const float* const by = update.data + at;
    const Dtype dtype = weights.dtype[piece];
    if (dtype == Dtype::f32) {
      update_f32(by, static_cast<float*>(weights.data[piece]) + offset, count, scale);
    } else {
      float buffer[kBlock];
      auto* const halves = static_cast<uint16_t*>(weights.data[piece]) + offset;
      const float* const was = read(weights, piece, offset, count, buffer);
      (dtype == Dtype::f16 ? update_f16 : update_bf16)(by, was, halves, residual.data + at, count, scale, failed);
    }
  };
  parallel_over(weights, queue, [&](int64_t begin, int64_t end) {
    blocks(weights, begin, end, [&](int piece, int64_t offset, int64_t at, int64_t count) {
      add_rest(rest.data + at, residual.data + at, count);
      stretches(marks, at, count, [&](int64_t done, int64_t stretch, bool marked) {
        if (marked) move(piece, offset + done, at + done, stretch);
      });
    });
  });
  if (wipes) wipe(update, marks, queue);
  if (!failed) return;
  const float mark = not_a_number();
  for (int piece = 0; piece < weights.count; ++piece) {
    if (weights.begin[piece] == weights.begin[piece + 1]) continue;
    if (weights.dtype[piece] == Dtype::f32) {
      *static_cast<float*>(weights.data[piece]) = mark;
    } else {
      narrow(&mark, weights.dtype[piece], static_cast<uint16_t*>(weights.data[piece]), 1);
    }
  }
}

}  // namespace gradcomp::cpu
