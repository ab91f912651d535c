// The heaviest entries of a count sketch, on CPUs. A shortlist takes candidates from the estimates, block by block. The kernel
// reads 4 bytes of the table for each entry and row, from the second cache.

#include "../ops.h"
#include "block_sketch.h"
#include "bucket_select.h"

namespace gradcomp::cpu {
namespace {

constexpr int64_t kMostRows = 9;

HOT void read_tiles(const float* row, int64_t count, const Places& places, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    fetch_ahead(row, places, i);
    const Words bits = Words{} + places.turns[i];
    const uint32_t half = places.turns[i] & 8;
    const float* from = row + int64_t{places.columns[i]} * kSketchTile;
    float* to = x + i * kSketchTile;
    const Floats low = *reinterpret_cast<const Floats*>(from), high = *reinterpret_cast<const Floats*>(from + 8);
    *reinterpret_cast<Floats*>(to + half) = exchange(with_signs(low, bits, false), bits);
    *reinterpret_cast<Floats*>(to + (half ^ 8)) = exchange(with_signs(high, bits, true), bits);
  }
}

INLINE void order(Floats& a, Floats& b) {
  const Floats low = a < b ? a : b;
  b = a < b ? b : a;
  a = low;
}

// Find the median of an odd number of numbers. They are sorted just as far as that needs.
template <int kRows>
INLINE Floats median_of(Floats* x) {
  for (int i = 0; i <= kRows / 2; ++i) {
    for (int j = kRows - 1; j > i; --j) order(x[j - 1], x[j]);
  }
  return x[kRows / 2];
}

template <int kRows>
INLINE void medians(const float* rows, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 8) {
    Floats x[kRows];
    for (int row = 0; row < kRows; ++row) x[row] = *reinterpret_cast<const Floats*>(rows + row * kSketchBlock + i);
    *reinterpret_cast<Floats*>(to + i) = median_of<kRows>(x);
  }
}

HOT void medians_of(int64_t rows, const float* read, int64_t count, float* to) {
  switch (rows) {
    case 3:
      return medians<3>(read, count, to);
    case 5:
      return medians<5>(read, count, to);
    case 7:
      return medians<7>(read, count, to);
    default:
      return medians<9>(read, count, to);
  }
}

// The estimates of a sketch's entries. Those that follow the last ones cost least.
class Estimates {
 public:
  Estimates(Span<const float> table, int64_t rows, const SketchHash& hash)
      : table_(table.data), rows_(rows), columns_(table.size / rows), hash_(hash) {}

  // Estimate the entries of some tiles, at most a block of them.
  void estimate(int64_t tile, int64_t count, float* to) {
    if (tile != next_) walks_ = walks(hash_, 0, rows_, tile);
    next_ = tile + count;
    const int64_t rows = rows_;
    for (int64_t row = 0; row < rows; ++row) {
      walks_[static_cast<size_t>(row)].next(count, places_);
      read_tiles(table_ + row * columns_, count, places_, read_ + row * kSketchBlock);
    }
    medians_of(rows, read_, count * kSketchTile, to);
  }

 private:
  const float* table_;
  int64_t rows_, columns_, next_ = -1;
  const SketchHash& hash_;
  std::vector<Walk> walks_;
  Places places_;
  float read_[kMostRows * kSketchBlock];
};

}  // namespace

int64_t heaviest_scratch(int64_t n, int64_t search_size) { return select_words(n, search_size); }

void heaviest(Span<const float> table, int64_t rows, int64_t seed, int64_t n, int64_t part, int64_t parts,
              Span<int32_t> indices, Span<float> estimates, Span<uint32_t> scratch, Queue queue) {
  static_assert(SketchPart::kBlock == kSketchBlock);
  const int64_t k = indices.size;
  const int64_t columns = table.size / rows;
  const SketchHash hash(columns, seed);
  const SketchPart own = {part, parts};
  const auto sample = [&](int64_t entry, float* to) {
    Estimates(table, rows, hash).estimate(own.entry(static_cast<uint32_t>(entry)) / kSketchTile, 1, to);
  };
  const auto look = [&](Shortlist& shortlist, int64_t begin, int64_t end, int32_t bar) {
    Estimates estimates_of(table, rows, hash);
    uint8_t marks[kSketchBlock / kLine];
    float block[kSketchBlock];
    for (int64_t at = begin, to; at < end; at = to) {
      to = std::min((at / kSketchBlock + 1) * kSketchBlock, end);
      const int64_t lines = (to - at) / kLine;
      estimates_of.estimate(own.entry(static_cast<uint32_t>(at)) / kSketchTile, (to - at + kSketchTile - 1) / kSketchTile,
                            block);
      mark_lines(block, lines, shortlist.least(bar), marks);
      if (at + lines * kLine < to) marks[lines] = 1;
      shortlist.look_at(marks, block, at, at, to, bar);
    }
  };
  select_largest(own.size(n), k, scratch, queue.threads, sample, look);
  const Candidates list = candidates(scratch);
  for (int64_t i = 0; i < k; ++i) indices.data[i] = static_cast<int32_t>(own.entry(list.places[i]));
  std::copy_n(list.entries, k, estimates.data);
}

}  // namespace gradcomp::cpu
