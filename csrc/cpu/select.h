// Exact selection on CPUs: the k-th largest key by radix, and the move of what is chosen out of the bucket.
#pragma once

#include <cstdint>
#include <utility>

#include "../math.h"
#include "../span.h"

namespace gradcomp::cpu {

// What a radix selection finds: the k-th largest key, and how many keys are larger.
struct Rank {
  uint32_t key;
  int64_t above;
};

// The k-th largest of n keys: three passes of 11, 11 and 10 bits, each over those that share the digits found so far.
template <class KeyAt>
Rank radix_select(int64_t n, int64_t k, KeyAt key_at) {
  uint32_t prefix = 0;
  int64_t above = 0;
  for (const auto& [shift, bits] : {std::pair{21, 11}, std::pair{10, 11}, std::pair{0, 10}}) {
    int64_t count[1 << 11] = {};
    const uint32_t mask = (1u << bits) - 1;
    const int known = shift + bits;
    for (int64_t j = 0; j < n; ++j) {
      const uint32_t key = key_at(j);
      const bool match = known == 32 || key >> known == prefix >> known;
      count[(key >> shift) & mask] += match;
    }
    uint32_t digit = mask;
    while (above + count[digit] < k) above += count[digit--];
    prefix |= digit << shift;
  }
  return {prefix, above};
}

// Moves out the k entries above the k-th key, and of its equals the first ones, visiting n entries in index order.
template <class IndexAt, class KeyAt>
void move_chosen(Span<float> value, Span<float> velocity, int64_t n, int64_t k, Rank rank, IndexAt index_at, KeyAt key_at,
                 float* values, int32_t* indices) {
  int64_t ties = k - rank.above;
  int64_t taken = 0;
  for (int64_t j = 0; j < n && taken < k; ++j) {
    const uint32_t key = key_at(j);
    if (key < rank.key || (key == rank.key && ties-- <= 0)) continue;
    const int64_t i = index_at(j);
    values[taken] = value.data[i];
    indices[taken++] = static_cast<int32_t>(i);
    value.data[i] = 0.0f;
    if (velocity.given()) velocity.data[i] = 0.0f;
  }
}

}  // namespace gradcomp::cpu
