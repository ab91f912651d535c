// Rounding to levels, and adding up what was rounded, on CPUs. Bytes an entry: take_levels 8, add_levels 8, and 8 a word.

#include <array>

#include "../levels.h"
#include "../math.h"
#include "../ops.h"
#include "groups.h"
#include "spoil.h"

namespace gradcomp::cpu {
namespace {

// A group's levels, and one over what is between each and the next; 0 where nothing is.
template <int kLevels>
struct Table {
  float level[kLevels], inverse[kLevels - 1];

  explicit Table(const float* levels) {
    std::copy_n(levels, kLevels, level);
    for (int i = 0; i + 1 < kLevels; ++i) inverse[i] = level_inverse(level[i], level[i + 1]);
  }
};

// codes <- the level each entry is rounded to, by its draw; x <- what that leaves over.
template <int kLevels>
HOT void round_by_draws(float* x, int64_t n, const Table<kLevels>& table, uint32_t draws, uint32_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    float low = table.level[0], high = table.level[1], inverse = table.inverse[0];
    uint32_t code = 0;
    for (int level = 1; level + 1 < kLevels; ++level) {
      const bool beyond = x[i] >= table.level[level];
      low = beyond ? table.level[level] : low;
      high = beyond ? table.level[level + 1] : high;
      inverse = beyond ? table.inverse[level] : inverse;
      code += beyond;
    }
    const bool up = draw(draws, static_cast<uint32_t>(i)) < (x[i] - low) * inverse;
    codes[i] = code + up;
    x[i] -= up ? high : low;
  }
}

// The same for two levels, by which side of the cut an entry is on.
HOT void round_at(float* x, int64_t n, float low, float high, float cut, uint32_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const bool up = x[i] >= cut;
    codes[i] = up;
    x[i] -= up ? high : low;
  }
}

template <int kLevels>
constexpr Packing packing = *packing_of(kLevels);

template <int kLevels>
void pack(const uint32_t* codes, int64_t n, uint64_t* words) {
  constexpr Packing kPacking = packing<kLevels>;
  for (int64_t at = 0; at < n; at += kPacking.per_word()) {
    uint64_t word = 0;
    for (int64_t digit = kPacking.digits - 1; digit >= 0; --digit) {
      uint64_t one = 0;
      for (int64_t i = kPacking.codes - 1; i >= 0; --i) one = one * kLevels + codes[at + digit * kPacking.codes + i];
      word = word * kPacking.base + one;
    }
    *words++ = word;
  }
}

// The codes of each digit, one a byte.
template <int kLevels>
constexpr std::array<std::array<uint8_t, 8>, packing<kLevels>.base> codes_of_digits() {
  std::array<std::array<uint8_t, 8>, packing<kLevels>.base> found{};
  for (uint64_t digit = 0; digit < packing<kLevels>.base; ++digit) {
    uint64_t left = digit;
    for (int64_t i = 0; i < packing<kLevels>.codes; ++i) {
      found[digit][static_cast<size_t>(i)] = static_cast<uint8_t>(left % kLevels);
      left /= kLevels;
    }
  }
  return found;
}

template <int kLevels>
constexpr auto kCodes = codes_of_digits<kLevels>();

template <int kLevels>
void add_words(const uint64_t* words, int64_t n, const float* levels, float scale, float* target) {
  constexpr Packing kPacking = packing<kLevels>;
  float scaled[kLevels];
  for (int i = 0; i < kLevels; ++i) scaled[i] = scale * levels[i];
  for (int64_t at = 0; at < n; at += kPacking.per_word()) {
    uint64_t word = *words++;
    const int64_t there = std::min(n - at, kPacking.per_word());
    for (int64_t begin = 0; begin < there; begin += kPacking.codes) {
      const auto& codes = kCodes<kLevels>[word % kPacking.base];
      word /= kPacking.base;
      float* to = target + at + begin;
      for (int64_t i = 0; i < std::min(there - begin, kPacking.codes); ++i) to[i] += scaled[codes[static_cast<size_t>(i)]];
    }
  }
}

// work.template operator()<kLevels>() for this number of levels.
template <class Work>
void with_levels(int64_t levels, const Work& work) {
  switch (levels) {
    case 2:
      return work.template operator()<2>();
    case 3:
      return work.template operator()<3>();
    case 5:
      return work.template operator()<5>();
    default:
      return work.template operator()<9>();
  }
}

void add_groups(Span<float> target, Span<const float> levels, Span<const uint64_t> words, int64_t group, int64_t count,
                float scale, Queue queue) {
  const Groups groups{target.size, group};
  with_levels(count, [&]<int kLevels>() {
    parallel_groups(groups, queue.threads, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        add_words<kLevels>(words.data + g * packing<kLevels>.words(group), groups.end(g) - groups.begin(g),
                           levels.data + g * kLevels, scale, target.data + groups.begin(g));
      }
    });
  });
}

}  // namespace

void take_levels(Span<float> value, Span<const float> levels, Span<const float> cuts, int64_t group, int64_t count, int64_t key,
                 Span<uint64_t> words, Queue queue) {
  const Groups groups{value.size, group};
  with_levels(count, [&]<int kLevels>() {
    parallel_groups(groups, queue.threads, [&](int64_t begin, int64_t end) {
      std::vector<uint32_t> codes(static_cast<size_t>(groups.longest() + packing<kLevels>.per_word()));
      for (int64_t g = begin; g < end; ++g) {
        float* x = value.data + groups.begin(g);
        const int64_t n = groups.end(g) - groups.begin(g);
        const float* own = levels.data + g * kLevels;
        if (cuts.given()) {
          round_at(x, n, own[0], own[1], cuts.data[g], codes.data());
        } else {
          round_by_draws<kLevels>(x, n, Table<kLevels>(own), draws_of(key, g), codes.data());
        }
        std::fill_n(codes.begin() + n, packing<kLevels>.per_word(), 0u);
        pack<kLevels>(codes.data(), n, words.data + g * packing<kLevels>.words(group));
      }
    });
  });
}

void add_levels(Span<float> target, Span<const float> levels, Span<const uint64_t> words, Span<const int32_t> header,
                int64_t group, int64_t count, float scale, Queue queue) {
  add_groups(target, levels, words, group, count, scale, queue);
  if (header.data[1] != 0) spoil(target, {});
}

void settle_levels(Span<float> value, Span<const float> levels, Span<const uint64_t> words, int64_t group, int64_t count,
                   Span<const float> update, float keep, Queue queue) {
  const float share = share_to_keep(update.data, keep);
  if (share != 0) add_groups(value, levels, words, group, count, share, queue);
}

}  // namespace gradcomp::cpu
