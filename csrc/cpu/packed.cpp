// Packed sparse entries on CPUs: packing, adding up, and putting back.

#include <algorithm>

#include "../math_packed.h"
#include "../ops.h"
#include "entry_add.h"

namespace gradcomp::cpu {
namespace {

// Call use(i, index, value) for each of the payload's entries. Returns false if a use returned false, or if the payload is
// malformed. Arbitrary bytes never make it touch anything outside the arrays.
template <class Use>
bool for_entries(const Packed& form, Span<const uint32_t> blocks, Span<const uint32_t> entries, int32_t count, const Use& use) {
  if (count < 0) return false;
  const int64_t there = entries_there(count, form.capacity);
  int64_t at = 0;
  bool well_formed = true;
  for (int64_t b = 0; b < blocks.size; ++b) {
    const BlockWord word = read_block_word(blocks.data[b]);
    if (!word.sound || at + word.count > there) return false;
    const int64_t begin = form.highs_before(b) + at;
    const uint32_t highs = form.highs_in(b), length = highs + word.count;
    uint32_t found = 0;
    for (uint32_t seen = 0; seen < length; seen += 32) {
      uint32_t bits = bits_at(entries.data, begin + seen, static_cast<int>(std::min(32u, length - seen)));
      for (; bits != 0; bits &= bits - 1, ++found) {
        const uint32_t high = seen + static_cast<uint32_t>(__builtin_ctz(bits)) - found;
        if (found == word.count || high >= highs) return false;
        const uint32_t code = form.code_at(entries.data, at + found);
        well_formed &= use(at + found, form.index_of(b, high, code), form.value_of(code, word.exponent));
      }
    }
    if (found != word.count) return false;
    at += found;
  }
  return well_formed && at == there;
}

bool add_entries(Span<float> target, Span<uint8_t> marks, Span<const uint32_t> blocks, Span<const uint32_t> entries,
                 int64_t capacity, int32_t count, float scale) {
  return for_entries({target.size, capacity}, blocks, entries, count,
                     [&](int64_t, int64_t index, float x) { return add_at(target, marks, index, scale * x); });
}

void set_bits(uint32_t* row, int64_t at, uint32_t bits) {
  const uint64_t both = uint64_t{bits} << (at & 31);
  row[at >> 5] |= static_cast<uint32_t>(both);
  if (both >> 32 != 0) row[(at >> 5) + 1] |= static_cast<uint32_t>(both >> 32);
}

}  // namespace

void pack_sparse(OptionalSpan<float> residual, Span<const float> values, Span<const int32_t> indices,
                 Span<const int32_t> header, int64_t n, Span<uint32_t> blocks, Span<uint32_t> entries, Queue) {
  const Packed form(n, values.size);
  const int64_t there = entries_there(header.data[0], values.size);
  std::fill_n(entries.data, entries.size, 0u);
  int64_t at = 0;
  for (int64_t b = 0; b < blocks.size; ++b) {
    const int64_t begin = at;
    uint32_t largest = 0;
    for (; at < there && form.is_inside(indices.data[at]) && indices.data[at] >> kBlockBits == b; ++at) {
      largest = std::max(largest, magnitude_key(values.data[at]));
    }
    blocks.data[b] = at == begin ? 0 : block_word(static_cast<uint32_t>(at - begin), largest);
    const int exponent = read_block_word(blocks.data[b]).exponent;
    for (int64_t i = begin; i < at; ++i) {
      const auto index = static_cast<uint32_t>(indices.data[i]);
      const uint32_t code = form.code(values.data[i], index, exponent);
      set_bits(entries.data, (index >> form.low) + i, 1);
      set_bits(entries.data + form.high_words(), i * form.width(), code);
      if (residual.given()) residual.data[index] += values.data[i] - form.value_of(code, exponent);
    }
  }
}

void unpack_sparse(Span<float> values, Span<int32_t> indices, Span<int32_t> header, int64_t n, Span<const uint32_t> blocks,
                   Span<const uint32_t> entries, Queue) {
  const Packed form(n, values.size);
  const bool well_formed = for_entries(form, blocks, entries, header.data[0], [&](int64_t i, int64_t index, float x) {
    values.data[i] = x;
    indices.data[i] = static_cast<int32_t>(index);
    return index < n;
  });
  if (!well_formed) header.data[1] = 1;
}

void add_packed(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, int64_t capacity, float scale,
                Queue) {
  for (int rank = 0; rank < headers.count; ++rank) {
    const int32_t* header = headers.data[rank];
    const bool flagged = header[1] != 0;
    if (flagged || !add_entries(target, marks, blocks[rank], entries[rank], capacity, header[0], scale)) {
      spoil(target, marks);
    }
  }
}

void settle_packed(Span<float> residual, Span<const uint32_t> blocks, Span<const uint32_t> entries, Span<const int32_t> header,
                   Span<const float> update, int64_t capacity, float keep, Queue) {
  const float share = share_to_keep(update.data, keep);
  if (share != 0) add_entries(residual, {}, blocks, entries, capacity, header.data[0], share);
}

}  // namespace gradcomp::cpu
