// Exact selection on CPUs. One vectorised read of the bucket lists, in index order, what may be among the k largest; the choice
// is then made among the few. Bytes: 4 an entry, and what is listed.
//
// What is wanted is said by a criterion: layers(begin, end, work) calls work(begin, end, center, bar) for each layer's part of
// [begin, end), whose entries are wanted if key_of(entry, center) is above the bar; key(i) is the key of entry i.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "../math.h"
#include "../span.h"
#include "parallel.h"

namespace gradcomp::cpu {
namespace {

// Compared as signed numbers, for which there is an instruction; every key is above a bar of -1.
inline int32_t key_of(float x, float center) { return static_cast<int32_t>(magnitude_key(x - center)); }

constexpr int64_t kStep = 64;  // entries that are passed over at once

// marks[j] <- whether any entry of the j-th kStep is above the bar.
HOT void mark_steps(const float* x, int64_t steps, float center, int32_t bar, uint8_t* marks) {
  for (int64_t j = 0; j < steps; ++j) {
    uint32_t any = 0;
    for (int64_t i = 0; i < kStep; ++i) any |= key_of(x[kStep * j + i], center) > bar ? 1u : 0u;
    marks[j] = any != 0;
  }
}

// The k-th largest of n keys: three passes of 11, 11 and 10 bits, each over those that share the digits found so far.
struct Rank {
  int32_t key;
  int64_t above;  // how many keys are larger
};

template <class KeyAt>
Rank radix_select(int64_t n, int64_t k, KeyAt key_at) {
  uint32_t prefix = 0;
  int64_t above = 0;
  for (const auto& [shift, bits] : {std::pair{21, 11}, std::pair{10, 11}, std::pair{0, 10}}) {
    int64_t count[1 << 11] = {};
    const uint32_t mask = (1u << bits) - 1;
    const int known = shift + bits;
    for (int64_t j = 0; j < n; ++j) {
      const auto key = static_cast<uint32_t>(key_at(j));
      const bool match = known == 32 || key >> known == prefix >> known;
      count[(key >> shift) & mask] += match;
    }
    uint32_t digit = mask;
    while (above + count[digit] < k) above += count[digit--];
    prefix |= digit << shift;
  }
  return {static_cast<int32_t>(prefix), above};
}

// Leaves of n listed entries the k largest, of equals the first ones, in index order. Returns the smallest key that is left.
template <class Criterion>
int32_t keep_largest(uint32_t* list, int64_t n, int64_t k, const Criterion& criterion) {
  const Rank rank = radix_select(n, k, [&](int64_t j) { return criterion.key(list[j]); });
  int64_t ties = k - rank.above, kept = 0;
  for (int64_t j = 0; j < n; ++j) {
    const int32_t key = criterion.key(list[j]);
    if (key > rank.key || (key == rank.key && ties-- > 0)) list[kept++] = list[j];
  }
  return rank.key;
}

// What a search has listed, and whether some of what is wanted had to go.
struct Found {
  int64_t listed = 0;
  bool dropped = false;
};

// Lists what is wanted of [begin, end). When the list is full, of at least k + kStep, all go but its k largest, and from then
// on only what is larger than those gets in: none is lost that belongs to the k.
template <class Criterion>
Found search(const float* x, int64_t begin, int64_t end, const Criterion& criterion, int64_t k, uint32_t* list,
             int64_t capacity) {
  Found found;
  int32_t raised = -1;
  criterion.layers(begin, end, [&](int64_t layer_begin, int64_t layer_end, float center, int32_t bar) {
    for (int64_t block = layer_begin; block < layer_end; block += kBlock) {
      const int64_t block_end = std::min(block + kBlock, layer_end), steps = (block_end - block) / kStep;
      uint8_t marks[kBlock / kStep + 1] = {};
      mark_steps(x + block, steps, center, std::max(bar, raised), marks);
      marks[steps] = 1;  // what is left over is looked at one by one
      for (int64_t j = 0; j <= steps; ++j) {
        if (marks[j] == 0) continue;
        if (found.listed + kStep > capacity) {
          raised = keep_largest(list, found.listed, k, criterion);
          found = {k, true};
        }
        const int64_t at = block + kStep * j, stop = std::min(at + kStep, block_end);
        for (int64_t i = at; i < stop; ++i) {
          list[found.listed] = static_cast<uint32_t>(i);
          found.listed += key_of(x[i], center) > std::max(bar, raised) ? 1 : 0;
        }
      }
    }
  });
  return found;
}

// 32-bit words for the k largest of n: enough for eight threads where k is small beside n.
inline int64_t select_words(int64_t n, int64_t k) { return std::min(n, std::max<int64_t>(16 * k, 1 << 13)) + 8 * kStep; }

// Lists what is wanted, or the k largest of it, in index order, at the front of the list.
template <class Criterion>
Found select(Span<const float> x, const Criterion& criterion, int64_t k, Span<uint32_t> list, int threads) {
  const int64_t most = std::max<int64_t>(1, list.size / (2 * (k + kStep)));
  const int count = static_cast<int>(std::min<int64_t>(parts(x.size, threads), most));
  const int64_t share = list.size / count;
  std::vector<Found> found(static_cast<size_t>(count));
  parallel(x.size, count, [&](int part, int64_t begin, int64_t end) {
    found[static_cast<size_t>(part)] = search(x.data, begin, end, criterion, k, list.data + part * share, share);
  });
  Found all;
  for (int part = 0; part < count; ++part) {
    const Found& its = found[static_cast<size_t>(part)];
    std::copy_n(list.data + part * share, its.listed, list.data + all.listed);
    all.listed += its.listed;
    all.dropped |= its.dropped;
  }
  if (all.listed <= k) return all;
  keep_largest(list.data, all.listed, k, criterion);
  return {k, true};
}

// Moves the listed entries out of the bucket.
inline void move_out(Span<float> value, Span<float> velocity, const uint32_t* list, int64_t count, float* values,
                     int32_t* indices) {
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t i = list[j];
    values[j] = value.data[i];
    indices[j] = static_cast<int32_t>(i);
    value.data[i] = 0.0f;
    if (velocity.given()) velocity.data[i] = 0.0f;
  }
}

}  // namespace
}  // namespace gradcomp::cpu
