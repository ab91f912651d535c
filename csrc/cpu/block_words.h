// The codes of a group's entries in words, and out of them again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../math_rounding.h"
#include "lane_hot.h"

namespace gradcomp::cpu {
namespace {

template <int kLevels>
constexpr Packing packing = *packing_of(kLevels);

// A part's digits are joined and taken apart in two halves, which fit into 16 bits: vectors hold twice as many. Loops run over
// whole vectors of words, and their last lanes write where later ones will, or behind the codes.
constexpr int64_t kVector = 16;

constexpr int64_t power(int64_t base, int64_t exponent) { return exponent == 0 ? 1 : base * power(base, exponent - 1); }
constexpr int64_t whole_vectors(int64_t count) { return (count + kVector - 1) / kVector * kVector; }

template <int kLevels>
struct Halves {
  static constexpr int64_t kFirst = kLevels == 2 ? 16 : kLevels == 3 ? 10 : kLevels == 5 ? 6 : 5;
  static constexpr int64_t kSecond = packing<kLevels>.digits - kFirst;
  static constexpr auto kBase = static_cast<uint32_t>(power(kLevels, kFirst));
  static_assert(kBase <= 1 << 16 && kSecond <= kFirst);
};

// Put a digit behind each word's number, or take its last one off. These are functions of their own, not inlined, for one row
// of digits: GCC 12 joins rows that overlap, and gets them wrong.
template <int kLevels>
HOT void join_digit(const uint8_t* codes, int64_t lanes, uint16_t* __restrict half) {
  for (int64_t word = 0; word < lanes; ++word) half[word] = static_cast<uint16_t>(half[word] * kLevels + codes[word]);
}

template <int kLevels>
HOT void part_digit(uint16_t* __restrict half, int64_t lanes, uint8_t* __restrict codes) {
  for (int64_t word = 0; word < lanes; ++word) {
    const auto left = static_cast<uint16_t>(half[word] / kLevels);
    codes[word] = static_cast<uint8_t>(half[word] - left * kLevels);
    half[word] = left;
  }
}

// Join the digits of each word: half <- the number that its codes make up.
template <int kLevels>
void join_digits(const uint8_t* codes, int64_t count, int64_t digits, uint16_t* half) {
  const int64_t lanes = whole_vectors(count);
  std::fill_n(half, lanes, uint16_t{0});
  for (int64_t digit = digits - 1; digit >= 0; --digit) join_digit<kLevels>(codes + digit * count, lanes, half);
}

// Take the numbers apart into digits again; half is used up.
template <int kLevels>
void part_digits(uint16_t* half, int64_t count, int64_t digits, uint8_t* codes) {
  const int64_t lanes = whole_vectors(count);
  for (int64_t digit = 0; digit < digits; ++digit) part_digit<kLevels>(half, lanes, codes + digit * count);
}

// Memory for any group's codes, and for its words and their parts.
template <int kLevels>
struct Buffers {
  std::vector<uint64_t> left;
  std::vector<uint16_t> first, second;
  std::vector<uint8_t> codes;

  explicit Buffers(const Groups& groups)
      : left(static_cast<size_t>(packing<kLevels>.words(groups.longest()))),
        first(static_cast<size_t>(whole_vectors(static_cast<int64_t>(left.size())))),
        second(first.size()),
        codes(left.size() * packing<kLevels>.per_word() + kVector) {}
};

// Pack codes into words.
template <int kLevels>
void pack(Buffers<kLevels>& buffers, int64_t count, uint64_t* words) {
  using H = Halves<kLevels>;
  constexpr Packing kPacking = packing<kLevels>;
  std::fill_n(words, count, uint64_t{0});
  for (int64_t i = kPacking.parts - 1; i >= 0; --i) {
    const uint8_t* codes = buffers.codes.data() + i * kPacking.digits * count;
    join_digits<kLevels>(codes, count, H::kFirst, buffers.first.data());
    join_digits<kLevels>(codes + H::kFirst * count, count, H::kSecond, buffers.second.data());
    for (int64_t word = 0; word < count; ++word) {
      words[word] = words[word] * kPacking.base + (buffers.second[word] * H::kBase + buffers.first[word]);
    }
  }
}

// Unpack words into codes.
template <int kLevels>
void unpack(const uint64_t* words, int64_t count, Buffers<kLevels>& buffers) {
  using H = Halves<kLevels>;
  constexpr Packing kPacking = packing<kLevels>;
  std::copy_n(words, count, buffers.left.data());
  for (int64_t i = 0; i < kPacking.parts; ++i) {
    for (int64_t word = 0; word < count; ++word) {
      const uint64_t left = buffers.left[word] / kPacking.base;
      const auto part = static_cast<uint32_t>(buffers.left[word] - left * kPacking.base);
      buffers.left[word] = left;
      const uint32_t second = part / H::kBase;
      buffers.second[word] = static_cast<uint16_t>(second);
      buffers.first[word] = static_cast<uint16_t>(part - second * H::kBase);
    }
    uint8_t* codes = buffers.codes.data() + i * kPacking.digits * count;
    part_digits<kLevels>(buffers.first.data(), count, H::kFirst, codes);
    part_digits<kLevels>(buffers.second.data(), count, H::kSecond, codes + H::kFirst * count);
  }
}

}  // namespace
}  // namespace gradcomp::cpu
