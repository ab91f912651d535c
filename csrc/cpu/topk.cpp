// Exact top-k on CPUs. A sample guesses a threshold that a few more than k entries pass; one vectorised read of the bucket
// lists them; the exact choice is then made among the few. A guess that lets too many or too few pass costs a radix selection
// over all entries, never a wrong result. Bytes: 4 an entry, and what the sample touches.

#include <algorithm>
#include <cmath>
#include <functional>

#include "../check.h"
#include "../math.h"
#include "../ops.h"
#include "parallel.h"
#include "select.h"

namespace gradcomp::cpu {
namespace {

constexpr int64_t kCacheLine = 16;  // entries of one cache line: sampled together, they cost one miss
constexpr int64_t kMostSamples = 1 << 16;
constexpr int64_t kSmall = 1 << 13;  // below this, a sample saves nothing

int64_t candidate_capacity(int64_t n, int64_t k) { return std::min(n, std::max<int64_t>(8 * k, kSmall)); }

int64_t sample_count(int64_t n) { return std::clamp(n / 64, std::min(n, kSmall), kMostSamples) / kCacheLine * kCacheLine; }

// A key that about 1.25 k entries and five deviations of the sample reach: rarely fewer than k, rarely more than the capacity.
uint32_t guess_threshold(Span<float> value, int64_t k, uint32_t* keys) {
  const int64_t samples = sample_count(value.size);
  const int64_t lines = value.size / kCacheLine;
  for (int64_t i = 0; i < samples; i += kCacheLine) {
    const int64_t line = static_cast<int64_t>((uint64_t{mix(static_cast<uint32_t>(i))} * static_cast<uint64_t>(lines)) >> 32);
    for (int64_t j = 0; j < kCacheLine; ++j) keys[i + j] = magnitude_key(value.data[line * kCacheLine + j]);
  }
  const double expected = static_cast<double>(samples) * static_cast<double>(k) / static_cast<double>(value.size);
  const auto rank = static_cast<int64_t>(1.25 * expected + 5 * std::sqrt(expected)) + 2;
  if (rank >= samples) return 0;
  std::nth_element(keys, keys + rank, keys + samples, std::greater<>());
  return keys[rank];
}

HOT bool any_reaches(const float* x, int64_t n, uint32_t threshold) {
  uint32_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= static_cast<int32_t>(magnitude_key(x[i])) >= static_cast<int32_t>(threshold) ? 1u : 0u;
  return any != 0;
}

// Lists the entries of [begin, end) that reach the threshold, in index order, at most `capacity`; returns how many, or -1.
int64_t list_candidates(const float* x, int64_t begin, int64_t end, uint32_t threshold, uint32_t* list, int64_t capacity) {
  constexpr int64_t kStep = 64;
  int64_t count = 0;
  for (int64_t at = begin; at < end; at += kStep) {
    const int64_t stop = std::min(at + kStep, end);
    if (!any_reaches(x + at, stop - at, threshold)) continue;
    if (count + (stop - at) > capacity) {
      const auto here = std::count_if(x + at, x + stop, [&](float v) { return magnitude_key(v) >= threshold; });
      if (count + here > capacity) return -1;
      for (int64_t i = at; i < stop; ++i) {
        if (magnitude_key(x[i]) >= threshold) list[count++] = static_cast<uint32_t>(i);
      }
      continue;
    }
    for (int64_t i = at; i < stop; ++i) {
      list[count] = static_cast<uint32_t>(i);
      count += magnitude_key(x[i]) >= threshold;
    }
  }
  return count;
}

// All candidates in index order at the front of `list`; -1 where they do not fit.
int64_t gather_candidates(Span<float> value, uint32_t threshold, uint32_t* list, int64_t capacity, int threads) {
  const int count = parts(value.size, threads);
  const int64_t share = capacity / count;
  std::vector<int64_t> found(static_cast<size_t>(count));
  parallel(value.size, count, [&](int part, int64_t begin, int64_t end) {
    found[static_cast<size_t>(part)] = list_candidates(value.data, begin, end, threshold, list + part * share, share);
  });
  int64_t total = 0;
  for (int part = 0; part < count; ++part) {
    const int64_t here = found[static_cast<size_t>(part)];
    if (here < 0) return -1;
    std::copy_n(list + part * share, here, list + total);
    total += here;
  }
  return total;
}

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return candidate_capacity(n, k) + sample_count(n); }

void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, int64_t k, Span<float> values,
               Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const int64_t n = value.size;
  header.data[0] = static_cast<int32_t>(k);
  header.data[1] = flag.given() ? flag.data[0] : 0;

  EXPECTS(scratch.size >= take_topk_scratch(n, k), "take_topk: scratch has ", scratch.size, " words; ", take_topk_scratch(n, k),
          " are needed");
  uint32_t* list = scratch.data;
  const int64_t capacity = candidate_capacity(n, k);
  const uint32_t threshold = n > kSmall && k < n ? guess_threshold(value, k, list + capacity) : 0;
  const int64_t found = threshold > 0 ? gather_candidates(value, threshold, list, capacity, queue.threads) : -1;
  if (found >= k) {
    const auto index_at = [&](int64_t j) { return static_cast<int64_t>(list[j]); };
    const auto key_at = [&](int64_t j) { return magnitude_key(value.data[list[j]]); };
    move_chosen(value, velocity, found, k, radix_select(found, k, key_at), index_at, key_at, values.data, indices.data);
  } else {
    const auto key_at = [&](int64_t i) { return magnitude_key(value.data[i]); };
    const Rank rank = k == n ? Rank{0, 0} : radix_select(n, k, key_at);
    move_chosen(value, velocity, n, k, rank, [](int64_t i) { return i; }, key_at, values.data, indices.data);
  }
}

}  // namespace gradcomp::cpu
