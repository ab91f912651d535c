// Packed sparse entries on CPUs: packing, adding up, and putting back.

#include <algorithm>
#include <vector>

#include "../math_packed.h"
#include "../ops.h"
#include "entry_add.h"

namespace gradcomp::cpu {
namespace {

// A payload's entries, read block after block. Arbitrary bytes never make it touch anything outside the arrays.
class Reader {
 public:
  Reader(const Packed& form, Span<const uint32_t> blocks, Span<const uint32_t> entries, int32_t count)
      : form_(form), blocks_(blocks), entries_(entries), there_(count < 0 ? 0 : entries_there(count, form.capacity)) {
    sound_ = count >= 0;
  }

  // Call use(i, index, value) for each entry of the next block. Nothing is read any more after bits that are malformed.
  template <class Use>
  void read(int64_t b, const Use& use) {
    sound_ = sound_ && read_block(b, use);
  }
  // Returns false if a use returned false, or if the payload is malformed. Call it after all blocks.
  bool well_formed() const { return sound_ && used_ && at_ == there_; }

 private:
  template <class Use>
  bool read_block(int64_t b, const Use& use) {
    const BlockWord word = read_block_word(blocks_.data[b]);
    if (!word.sound || at_ + word.count > there_) return false;
    const int64_t begin = form_.highs_before(b) + at_;
    const uint32_t highs = form_.highs_in(b), length = highs + word.count;
    uint32_t found = 0;
    for (uint32_t seen = 0; seen < length; seen += 32) {
      uint32_t bits = bits_at(entries_.data, begin + seen, static_cast<int>(std::min(32u, length - seen)));
      for (; bits != 0; bits &= bits - 1, ++found) {
        const uint32_t high = seen + static_cast<uint32_t>(__builtin_ctz(bits)) - found;
        if (found == word.count || high >= highs) return false;
        const uint32_t code = form_.code_at(entries_.data, at_ + found);
        used_ &= use(at_ + found, form_.index_of(b, high, code), form_.value_of(code, word.exponent));
      }
    }
    if (found != word.count) return false;
    at_ += found;
    return true;
  }

  Packed form_;
  Span<const uint32_t> blocks_, entries_;
  int64_t there_, at_ = 0;
  bool sound_, used_ = true;
};

// Call use(i, index, value) for each of the payload's entries. Returns false if a use did, or if the payload is malformed.
template <class Use>
bool for_entries(const Packed& form, Span<const uint32_t> blocks, Span<const uint32_t> entries, int32_t count, const Use& use) {
  Reader reader(form, blocks, entries, count);
  for (int64_t b = 0; b < blocks.size; ++b) reader.read(b, use);
  return reader.well_formed();
}

// Adds entries some later than they come, when their cache lines have been fetched: what is read and added at once waits for
// each line in turn.
class Adder {
 public:
  Adder(Span<float> target, Span<uint8_t> marks, float scale) : target_(target), marks_(marks), scale_(scale) {}

  // Add an entry. Returns false if there is no such entry in the target.
  bool add(int64_t index, float x) {
    if (index < 0 || index >= target_.size) return false;
    __builtin_prefetch(target_.data + index, 1);
    places_[count_] = index;
    entries_[count_] = scale_ * x;
    if (++count_ == kLate) finish();
    return true;
  }
  // Add what came and was not added yet.
  void finish() {
    for (int i = 0; i < count_; ++i) add_at(target_, marks_, places_[i], entries_[i]);
    count_ = 0;
  }

 private:
  static constexpr int kLate = 64;

  Span<float> target_;
  Span<uint8_t> marks_;
  float scale_;
  int count_ = 0;
  int64_t places_[kLate];
  float entries_[kLate];
};

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

// All ranks add to a block, which stays in the cache, before the next one.
void add_packed(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, int64_t capacity, float scale,
                Queue) {
  std::vector<Reader> readers;
  readers.reserve(static_cast<size_t>(headers.count));
  for (int rank = 0; rank < headers.count; ++rank) {
    const int32_t* header = headers.data[rank];
    if (header[1] == 0) readers.emplace_back(Packed(target.size, capacity), blocks[rank], entries[rank], header[0]);
  }
  bool well_formed = readers.size() == static_cast<size_t>(headers.count);
  Adder adder(target, marks, scale);
  for (int64_t b = 0; b < blocks.size; ++b) {
    for (Reader& reader : readers) {
      reader.read(b, [&](int64_t, int64_t index, float x) { return adder.add(index, x); });
    }
  }
  adder.finish();
  for (const Reader& reader : readers) well_formed &= reader.well_formed();
  if (!well_formed) spoil(target, marks);
}

void settle_packed(Span<float> residual, Span<const uint32_t> blocks, Span<const uint32_t> entries, Span<const int32_t> header,
                   Span<const float> update, int64_t capacity, float keep, Queue) {
  const float share = share_to_keep(update.data, keep);
  if (share == 0) return;
  for_entries({residual.size, capacity}, blocks, entries, header.data[0],
              [&](int64_t, int64_t index, float x) { return add_at(residual, {}, index, share * x); });
}

}  // namespace gradcomp::cpu
