// Rounding to levels, and adding the levels up, on a GPU: a thread for each word, which reads a batch of entries before it
// changes the first. Bytes: take_levels 8 an entry, add_levels 8, both 8 a word.

#include "../math.h"
#include "../math_rounding.h"
#include "../ops.h"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 128;
// Blocks of a multiprocessor, at least: 768 threads, which have 30 KB in flight with ten entries each.
constexpr unsigned kBlocks = 6;

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
  // The words of any bucket can be counted in 32 bits, whose division takes a quarter of the instructions.
  const int64_t each = kPacking.words(groups.size), last = groups.count() - 1;
  const int64_t before = static_cast<uint32_t>(word) / static_cast<uint32_t>(each);
  const int64_t group = before < last ? before : last, begin = groups.begin(group), n = groups.end(group) - begin;
  return {group, begin, static_cast<uint32_t>(n), static_cast<uint32_t>(kPacking.words(n)),
          static_cast<uint32_t>(word - group * each)};
}

// Entries that are read before the first of them is used: each needs three registers, for itself and for its address.
template <int kLevels>
constexpr int batch = packing<kLevels>.digits % 10 == 0  ? 10
                      : packing<kLevels>.digits % 9 == 0 ? 9
                                                         : 8;

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
__global__ void __launch_bounds__(kThreads, kBlocks)
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

// Drop the first digits of a part of a word, and return the rest. Part and digit are constants: divisions by runtime values
// would take most of the time.
template <int kLevels, int kPart, int kDigit>
__device__ __forceinline__ uint32_t digits_from(uint64_t word) {
  constexpr auto power = [](uint64_t base, int times) {
    uint64_t all = 1;
    for (int i = 0; i < times; ++i) all *= base;
    return all;
  };
  constexpr uint64_t kBase = packing<kLevels>.base, kBefore = power(kBase, kPart);
  constexpr auto kDropped = static_cast<uint32_t>(power(kLevels, kDigit));
  return static_cast<uint32_t>(word / kBefore % kBase) / kDropped;
}

// A group's levels, times a factor. A few are kept in registers.
template <int kLevels>
struct Scaled {
  const float* levels;
  float factor;
  float few[3];

  __device__ __forceinline__ Scaled(const float* all, int64_t group, float factor_)
      : levels(all + group * kLevels), factor(factor_), few{} {
    UNROLLED
    for (int i = 0; i < kLevels && i < 3; ++i) few[i] = factor * __ldg(levels + i);
  }
  __device__ __forceinline__ float at(uint32_t code) const {
    if constexpr (kLevels > 3) return factor * __ldg(levels + code);
    return code == 0 ? few[0] : code == 1 ? few[1] : few[2];
  }
};

struct Ranks {
  const Spans<const float>& levels;
  const Spans<const uint64_t>& words;
  int64_t at;
  float scale;
};

// Add the levels of all ranks to each batch of a word's entries in turn, and then write the batch. A rank's word is on its way
// while the one before is added.
template <int kLevels, int kPart = 0, int kDigit = 0>
__device__ __forceinline__ void add_batches(float* own, const Place& place, const Ranks& ranks) {
  constexpr int kDigits = packing<kLevels>.digits, kBatch = batch<kLevels>;
  uint64_t next = ranks.words.data[0][ranks.at];
  change_batch<kBatch>(own, place, place.word + (kPart * kDigits + kDigit) * place.words, [&](float(&x)[kBatch]) {
    for (int rank = 0; rank < ranks.words.count; ++rank) {
      const uint64_t word = next;
      if (rank + 1 < ranks.words.count) next = ranks.words.data[rank + 1][ranks.at];
      const Scaled<kLevels> level(ranks.levels.data[rank], place.group, ranks.scale);
      uint32_t sum = digits_from<kLevels, kPart, kDigit>(word);
      UNROLLED
      for (float& entry : x) {
        const uint32_t left = sum / kLevels, code = sum - left * kLevels;
        sum = left;
        entry += level.at(code);
      }
    }
  });
  if constexpr (kDigit + kBatch < kDigits) {
    add_batches<kLevels, kPart, kDigit + kBatch>(own, place, ranks);
  } else if constexpr (kPart + 1 < packing<kLevels>.parts) {
    add_batches<kLevels, kPart + 1>(own, place, ranks);
  }
}

template <int kLevels>
__device__ __forceinline__ void add_word(float* target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                                         const Groups& groups, int64_t count, float scale) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const Place place = place_of<kLevels>(groups, at);
  add_batches<kLevels>(target + place.begin, place, {levels, words, at, scale});
}

// The thread of the first word both adds to the first entry and sets it to NaN.
template <int kLevels>
__global__ void __launch_bounds__(kThreads, kBlocks)
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
__global__ void __launch_bounds__(kThreads, kBlocks)
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
