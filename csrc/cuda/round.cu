// Rounding to levels, and adding up what was rounded, on a GPU: a thread for each word. Bytes an entry: take_levels 8,
// add_levels 8, and 8 a word.

#include "../math.h"
#include "../ops.h"
#include "../rounding.h"
#include "block.cuh"
#include "launch.cuh"
#include "spoil.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 128;

// A word's place: its group, of as many words, and its number among them.
struct Place {
  int64_t group, words, word;
};

__device__ __forceinline__ Place place_of(const Groups& groups, const Packing& packing, int64_t word) {
  const int64_t each = packing.words(groups.size), last = groups.count() - 1;
  const int64_t group = word / each < last ? word / each : last;
  return {group, packing.words(groups.end(group) - groups.begin(group)), word - group * each};
}

// use(i) for all entries of a group that the word has codes of, in their order.
template <class Use>
__device__ __forceinline__ void each_entry(const Groups& groups, const Place& place, Use use) {
  const int64_t n = groups.end(place.group) - groups.begin(place.group);
  for (int64_t i = place.word; i < n; i += place.words) use(i);
}

struct Rounded {
  uint32_t code;
  float level;
};

__device__ __forceinline__ Rounded by_draw(float x, const float* levels, int64_t count, float drawn) {
  int64_t code = 0;
  for (int64_t level = 1; level + 1 < count; ++level) code += x >= levels[level];
  const float low = levels[code], high = levels[code + 1];
  const bool up = rounds_up(x, low, high, drawn);
  return {static_cast<uint32_t>(code + up), up ? high : low};
}

__global__ void __launch_bounds__(kThreads)
    round_words(float* value, const float* levels, const float* cuts, const __grid_constant__ Groups groups,
                const __grid_constant__ Packing packing, int64_t key, int64_t count, uint64_t* words) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const Place place = place_of(groups, packing, at);
  const float* own = levels + place.group * packing.levels;
  const uint32_t draws = draws_of(key, place.group);
  float* x = value + groups.begin(place.group);
  uint64_t word = 0, unit = 1;
  each_entry(groups, place, [&](int64_t i) {
    Rounded rounded;
    if (cuts != nullptr) {
      const bool up = x[i] >= cuts[place.group];
      rounded = {up, own[up]};
    } else {
      rounded = by_draw(x[i], own, packing.levels, draw(draws + static_cast<uint32_t>(i)));
    }
    x[i] -= rounded.level;
    word += unit * rounded.code;
    unit *= static_cast<uint64_t>(packing.levels);
  });
  words[at] = word;
}

__device__ void add_word(float* target, const float* levels, const uint64_t* words, const Groups& groups,
                         const Packing& packing, int64_t count, float scale) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const Place place = place_of(groups, packing, at);
  const float* own = levels + place.group * packing.levels;
  float* to = target + groups.begin(place.group);
  uint64_t word = words[at];
  each_entry(groups, place, [&](int64_t i) {
    to[i] += scale * own[word % static_cast<uint64_t>(packing.levels)];
    word /= static_cast<uint64_t>(packing.levels);
  });
}

// The first entry is added to and spoiled by the same thread: that of the first word.
__global__ void __launch_bounds__(kThreads)
    add_words(float* target, const float* levels, const uint64_t* words, const int32_t* header,
              const __grid_constant__ Groups groups, const __grid_constant__ Packing packing, int64_t count, float scale) {
  add_word(target, levels, words, groups, packing, count, scale);
  if (blockIdx.x + threadIdx.x == 0 && header[1] != 0) target[0] = not_a_number();
}

__global__ void __launch_bounds__(kThreads)
    settle_words(float* value, const float* levels, const uint64_t* words, const __grid_constant__ Groups groups,
                 const __grid_constant__ Packing packing, int64_t count, const float* update, float keep) {
  const float share = share_to_keep(update, keep);
  if (share != 0) add_word(value, levels, words, groups, packing, count, share);
}

}  // namespace

void take_levels(Span<float> value, Span<const float> levels, Span<const float> cuts, int64_t group, int64_t count, int64_t key,
                 Span<uint64_t> words, Queue queue) {
  const Groups groups{value.size, group};
  const Packing packing = *packing_of(count);
  const int64_t all = packing.words(groups);
  LAUNCH(round_words, blocks_for(all, kThreads), kThreads, 0, queue, value.data, levels.data, cuts.data, groups, packing, key,
         all, words.data);
}

void add_levels(Span<float> target, Span<const float> levels, Span<const uint64_t> words, Span<const int32_t> header,
                int64_t group, int64_t count, float scale, Queue queue) {
  const Groups groups{target.size, group};
  const Packing packing = *packing_of(count);
  const int64_t all = packing.words(groups);
  LAUNCH(add_words, blocks_for(all, kThreads), kThreads, 0, queue, target.data, levels.data, words.data, header.data, groups,
         packing, all, scale);
}

void settle_levels(Span<float> value, Span<const float> levels, Span<const uint64_t> words, int64_t group, int64_t count,
                   Span<const float> update, float keep, Queue queue) {
  const Groups groups{value.size, group};
  const Packing packing = *packing_of(count);
  const int64_t all = packing.words(groups);
  LAUNCH(settle_words, blocks_for(all, kThreads), kThreads, 0, queue, value.data, levels.data, words.data, groups, packing, all,
         update.data, keep);
}

}  // namespace gradcomp::cuda
