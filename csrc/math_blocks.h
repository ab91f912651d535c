// Blocks of entries that share a budget of bits: groups of 32 with a scale each, and wider codes where the scale is larger.
#pragma once

#include <cstdint>

#include "math.h"

namespace gradcomp {

// Bits of an entry's code: at least, and at most.
constexpr int kNarrowest = 2, kWidest = 8;

// n entries in blocks. A block's words: its first word, a byte for each group, and `bits` words for each group, on average.
struct Blocks {
  static constexpr int64_t kGroup = 32, kGroups = 128, kEntries = kGroup * kGroups;

  int64_t n, bits;

  SHARED_MATH int64_t count() const { return (n + kEntries - 1) / kEntries; }
  SHARED_MATH int64_t begin(int64_t block) const { return block * kEntries; }
  SHARED_MATH int64_t entries(int64_t block) const { return block + 1 < count() ? kEntries : n - begin(block); }
  static SHARED_MATH int64_t groups_of(int64_t entries) { return (entries + kGroup - 1) / kGroup; }
  static SHARED_MATH int64_t codes_at(int64_t groups) { return 1 + (groups + 3) / 4; }
  SHARED_MATH int64_t budget(int64_t groups) const { return groups * bits; }
  SHARED_MATH int64_t words_of(int64_t groups) const { return codes_at(groups) + budget(groups); }
  SHARED_MATH int64_t at(int64_t block) const { return block * words_of(kGroups); }
  SHARED_MATH int64_t words() const { return at(count() - 1) + words_of(groups_of(entries(count() - 1))); }
};

// A scale is a float's exponent and three bits of its mantissa. These are the scale of an entry that is not finite; the largest
// one, of which twice as much is finite: sums of shares are rounded up, and then divided by up to one half; and the least one.
// Larger entries go to the nearest level, smaller ones stay in the residual.
constexpr uint32_t kInfiniteScale = 0x7f8, kLargestScale = 0x7ef, kLeastScale = 16 << 3;

// The least scale that is not below a magnitude, or the largest scale there is.
SHARED_MATH uint32_t scale_above(uint32_t magnitude) {
  const uint32_t scale = (magnitude + 0xfffff) >> 20;
  return magnitude >= 0x7f800000u ? kInfiniteScale : scale > kLargestScale ? kLargestScale : scale;
}
SHARED_MATH float scale_value(uint32_t scale) { return float_of(scale << 20); }

// A group's depth is the number of scales by which its own lies below the largest one of the block. kConstant: all entries are
// equal, and one word is their value. kEmpty: no entry is sent.
constexpr int kMostDepth = 253, kConstant = 254, kEmpty = 255;

// The depth of a group by its scale and that of the block.
SHARED_MATH int depth_of(uint32_t scale, uint32_t top) {
  const uint32_t depth = top - scale;
  return scale < kLeastScale || depth > kMostDepth ? kEmpty : static_cast<int>(depth);
}

// The bits of a group's codes, and so its words. A group has one bit less for two octaves less of scale: this halves an error
// relative to the group where it quarters the absolute error. All groups are as wide as they are high above the bottom.
SHARED_MATH int scaled_width(int height, int depth) {
  const int width = (height - depth) >> 4;
  return width < kNarrowest ? kNarrowest : width > kWidest ? kWidest : width;
}
SHARED_MATH int width_of(int height, int depth) { return depth >= kConstant ? kEmpty - depth : scaled_width(height, depth); }

// Find the largest height at which the groups' words are within the budget. words_at(height) counts them.
constexpr int kHighest = kWidest * 16 + kMostDepth;
template <class WordsAt>
SHARED_MATH int height_within(int64_t budget, const WordsAt& words_at) {
  int height = 0;
  for (int step = 256; step > 0; step /= 2) {
    if (height + step <= kHighest && words_at(height + step) <= budget) height += step;
  }
  return height;
}

// A block's first word: its largest scale, and its height.
SHARED_MATH uint32_t block_head(uint32_t top, int height) { return top | static_cast<uint32_t>(height) << 16; }
SHARED_MATH uint32_t top_of(uint32_t head) { return head & 0xffff; }
SHARED_MATH int height_of(uint32_t head) { return static_cast<int>(head >> 16); }

// The even levels of a group: steps from -top to top times the step. A code is the number of a level.
struct EvenLevels {
  int top;
  float step, per_step;

  SHARED_MATH EvenLevels(uint32_t scale, int width)
      : top((1 << (width - 1)) - 1),
        step(scale_value(scale) / static_cast<float>(top)),
        per_step(static_cast<float>(top) / scale_value(scale)) {}
};

// Added to a small number, this rounds it to an integer, ties to even, which is in the lowest bits of the sum.
constexpr float kRounding = 0x1.8p23f;

}  // namespace gradcomp
