// Rounding to levels, and adding the levels up, on a GPU: a thread for each word, which reads a batch of entries before it
// changes the first. Bytes: take_levels 8 an entry, add_levels 8, both 8 a word.

#include "../math.h"
#include "../math_rounding.h"
#include "../ops.h"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 128;

template <int kLevels>
constexpr Packing packing = *packing_of(kLevels);

// A word's entries in its group of n entries: its first, and every `words`-th from there.
struct Place {
  int64_t group, begin;
  uint32_t n, words, word;
};

template <int kLevels>
__device__ __forceinline__ Place place_of(const Groups& groups, int64_t word) {
  constexpr Packing kPacking = packing<kLevels>;
  const int64_t each = kPacking.words(groups.size), last = groups.count() - 1;
  const int64_t group = word / each < last ? word / each : last, begin = groups.begin(group), n = groups.end(group) - begin;
  return {group, begin, static_cast<uint32_t>(n), static_cast<uint32_t>(kPacking.words(n)),
          static_cast<uint32_t>(word - group * each)};
}

// Entries that are read before the first of them is used.
template <int kLevels>
constexpr int batch = packing<kLevels>.digits % 8 == 0   ? 8
                      : packing<kLevels>.digits % 5 == 0 ? 5
                                                         : 3;

// Let use(entries) change a batch of the word's entries, from x[first] on.
template <int kBatch, class Use>
__device__ __forceinline__ void change_batch(float* x, const Place& place, uint32_t first, Use use) {
  float own[kBatch];
  UNROLLED
  for (int next = 0; next < kBatch; ++next) {
    const uint32_t i = first + next * place.words;
    own[next] = i < place.n ? x[i] : 0.0f;
  }
  use(own);
  UNROLLED
  for (int next = 0; next < kBatch; ++next) {
    const uint32_t i = first + next * place.words;
    if (i < place.n) x[i] = own[next];
  }
}

struct Around {
  float low, high;
  uint32_t code;  // of the lower one
};

// Find the two levels around x, in halves of halves.
template <int kLevels>
__device__ __forceinline__ Around around(float x, const float (&level)[kLevels], uint32_t code = 0) {
  if constexpr (kLevels == 2) {
    return {level[0], level[1], code};
  } else {
    constexpr int kHalf = kLevels / 2;
    const bool upper = x >= level[kHalf];
    float half[kHalf + 1];
    UNROLLED
    for (int i = 0; i <= kHalf; ++i) half[i] = upper ? level[i + kHalf] : level[i];
    return around(x, half, 2 * code + upper);
  }
}

template <int kLevels>
__global__ void __launch_bounds__(kThreads)
    round_words(float* residual, const float* levels, const float* cuts, const __grid_constant__ Groups groups, int64_t key,
                int64_t count, uint64_t* words) {
  constexpr int kDigits = packing<kLevels>.digits, kBatch = batch<kLevels>;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const Place place = place_of<kLevels>(groups, at);
  float level[kLevels];
  UNROLLED
  for (int i = 0; i < kLevels; ++i) level[i] = levels[place.group * kLevels + i];
  const bool draws = cuts == nullptr;
  const float cut = draws ? 0.0f : cuts[place.group];
  const uint32_t first = draws_of(key, place.group);
  uint64_t word = 0, unit = 1;
  for (uint32_t part = 0; part < packing<kLevels>.parts; ++part) {
    uint32_t sum = 0, unit_of_digit = 1;
    for (int digit = 0; digit < kDigits; digit += kBatch) {
      uint32_t i = place.word + (part * kDigits + digit) * place.words;
      change_batch<kBatch>(residual + place.begin, place, i, [&](float(&x)[kBatch]) {
        UNROLLED
        for (float& entry : x) {
          const auto [low, high, code] = around(entry, level);
          const bool up = draws ? rounds_up(entry, low, high, draw(first + i)) : entry >= cut;
          if (i < place.n) sum += unit_of_digit * (code + up);
          unit_of_digit *= kLevels;
          entry -= up ? high : low;
          i += place.words;
        }
      });
    }
    word += unit * sum;
    unit *= packing<kLevels>.base;
  }
  words[at] = word;
}

// Drop the first digits of a part of a word, and return the rest.
template <int kLevels>
__device__ __forceinline__ uint32_t digits_from(uint64_t word, int part, int digit) {
  UNROLLED
  for (int before = 0; before < part; ++before) word /= packing<kLevels>.base;
  auto sum = static_cast<uint32_t>(word % packing<kLevels>.base);
  uint32_t power = 1;
  UNROLLED
  for (int before = 0; before < digit; ++before) power *= kLevels;
  return sum / power;
}

// Add the levels of all ranks to a batch of entries, and then write the batch.
template <int kLevels>
__device__ __forceinline__ void add_word(float* target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                                         const Groups& groups, int64_t count, float scale) {
  constexpr int kDigits = packing<kLevels>.digits, kParts = packing<kLevels>.parts, kBatch = batch<kLevels>;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const Place place = place_of<kLevels>(groups, at);
  float* const own = target + place.begin;
  UNROLLED
  for (int part = 0; part < kParts; ++part) {
    UNROLLED
    for (int digit = 0; digit < kDigits; digit += kBatch) {
      const uint32_t first = place.word + (part * kDigits + digit) * place.words;
      change_batch<kBatch>(own, place, first, [&](float(&x)[kBatch]) {
        for (int rank = 0; rank < words.count; ++rank) {
          uint32_t sum = digits_from<kLevels>(words.data[rank][at], part, digit);
          UNROLLED
          for (float& entry : x) {
            const uint32_t left = sum / kLevels, code = sum - left * kLevels;
            sum = left;
            entry += scale * __ldg(levels.data[rank] + place.group * kLevels + code);
          }
        }
      });
    }
  }
}

// The thread of the first word both adds to the first entry and sets it to NaN.
template <int kLevels>
__global__ void __launch_bounds__(kThreads)
    add_words(float* target, const __grid_constant__ Spans<const float> levels,
              const __grid_constant__ Spans<const uint64_t> words, const __grid_constant__ Spans<const int32_t> headers,
              const __grid_constant__ Groups groups, int64_t count, float scale) {
  add_word<kLevels>(target, levels, words, groups, count, scale);
  if (blockIdx.x + threadIdx.x != 0) return;
  for (int rank = 0; rank < headers.count; ++rank) {
    if (headers.data[rank][1] != 0) target[0] = not_a_number();
  }
}

template <int kLevels>
__global__ void __launch_bounds__(kThreads)
    settle_words(float* residual, const __grid_constant__ Spans<const float> levels,
                 const __grid_constant__ Spans<const uint64_t> words, const __grid_constant__ Groups groups, int64_t count,
                 const float* update, float keep) {
  const float share = share_to_keep(update, keep);
  if (share != 0) add_word<kLevels>(residual, levels, words, groups, count, share);
}

// Choose the kernel for this number of levels.
template <class Kernel>
Kernel* for_levels(int64_t count, Kernel* two, Kernel* three, Kernel* five, Kernel* nine) {
  return count == 2 ? two : count == 3 ? three : count == 5 ? five : nine;
}
#define FOR_LEVELS(kernel, count) for_levels(count, kernel<2>, kernel<3>, kernel<5>, kernel<9>)

}  // namespace

void take_levels(Span<float> residual, Span<const float> levels, OptionalSpan<const float> cuts, int64_t group, int64_t count,
                 int64_t key, Span<uint64_t> words, Queue queue) {
  const Groups groups{residual.size, group};
  const int64_t all = packing_of(count)->words(groups);
  const auto round_words_of = FOR_LEVELS(round_words, count);
  LAUNCH(round_words_of, blocks_for(all, kThreads), kThreads, 0, queue, residual.data, levels.data, cuts.data, groups, key, all,
         words.data);
}

void add_levels(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                const Spans<const int32_t>& headers, int64_t group, int64_t count, float scale, Queue queue) {
  const Groups groups{target.size, group};
  const int64_t all = packing_of(count)->words(groups);
  const auto add_words_of = FOR_LEVELS(add_words, count);
  LAUNCH(add_words_of, blocks_for(all, kThreads), kThreads, 0, queue, target.data, levels, words, headers, groups, all, scale);
}

void settle_levels(Span<float> residual, Span<const float> levels, Span<const uint64_t> words, int64_t group, int64_t count,
                   Span<const float> update, float keep, Queue queue) {
  const Groups groups{residual.size, group};
  const int64_t all = packing_of(count)->words(groups);
  const auto settle_words_of = FOR_LEVELS(settle_words, count);
  LAUNCH(settle_words_of, blocks_for(all, kThreads), kThreads, 0, queue, residual.data, Spans(levels), Spans(words), groups,
         all, update.data, keep);
}

}  // namespace gradcomp::cuda
