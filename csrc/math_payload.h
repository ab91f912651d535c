// The places of the arrays in the buffer of a payload (csrc/wire.md), in bytes.
#pragma once

#include <cstdint>

#include "math_blocks.h"
#include "math_packed.h"
#include "math_rounding.h"
#include "span.h"

namespace gradcomp {

// Every array, and every payload in a gathered buffer, begins at a multiple of this.
constexpr int64_t kAlignment = 8;
// The header, with which every payload begins: two int32.
constexpr int64_t kHeaderBytes = 8;

constexpr int64_t padded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The payload of up to `capacity` packed entries of n: header, blocks, entries.
struct PackedPayload {
  int64_t blocks, words;

  PackedPayload(int64_t n, int64_t capacity) : PackedPayload(Packed(n, capacity)) {}
  explicit PackedPayload(const Packed& form) : blocks(form.blocks()), words(form.words()) {}
  int64_t entries_at() const { return kHeaderBytes + padded(4 * blocks); }
  int64_t bytes() const { return entries_at() + padded(4 * words); }
};

// The payload of n rounded entries: header, all levels of each group, words.
struct LevelsPayload {
  int64_t levels, words;

  LevelsPayload(const Groups& groups, int64_t count)
      : levels(groups.count() * count), words(packing_of(count)->words(groups)) {}
  int64_t words_at() const { return kHeaderBytes + padded(4 * levels); }
  int64_t bytes() const { return words_at() + 8 * words; }
};

// What a take moves out of a residual, and the parts of its payload.
struct Taken {
  Span<float> values;
  Span<int32_t> indices, header;
  Span<uint32_t> blocks, entries;
};

// The thresholds of a bucket's layers, and what they follow from.
struct Bar {
  Span<const double> moments;
  Span<const int32_t> ends;
  Span<float> lam, thresholds;
  bool pooled;
  int64_t target;
};

// What this rank has sent, taken apart.
struct OwnPacked {
  Span<const uint32_t> blocks, entries;
  Span<const int32_t> header;
};
struct OwnLevels {
  Span<const float> levels;
  Span<const uint64_t> words;
};

// The payload of n entries in blocks: header, the blocks' words.
struct BlocksPayload {
  int64_t words;

  BlocksPayload(int64_t n, int64_t bits) : words(Blocks{n, bits}.words()) {}
  int64_t bytes() const { return kHeaderBytes + padded(4 * words); }
};

}  // namespace gradcomp
