// Rounding to levels, and adding the levels up, on CPUs. Bytes: take_levels 8 an entry, add_levels 8, both 8 a word.

#include "../math_rounding.h"
#include "../ops.h"
#include "block_words.h"
#include "entry_add.h"
#include "lane_hot.h"
#include "lane_vectors.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

using Masks = int32_t __attribute__((vector_size(32)));
using Bytes = uint8_t __attribute__((vector_size(32), may_alias));

struct Around {
  Floats low, high;
  Words code;  // the numbers of the lower levels
};

// The levels as a search by halves of eight entries at once meets them: middle[i] has the 2^i levels that step i compares with.
template <int kLevels>
struct Search {
  static constexpr int kSteps = kLevels == 2 ? 0 : kLevels == 3 ? 1 : kLevels == 5 ? 2 : 3;

  Floats lows{}, highs{}, middle[3] = {}, everywhere[3] = {};  // everywhere[i] has level i in all lanes

  explicit Search(const float* level) {
    for (int i = 0; i < 3 && i < kLevels; ++i) everywhere[i] = in_all_lanes(level[i]);
    for (int i = 0; i + 1 < kLevels; ++i) {
      lows[i] = level[i];
      highs[i] = level[i + 1];
    }
    for (int step = 0, apart = kLevels / 2; step < kSteps; ++step, apart /= 2) {
      for (int i = 0; i < 1 << step; ++i) middle[step][i] = level[(2 * i + 1) * apart];
    }
  }

  // Find the levels around eight entries.
  INLINE Around around(const Floats& x) const {
    Words code = {};
#pragma GCC unroll 3
    for (int step = 0; step < kSteps; ++step) {
      code = code + code - reinterpret_cast<Words>(x >= chosen(middle[step], code));
    }
    if constexpr (kSteps > 1) return {chosen(lows, code), chosen(highs, code), code};
    if constexpr (kSteps == 0) return {everywhere[0], everywhere[1], code};
    const Masks upper = code != 0;
    return {upper ? everywhere[1] : everywhere[0], upper ? everywhere[2] : everywhere[1], code};
  }
};

// Round eight entries by their draws: x <- the rounding errors. Returns the numbers of the levels.
template <int kLevels>
INLINE Words round_eight(Floats& x, const Search<kLevels>& search, uint32_t draws) {
  const auto [low, high, code] = search.around(x);
  const Floats drawn = __builtin_convertvector(reinterpret_cast<Masks>(mix(kLanes + draws) >> 8), Floats) * 0x1p-24f;
  const Masks up = rounds_up(x, low, high, drawn);
  x -= up ? high : low;
  return code - reinterpret_cast<Words>(up);
}

// Round each entry by its draw: codes <- the numbers of the levels, x <- the rounding errors.
template <int kLevels>
HOT void round_by_draws(float* __restrict x, int64_t n, const float* levels, uint32_t draws, uint8_t* codes) {
  const Search<kLevels> search(levels);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    Floats its = *reinterpret_cast<Floats*>(x + i);
    const Words code = round_eight(its, search, draws + static_cast<uint32_t>(i));
    *reinterpret_cast<Floats*>(x + i) = its;
    const Bytes bytes = reinterpret_cast<Bytes>(code);
    constexpr Bytes kFirsts = {0, 4, 8, 12, 16, 20, 24, 28};
    const Longs eight = reinterpret_cast<Longs>(__builtin_shuffle(bytes, kFirsts));
    memcpy(codes + i, &eight, 8);
  }
  Floats rest = {};
  for (int64_t lane = 0; i + lane < n; ++lane) rest[lane] = x[i + lane];
  const Words code = round_eight(rest, search, draws + static_cast<uint32_t>(i));
  for (int64_t lane = 0; i + lane < n; ++lane) {
    x[i + lane] = rest[lane];
    codes[i + lane] = static_cast<uint8_t>(code[lane]);
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
          unpack(words.data[rank] + g * kPacking.words(group), kPacking.words(n), buffers);
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
          round_by_draws<kLevels>(x, n, own, draws_of(seed_of(key), g), codes);
        }
        std::fill_n(codes + n, there * kPacking.per_word() - n, uint8_t{0});
        pack(buffers, there, words.data + g * kPacking.words(group));
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
                   Span<const float> update, Queue queue) {
  if (!is_finite(update.data[0])) add_groups(residual, Spans(levels), Spans(words), group, count, 1.0f, queue);
}

}  // namespace gradcomp::cpu
