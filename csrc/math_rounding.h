// Quantisation: groups of entries that share levels, the draws that round them, and codes in words.
#pragma once

#include <cstdint>

#include "math.h"

namespace gradcomp {

// n entries in groups of `size`. A rest of at least kShortest is a group of its own; a shorter one belongs to the last group.
struct Groups {
  static constexpr int64_t kShortest = 32;

  int64_t n, size;

  SHARED_MATH int64_t count() const { return n < size ? 1 : n / size + (n % size >= kShortest); }
  SHARED_MATH int64_t begin(int64_t group) const { return group * size; }
  SHARED_MATH int64_t end(int64_t group) const { return group + 1 == count() ? n : (group + 1) * size; }
  SHARED_MATH int64_t longest() const { return (n < size ? n : size) + kShortest - 1; }
};

// The layout of codes in words of 64 bits. A word joins `parts` numbers below `base`, by powers of `base`. Each of them joins
// `digits` codes, by powers of `levels`. A group's first codes are the first digits of its words, in order; then come the
// second digits.
struct Packing {
  int64_t levels, digits, parts;
  uint64_t base;  // levels to the power of digits

  SHARED_MATH int64_t per_word() const { return digits * parts; }
  SHARED_MATH int64_t words(int64_t entries) const { return (entries + per_word() - 1) / per_word(); }
  SHARED_MATH int64_t words(const Groups& groups) const {
    const int64_t last = groups.count() - 1;
    return last * words(groups.size) + words(groups.n - groups.begin(last));
  }
};

constexpr Packing kPackings[] = {{2, 32, 2, 1ull << 32}, {3, 20, 2, 3486784401}, {5, 9, 3, 1953125}, {9, 10, 2, 3486784401}};

constexpr const Packing* packing_of(int64_t levels) {
  for (const Packing& packing : kPackings) {
    if (packing.levels == levels) return &packing;
  }
  return nullptr;
}

// The number of a group's first draw. Its entries use consecutive draws, each in [0, 1).
SHARED_MATH uint32_t seed_of(int64_t key) {
  return mix(static_cast<uint32_t>(key)) ^ mix(static_cast<uint32_t>(key >> 32) + 0x9e3779b9u);
}
SHARED_MATH uint32_t draws_of(uint32_t seed, int64_t group) { return mix(seed ^ static_cast<uint32_t>(group)); }
SHARED_MATH float draw(uint32_t which) { return static_cast<float>(mix(which) >> 8) * 0x1p-24f; }

// Decide whether an entry between two levels goes to the upper one, with the probability that makes the mean exact. An entry
// outside the levels goes to the nearest.
// Entries may be vectors.
template <class Entry>
SHARED_MATH __attribute__((always_inline)) auto rounds_up(Entry x, Entry low, Entry high, Entry drawn) {
  return drawn * (high - low) < x - low;
}

}  // namespace gradcomp
