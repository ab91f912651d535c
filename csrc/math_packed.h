// Packed entries of a payload (csrc/wire.md): places in the bits that they need, values as powers of two.
#pragma once

#include <cstdint>

#include "math.h"

namespace gradcomp {

// Blocks of the bucket; the last may be shorter. Each has a word with the number of its entries and the exponent of the
// largest.
constexpr int kBlockBits = 16;
constexpr uint32_t kBlockEntries = 1u << kBlockBits;
// The number of exponents of normal floats. A block word with this exponent or a larger one is unsound.
constexpr uint32_t kExponents = 254;
// A value's sign and power: 1 to 31 for 2^(exponent - 30) to 2^exponent, 0 for nothing.
constexpr int kPowerBits = 5, kValueBits = 1 + kPowerBits;
constexpr int kPowers = (1 << kPowerBits) - 1;

struct BlockWord {
  uint32_t count;
  int exponent;
  bool sound;
};

// The exponent of the power of two that is nearest to a finite magnitude. Below all normal numbers for one that is nearest to
// 0.
SHARED_MATH int nearest_exponent(uint32_t magnitude) {
  const int exponent = static_cast<int>((magnitude + 0x400000u) >> 23) - 127;
  return exponent > 127 ? 127 : exponent;
}

SHARED_MATH uint32_t block_word(uint32_t count, uint32_t largest_magnitude) {
  const int exponent = nearest_exponent(largest_magnitude);
  return count | static_cast<uint32_t>(exponent < -126 ? 0 : exponent + 126) << 24;
}

SHARED_MATH BlockWord read_block_word(uint32_t word) {
  const uint32_t count = word & 0xffffffu, exponent = word >> 24;
  return {count, static_cast<int>(exponent) - 126, count <= kBlockEntries && exponent < kExponents};
}

SHARED_MATH uint32_t value_code(float x, int exponent) {
  const int nearest = nearest_exponent(magnitude_key(x)), power = nearest - exponent + kPowers;
  return power < 1 || nearest < -126 ? 0 : static_cast<uint32_t>(power) | bits_of(x) >> 31 << kPowerBits;
}

SHARED_MATH float coded_value(uint32_t code, int exponent) {
  const int power = static_cast<int>(code & kPowers), own = exponent - kPowers + power;
  return power == 0 || own < -126 ? 0.0f : float_of(code >> kPowerBits << 31 | bits_of(power_of_two(own)));
}

// `count` bits, 1 to 32, from bit `at` on. The last of them must be in the row.
SHARED_MATH uint32_t bits_at(const uint32_t* row, int64_t at, int count) {
  const uint32_t* const word = row + (at >> 5);
  const int shift = static_cast<int>(at & 31);
  const uint64_t both = word[0] | (shift + count > 32 ? uint64_t{word[1]} << 32 : 0);
  return static_cast<uint32_t>(both >> shift & ((uint64_t{1} << count) - 1));
}

// The layout of up to `capacity` entries of n. A place's lowest bits travel with the value, in a row of codes. The high part
// that remains ascends: entry i sets bit high + i of a row before that one (Elias-Fano). The bits of a block's entries lie
// together: they begin at its first high part plus the number of entries before it.
struct Packed {
  int64_t n, capacity;
  int low;

  SHARED_MATH Packed(int64_t entries, int64_t space) : n(entries), capacity(space), low(0) {
    while (low < kBlockBits && capacity << (low + 1) <= n) ++low;
  }
  SHARED_MATH int width() const { return low + kValueBits; }
  SHARED_MATH int64_t blocks() const { return (n + kBlockEntries - 1) >> kBlockBits; }
  // The high parts that there are before a block, and in it.
  SHARED_MATH int64_t highs_before(int64_t block) const { return block << (kBlockBits - low); }
  SHARED_MATH uint32_t highs_in(int64_t block) const {
    const int64_t all = ((n - 1) >> low) + 1, next = highs_before(block + 1);
    return static_cast<uint32_t>((next < all ? next : all) - highs_before(block));
  }
  // Any other index is not packed.
  SHARED_MATH bool is_inside(int32_t index) const { return index >= 0 && index < n; }
  SHARED_MATH int64_t high_words() const { return (((n - 1) >> low) + 1 + capacity + 31) >> 5; }
  SHARED_MATH int64_t words() const { return high_words() + ((capacity * width() + 31) >> 5); }

  SHARED_MATH uint32_t code(float x, uint32_t index, int exponent) const {
    return value_code(x, exponent) << low | (index & ((1u << low) - 1));
  }
  SHARED_MATH uint32_t code_at(const uint32_t* entries, int64_t i) const {
    return bits_at(entries + high_words(), i * width(), width());
  }
  SHARED_MATH int64_t index_of(int64_t block, uint32_t high_in_block, uint32_t code) const {
    return block << kBlockBits | int64_t{high_in_block} << low | (code & ((1u << low) - 1));
  }
  SHARED_MATH float value_of(uint32_t code, int exponent) const { return coded_value(code >> low, exponent); }
};

}  // namespace gradcomp
