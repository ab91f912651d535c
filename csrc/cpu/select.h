// Exact selection on CPUs. One vectorised read of the bucket lists, in index order, what may be among the k largest; the choice
// is then made among the few. Bytes: 4 an entry, or with peaks 0.06 and those of the lines in which something is listed.
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

// marks[j] <- whether any entry of line j is above the bar.
HOT void mark_lines(const float* x, int64_t lines, float center, int32_t bar, uint8_t* marks) {
  for (int64_t j = 0; j < lines; ++j) {
    uint32_t any = 0;
    for (int64_t i = 0; i < kLine; ++i) any |= key_of(x[kLine * j + i], center) > bar ? 1u : 0u;
    marks[j] = any != 0;
  }
}

// The same without reading the lines: marks[j] <- whether an entry may be above the bar that has no larger magnitude than the
// peak.
HOT void mark_peaks(const uint32_t* peaks, int64_t lines, float center, int32_t bar, uint8_t* marks) {
  for (int64_t j = 0; j < lines; ++j) marks[j] = key_of(float_of(peaks[j]) + float_of(magnitude_key(center)), 0.0f) > bar;
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

// How much a search has listed, and how much it has met that is wanted, where the criterion is kCounted.
struct Found {
  int64_t listed = 0, wanted = 0;
};

// Lists what is wanted of [begin, end). When the list is full, of at least k + kLine, all go but its k largest, and from then
// on only what is larger than those gets in: none is lost that belongs to the k.
template <class Criterion>
Found search(Span<const float> x, Span<const uint32_t> peaks, int64_t begin, int64_t end, const Criterion& criterion, int64_t k,
             uint32_t* list, int64_t capacity) {
  constexpr int64_t kLines = kBlock / kLine;
  Found found;
  int32_t raised = -1;
  const auto look_at = [&](int64_t from, int64_t to, float center, int32_t bar) {
    if (found.listed + kLine > capacity) {
      raised = keep_largest(list, found.listed, k, criterion);
      found.listed = k;
    }
    const int32_t least = std::max(bar, raised);
    for (int64_t i = from; i < to; ++i) {
      const int32_t key = key_of(x.data[i], center);
      list[found.listed] = static_cast<uint32_t>(i);
      found.listed += key > least ? 1 : 0;
      found.wanted += key > bar ? 1 : 0;
    }
  };
  criterion.layers(begin, end, [&](int64_t from, int64_t to, float center, int32_t bar) {
    uint8_t marks[kLines];
    for (int64_t line = from / kLine; line * kLine < to; line += kLines) {
      const int64_t lines = std::min(kLines, (to + kLine - 1) / kLine - line);
      const int32_t least = Criterion::kCounted ? bar : std::max(bar, raised);
      if (peaks.given()) {
        mark_peaks(peaks.data + line, lines, center, least, marks);
      } else {
        const int64_t whole = std::min(lines, x.size / kLine - line);  // of the bucket's last line, a part may be missing
        mark_lines(x.data + line * kLine, whole, center, least, marks);
        if (whole < lines) marks[whole] = 1;
      }
      for (int64_t j = 0; j < lines; ++j) {
        const int64_t at = (line + j) * kLine;
        if (marks[j] != 0) look_at(std::max(at, from), std::min(at + kLine, to), center, bar);
      }
    }
  });
  return found;
}

// 32-bit words for the k largest of n: enough for eight threads where k is small beside n.
inline int64_t select_words(int64_t n, int64_t k) { return std::min(n, std::max<int64_t>(16 * k, 1 << 13)) + 8 * kLine; }

// Lists what is wanted, or the k largest of it, in index order, at the front of the list.
template <class Criterion>
Found select(Span<const float> x, Span<const uint32_t> peaks, const Criterion& criterion, int64_t k, Span<uint32_t> list,
             int threads) {
  const int64_t most = std::max<int64_t>(1, list.size / (2 * (k + kLine)));
  const int count = static_cast<int>(std::min<int64_t>(parts(x.size, threads), most));
  const int64_t share = list.size / count;
  std::vector<Found> found(static_cast<size_t>(count));
  parallel(x.size, count, [&](int part, int64_t begin, int64_t end) {
    found[static_cast<size_t>(part)] = search(x, peaks, begin, end, criterion, k, list.data + part * share, share);
  });
  Found all;
  for (int part = 0; part < count; ++part) {
    const Found& its = found[static_cast<size_t>(part)];
    std::copy_n(list.data + part * share, its.listed, list.data + all.listed);
    all.listed += its.listed;
    all.wanted += its.wanted;
  }
  if (all.listed > k) keep_largest(list.data, all.listed, k, criterion);
  all.listed = std::min(all.listed, k);
  return all;
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
