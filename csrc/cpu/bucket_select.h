// Exact selection on CPUs. One vectorised read of the bucket lists, in index order, all candidates for the k largest entries;
// the choice is then made among these few. Bytes an entry: 4.
//
// A Criterion says which entries are wanted: layers(begin, end, work) calls work(begin, end, bar) for each layer's part of
// [begin, end). An entry is wanted if its key is above the bar.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "../math.h"
#include "../span.h"
#include "lane_hot.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

// Signed, since AVX2 compares only signed numbers. Every key is above a bar of -1.
inline int32_t key_of(float x) { return static_cast<int32_t>(magnitude_key(x)); }

// marks[j] <- whether any entry of line j is above the bar.
HOT void mark_lines(const float* x, int64_t lines, int32_t bar, uint8_t* marks) {
  for (int64_t j = 0; j < lines; ++j) {
    uint32_t any = 0;
    for (int64_t i = 0; i < kLine; ++i) any |= key_of(x[kLine * j + i]) > bar ? 1u : 0u;
    marks[j] = any != 0;
  }
}

// A list of entries and their places, in index order.
struct Candidates {
  uint32_t* places;
  float* entries;

  int32_t key(int64_t j) const { return key_of(entries[j]); }
  void copy(const Candidates& from, int64_t count) const {
    std::copy_n(from.places, count, places);
    std::copy_n(from.entries, count, entries);
  }
};

// The k-th largest of n keys, and the number of keys above it.
struct Rank {
  int32_t key;
  int64_t above;
};

// Find the k-th largest key in three passes of 11, 11 and 10 bits, each over the keys that share the digits found so far.
inline Rank radix_select(const Candidates& list, int64_t n, int64_t k) {
  uint32_t prefix = 0;
  int64_t above = 0;
  for (const auto& [shift, bits] : {std::pair{21, 11}, std::pair{10, 11}, std::pair{0, 10}}) {
    int64_t count[1 << 11] = {};
    const uint32_t mask = (1u << bits) - 1;
    const int known = shift + bits;
    for (int64_t j = 0; j < n; ++j) {
      const auto key = static_cast<uint32_t>(list.key(j));
      const bool match = known == 32 || key >> known == prefix >> known;
      count[(key >> shift) & mask] += match;
    }
    uint32_t digit = mask;
    while (above + count[digit] < k) above += count[digit--];
    prefix |= digit << shift;
  }
  return {static_cast<int32_t>(prefix), above};
}

// Keep the k largest of n candidates in index order, the first ones of equals. Returns the smallest key that is left.
inline int32_t keep_largest(const Candidates& list, int64_t n, int64_t k) {
  const Rank rank = radix_select(list, n, k);
  int64_t ties = k - rank.above, kept = 0;
  for (int64_t j = 0; j < n; ++j) {
    const int32_t key = list.key(j);
    if (key < rank.key || (key == rank.key && ties-- <= 0)) continue;
    list.places[kept] = list.places[j];
    list.entries[kept++] = list.entries[j];
  }
  return rank.key;
}

// Two counts of a search: the entries that it listed, and the wanted entries that it met.
struct Found {
  int64_t listed = 0, wanted = 0;
};

// A list with space for at least k + kLine candidates. A full list keeps its k largest only, and then admits only larger ones:
// it never loses one of the k. `counted` asks for the count of all wanted entries, also of those that cannot get in.
class Shortlist {
 public:
  Shortlist(const Candidates& list, int64_t space, int64_t k, bool counted)
      : list_(list), space_(space), k_(k), counted_(counted) {}

  // The bar above which an entry is worth a look.
  int32_t least(int32_t bar) const { return counted_ ? bar : std::max(bar, raised_); }

  // Look at the marked lines of entries from .. to. x[0] is entry `at`, where a line begins.
  void look_at(const uint8_t* marks, const float* x, int64_t at, int64_t from, int64_t to, int32_t bar) {
    for (int64_t line = from / kLine; line * kLine < to; ++line) {
      if (marks[line - at / kLine] == 0) continue;
      look_at_line(x - at, std::max(line * kLine, from), std::min((line + 1) * kLine, to), bar);
    }
  }

  Found found() const { return found_; }

 private:
  void look_at_line(const float* x, int64_t from, int64_t to, int32_t bar) {
    if (found_.listed + kLine > space_) {
      raised_ = keep_largest(list_, found_.listed, k_);
      found_.listed = k_;
    }
    const int32_t least = std::max(bar, raised_);
    for (int64_t i = from; i < to; ++i) {
      const int32_t key = key_of(x[i]);
      list_.places[found_.listed] = static_cast<uint32_t>(i);
      list_.entries[found_.listed] = x[i];
      found_.listed += key > least ? 1 : 0;
      found_.wanted += key > bar ? 1 : 0;
    }
  }

  Candidates list_;
  int64_t space_, k_;
  bool counted_;
  int32_t raised_ = -1;
  Found found_;
};

// List the wanted entries of [begin, end).
template <class Criterion>
void look_through(Span<const float> x, int64_t begin, int64_t end, const Criterion& criterion, Shortlist& shortlist) {
  constexpr int64_t kLines = 128;
  criterion.layers(begin, end, [&](int64_t from, int64_t to, int32_t bar) {
    uint8_t marks[kLines];
    for (int64_t line = from / kLine; line * kLine < to; line += kLines) {
      const int64_t at = line * kLine, lines = std::min(kLines, (to + kLine - 1) / kLine - line);
      const int64_t whole = std::min(lines, x.size / kLine - line);  // the bucket's last line may be shorter
      mark_lines(x.data + at, whole, shortlist.least(bar), marks);
      if (whole < lines) marks[whole] = 1;
      shortlist.look_at(marks, x.data + at, at, std::max(at, from), std::min(at + lines * kLine, to), bar);
    }
  });
}

// Entries of one cache line, which cost one miss when they are sampled together.
constexpr int64_t kSampled = 16;

// Guess a bar from a sample. About 1.25 k entries and five deviations of the sample lie above it: rarely fewer than k, rarely
// many more. Returns -1 if a sample would save nothing.
template <class Sample>
int32_t guess_bar(int64_t n, int64_t k, float* samples, int64_t space, Sample sample) {
  constexpr int64_t kFew = 1 << 13, kMany = 1 << 16;
  const int64_t wanted = std::min(std::clamp(n / 64, kFew, kMany), space) / kSampled * kSampled, runs = n / kSampled;
  const double expected = static_cast<double>(wanted) * static_cast<double>(k) / static_cast<double>(n);
  const auto rank = static_cast<int64_t>(1.25 * expected + 5 * std::sqrt(expected)) + 2;
  if (n <= kFew || rank >= wanted) return -1;
  for (int64_t i = 0; i < wanted; i += kSampled) {
    const auto run = static_cast<int64_t>((uint64_t{mix(static_cast<uint32_t>(i))} * static_cast<uint64_t>(runs)) >> 32);
    sample(run * kSampled, samples + i);
  }
  std::nth_element(samples, samples + rank, samples + wanted, [](float a, float b) { return key_of(a) > key_of(b); });
  return key_of(samples[rank]);
}

// Count the candidates that fit into the words.
inline int64_t candidates_in(int64_t words) { return words / 2; }

// Size the scratch for the k largest of n, in words. Its list is long enough for eight threads if k is small beside n.
inline int64_t select_words(int64_t n, int64_t k) { return 2 * (std::min(n, std::max<int64_t>(16 * k, 1 << 13)) + 8 * kLine); }

inline Candidates candidates(Span<uint32_t> scratch) {
  return {scratch.data, reinterpret_cast<float*>(scratch.data + candidates_in(scratch.size))};
}

// List the wanted entries, or the k largest of them. look(shortlist, begin, end) looks through a thread's part of n entries.
template <class Look>
Found select(int64_t n, int64_t k, bool counted, Span<uint32_t> scratch, int threads, Look look) {
  const Candidates list = candidates(scratch);
  const int64_t space = candidates_in(scratch.size), most = std::max<int64_t>(1, space / (2 * (k + kLine)));
  const int count = static_cast<int>(std::min<int64_t>(parts(n, threads), most));
  const int64_t share = space / count;
  const auto part_of = [&](int part) { return Candidates{list.places + part * share, list.entries + part * share}; };
  std::vector<Found> found(static_cast<size_t>(count));
  parallel(n, count, [&](int part, int64_t begin, int64_t end) {
    Shortlist shortlist(part_of(part), share, k, counted);
    look(shortlist, begin, end);
    found[static_cast<size_t>(part)] = shortlist.found();
  });
  Found all;
  for (int part = 0; part < count; ++part) {
    const Found& its = found[static_cast<size_t>(part)];
    Candidates{list.places + all.listed, list.entries + all.listed}.copy(part_of(part), its.listed);
    all.listed += its.listed;
    all.wanted += its.wanted;
  }
  if (all.listed > k) keep_largest(list, all.listed, k);
  all.listed = std::min(all.listed, k);
  return all;
}

// List the k largest of n entries. sample(entry, to) samples kSampled entries, from which a bar is guessed, and
// look(shortlist, begin, end, bar) looks for what is above it. A wrong guess costs a second search, never a wrong result.
template <class Sample, class Look>
void select_largest(int64_t n, int64_t k, Span<uint32_t> scratch, int threads, Sample sample, Look look) {
  const auto search = [&](int32_t bar) {
    return select(n, k, false, scratch, threads,
                  [&](Shortlist& shortlist, int64_t begin, int64_t end) { look(shortlist, begin, end, bar); });
  };
  const int32_t bar = guess_bar(n, k, candidates(scratch).entries, candidates_in(scratch.size), sample);
  if (bar < 0 || search(bar).listed < k) search(-1);
}

// Move the listed entries out of the residual into a payload.
inline void move_out(Span<float> residual, OptionalSpan<uint8_t> ages, const uint32_t* list, int64_t count, float* values,
                     int32_t* indices) {
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t i = list[j];
    values[j] = residual.data[i];
    indices[j] = static_cast<int32_t>(i);
    residual.data[i] = 0.0f;
    if (ages.given()) ages.data[i] = 0;
  }
}

}  // namespace
}  // namespace gradcomp::cpu
