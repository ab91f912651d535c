// Rounding to levels, and adding the levels up, on CPUs. Bytes: take_levels 8 an entry, add_levels 8, both 8 a word.

#include <array>

#include "../math.h"
#include "../math_rounding.h"
#include "../ops.h"
#include "entry_add.h"
#include "lane_hot.h"
#include "lane_vectors.h"
#include "thread_groups.h"

namespace gradcomp::cpu {
namespace {

template <int kLevels>
using Levels = std::array<float, kLevels>;

struct Around {
  float low, high;
  uint32_t code;  // of the lower one
};

template <size_t... kAt>
inline Levels<sizeof...(kAt)> half_of(const auto& level, bool upper, std::index_sequence<kAt...>) {
  return {either(upper, level[kAt + sizeof...(kAt) - 1], level[kAt])...};
}

// Find the two levels around x, in halves of halves.
template <size_t kLevels>
inline Around around(float x, const std::array<float, kLevels>& level, uint32_t code = 0) {
  if constexpr (kLevels == 2) {
    return {level[0], level[1], code};
  } else {
    constexpr size_t kHalf = kLevels / 2;
    const bool upper = x >= level[kHalf];
    return around(x, half_of(level, upper, std::make_index_sequence<kHalf + 1>()), 2 * code + upper);
  }
}

// Round each entry by its draw: codes <- the numbers of the levels, x <- the rounding errors.
template <int kLevels>
HOT void round_by_draws(float* __restrict x, int64_t n, const float* levels, uint32_t draws, uint8_t* codes) {
  Levels<kLevels> level;  // a copy, which x cannot overlap
  std::copy_n(levels, kLevels, level.begin());
  for (int64_t i = 0; i < n; ++i) {
    const auto [low, high, code] = around(x[i], level);
    const bool up = rounds_up(x[i], low, high, draw(draws++));
    codes[i] = static_cast<uint8_t>(code + up);
    x[i] -= either(up, high, low);
  }
}

// Do the same for two levels, by the side of the cut that an entry is on.
HOT void round_at(float* __restrict x, int64_t n, float low, float high, float cut, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const bool up = x[i] >= cut;
    codes[i] = up;
    x[i] -= up ? high : low;
  }
}

template <int kLevels>
HOT void add_codes(const uint8_t* codes, int64_t n, const float* levels, float scale, float* target) {
  float scaled[kLevels];
  for (int i = 0; i < kLevels; ++i) scaled[i] = scale * levels[i];
  Floats first{}, last;
  for (int i = 0; i < 8; ++i) {
    if (i < kLevels) first[i] = scaled[i];
    last[i] = scaled[kLevels - 1];
  }
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const Words eight = eight_bytes(codes + i);
    Floats its = chosen(first, eight);
    if constexpr (kLevels > 8) its = eight == 8 ? last : its;
    *reinterpret_cast<Floats*>(target + i) += its;
  }
  for (; i < n; ++i) target[i] += scaled[codes[i]];
}

template <int kLevels>
constexpr Packing packing = *packing_of(kLevels);

// Join the digits of each word: part <- the number that its codes make up.
template <int kLevels>
HOT void join_digits(const uint8_t* codes, int64_t count, uint32_t* __restrict part) {
  std::fill_n(part, count, 0u);
  for (int64_t digit = packing<kLevels>.digits - 1; digit >= 0; --digit) {
    const uint8_t* own = codes + digit * count;
    for (int64_t word = 0; word < count; ++word) part[word] = part[word] * kLevels + own[word];
  }
}

// Take the numbers apart into digits again; part is used up.
template <int kLevels>
HOT void part_digits(uint32_t* __restrict part, int64_t count, uint8_t* codes) {
  for (int64_t digit = 0; digit < packing<kLevels>.digits; ++digit) {
    uint8_t* own = codes + digit * count;
    for (int64_t word = 0; word < count; ++word) {
      const uint32_t left = part[word] / kLevels;
      own[word] = static_cast<uint8_t>(part[word] - left * kLevels);
      part[word] = left;
    }
  }
}

// Pack codes into words. `part` is memory for as many numbers.
template <int kLevels>
void pack(const uint8_t* codes, int64_t count, uint32_t* part, uint64_t* words) {
  constexpr Packing kPacking = packing<kLevels>;
  std::fill_n(words, count, uint64_t{0});
  for (int64_t i = kPacking.parts - 1; i >= 0; --i) {
    join_digits<kLevels>(codes + i * kPacking.digits * count, count, part);
    for (int64_t word = 0; word < count; ++word) words[word] = words[word] * kPacking.base + part[word];
  }
}

// Unpack words into codes. `left` and `part` are memory for as many numbers.
template <int kLevels>
void unpack(const uint64_t* words, int64_t count, uint64_t* left, uint32_t* part, uint8_t* codes) {
  constexpr Packing kPacking = packing<kLevels>;
  std::copy_n(words, count, left);
  for (int64_t i = 0; i < kPacking.parts; ++i) {
    for (int64_t word = 0; word < count; ++word) {
      part[word] = static_cast<uint32_t>(left[word] % kPacking.base);
      left[word] /= kPacking.base;
    }
    part_digits<kLevels>(part, count, codes + i * kPacking.digits * count);
  }
}

// Call work.template operator()<kLevels>() for this number of levels.
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

// Memory for any group's codes, and for its words and their parts.
template <int kLevels>
struct Buffers {
  std::vector<uint64_t> left;
  std::vector<uint32_t> part;
  std::vector<uint8_t> codes;

  explicit Buffers(const Groups& groups)
      : left(static_cast<size_t>(packing<kLevels>.words(groups.longest()))),
        part(left.size()),
        codes(left.size() * packing<kLevels>.per_word()) {}
};

void add_groups(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words, int64_t group,
                int64_t count, float scale, Queue queue) {
  const Groups groups{target.size, group};
  with_levels(count, [&]<int kLevels>() {
    constexpr Packing kPacking = packing<kLevels>;
    parallel_groups(groups, queue.threads, [&](int64_t begin, int64_t end) {
      Buffers<kLevels> buffers(groups);
      for (int64_t g = begin; g < end; ++g) {
        const int64_t n = groups.end(g) - groups.begin(g);
        for (int rank = 0; rank < words.count; ++rank) {
          unpack<kLevels>(words.data[rank] + g * kPacking.words(group), kPacking.words(n), buffers.left.data(),
                          buffers.part.data(), buffers.codes.data());
          add_codes<kLevels>(buffers.codes.data(), n, levels.data[rank] + g * kLevels, scale, target.data + groups.begin(g));
        }
      }
    });
  });
}

}  // namespace

void take_levels(Span<float> residual, Span<const float> levels, OptionalSpan<const float> cuts, int64_t group, int64_t count,
                 int64_t key, Span<uint64_t> words, Queue queue) {
  const Groups groups{residual.size, group};
  with_levels(count, [&]<int kLevels>() {
    constexpr Packing kPacking = packing<kLevels>;
    parallel_groups(groups, queue.threads, [&](int64_t begin, int64_t end) {
      Buffers<kLevels> buffers(groups);
      for (int64_t g = begin; g < end; ++g) {
        float* x = residual.data + groups.begin(g);
        const int64_t n = groups.end(g) - groups.begin(g), there = kPacking.words(n);
        const float* own = levels.data + g * kLevels;
        uint8_t* codes = buffers.codes.data();
        if (cuts.given()) {
          round_at(x, n, own[0], own[1], cuts.data[g], codes);
        } else {
          round_by_draws<kLevels>(x, n, own, draws_of(key, g), codes);
        }
        std::fill_n(codes + n, there * kPacking.per_word() - n, uint8_t{0});
        pack<kLevels>(codes, there, buffers.part.data(), words.data + g * kPacking.words(group));
      }
    });
  });
}

void add_levels(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                const Spans<const int32_t>& headers, int64_t group, int64_t count, float scale, Queue queue) {
  add_groups(target, levels, words, group, count, scale, queue);
  for (int rank = 0; rank < headers.count; ++rank) {
    if (headers.data[rank][1] != 0) spoil(target, {});
  }
}

void settle_levels(Span<float> residual, Span<const float> levels, Span<const uint64_t> words, int64_t group, int64_t count,
                   Span<const float> update, float keep, Queue queue) {
  const float share = share_to_keep(update.data, keep);
  if (share != 0) add_groups(residual, Spans(levels), Spans(words), group, count, share, queue);
}

}  // namespace gradcomp::cpu
