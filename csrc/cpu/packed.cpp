// Sparse entries in 32 bits, on CPUs: packing, adding up, and putting back.

#include <algorithm>

#include "../math.h"
#include "../ops.h"
#include "entry_add.h"

namespace gradcomp::cpu {
namespace {

// Call use(i, index, value) for each of the payload's entries. Returns false if a use returned false, or if the payload is
// malformed. Arbitrary bytes never make it touch anything outside the arrays.
template <class Use>
bool for_entries(Span<const uint32_t> blocks, Span<const uint32_t> entries, int32_t count, const Use& use) {
  if (count < 0) return false;
  const int64_t there = entries_there(count, entries.size);
  int64_t at = 0;
  bool well_formed = true;
  for (int64_t b = 0; b < blocks.size; ++b) {
    const BlockWord word = read_block_word(blocks.data[b]);
    if (!word.sound || at + word.count > there) return false;
    for (const int64_t stop = at + word.count; at < stop; ++at) {
      const int64_t index = b << kBlockBits | (entries.data[at] & (kBlockEntries - 1));
      well_formed &= use(at, index, entry_value(entries.data[at], word.exponent));
    }
  }
  return well_formed && at == there;
}

bool add_entries(Span<float> target, Span<uint8_t> marks, Span<const uint32_t> blocks, Span<const uint32_t> entries,
                 int32_t count, float scale) {
  return for_entries(blocks, entries, count,
                     [&](int64_t, int64_t index, float x) { return add_at(target, marks, index, scale * x); });
}

}  // namespace

void pack_sparse(OptionalSpan<float> residual, Span<const float> values, Span<const int32_t> indices,
                 Span<const int32_t> header, Span<uint32_t> blocks, Span<uint32_t> entries, Queue) {
  const int64_t there = entries_there(header.data[0], values.size);
  int64_t at = 0;
  for (int64_t b = 0; b < blocks.size; ++b) {
    const int64_t begin = at;
    uint32_t largest = 0;
    for (; at < there && indices.data[at] >> kBlockBits == b; ++at) {
      largest = std::max(largest, magnitude_key(values.data[at]));
    }
    blocks.data[b] = at == begin ? 0 : block_word(static_cast<uint32_t>(at - begin), largest);
    const int exponent = exponent_of(largest);
    for (int64_t i = begin; i < at; ++i) {
      const auto index = static_cast<uint32_t>(indices.data[i]);
      entries.data[i] = pack_entry(values.data[i], exponent, index);
      if (residual.given()) residual.data[index] += values.data[i] - entry_value(entries.data[i], exponent);
    }
  }
}

void unpack_sparse(Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<const uint32_t> blocks,
                   Span<const uint32_t> entries, Queue) {
  const bool well_formed = for_entries(blocks, entries, header.data[0], [&](int64_t i, int64_t index, float x) {
    values.data[i] = x;
    indices.data[i] = static_cast<int32_t>(index);
    return true;
  });
  if (!well_formed) header.data[1] = 1;
}

void add_packed(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, float scale, Queue) {
  for (int rank = 0; rank < headers.count; ++rank) {
    const int32_t* header = headers.data[rank];
    const bool flagged = header[1] != 0;
    if (flagged || !add_entries(target, marks, blocks[rank], entries[rank], header[0], scale)) spoil(target, marks);
  }
}

void settle_packed(Span<float> residual, Span<const uint32_t> blocks, Span<const uint32_t> entries, Span<const int32_t> header,
                   Span<const float> update, float keep, Queue) {
  const float share = share_to_keep(update.data, keep);
  if (share != 0) add_entries(residual, {}, blocks, entries, header.data[0], share);
}

}  // namespace gradcomp::cpu
