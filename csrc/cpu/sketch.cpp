// Count sketches on CPUs: a block of entries at a time, which stays in the cache while each row in turn takes it up. Bytes: 4
// an entry; the table's cells come from the second cache, 64 bytes at a time.

#include "../sketch.h"

#include "../check.h"
#include "../ops.h"
#include "select.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between functions of this file only

namespace gradcomp::cpu {
namespace {

constexpr int64_t kBlockTiles = 64;
constexpr int64_t kSketchBlock = kBlockTiles * kLanes;
constexpr int64_t kMostRows = 9;

// Half a tile.
using Floats = float __attribute__((vector_size(32), aligned(4), may_alias));
using Words = uint32_t __attribute__((vector_size(32), may_alias));
using Unaligned = uint32_t __attribute__((vector_size(32), aligned(4), may_alias));

#define INLINE inline __attribute__((always_inline))

INLINE Floats exchange(const Floats& x, const Words& lanes) {
#ifdef __clang__
  Floats y;
  for (int i = 0; i < 8; ++i) y[i] = x[lanes[i]];
  return y;
#else
  return __builtin_shuffle(x, lanes);
#endif
}

// The signs of eight lanes: the lowest bits, or for the upper half of a tile the next eight.
INLINE Floats with_signs(const Floats& x, const Words& bits, bool upper) {
  const Words shifts = upper ? Words{23, 22, 21, 20, 19, 18, 17, 16} : Words{31, 30, 29, 28, 27, 26, 25, 24};
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ (bits << shifts & 0x80000000u));
}

// Lane i of the lower or upper half of a tile comes from lane i ^ flip.
alignas(32) constexpr uint32_t kFlipped[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5},
                                                 {3, 2, 1, 0, 7, 6, 5, 4}, {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2},
                                                 {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};

// Where a block's tiles lie in a row, and how they are turned. Columns are written eight at a time.
struct Places {
  uint32_t columns[kBlockTiles + 8];
  uint32_t turns[kBlockTiles], halves[kBlockTiles], flips[kBlockTiles];
};

// numbers[i] <- (first + i * step) mod tiles, of numbers below tiles.
HOT void step_along(uint32_t first, uint32_t step, uint32_t tiles, int64_t count, uint32_t* numbers) {
  Words eight;
  uint32_t ninth = first;
  for (int i = 0; i < 8; ++i) {
    eight[i] = ninth;
    ninth += step;
    ninth = std::min(ninth, ninth - tiles);  // which is huge where it would be negative
  }
  const uint32_t apart = ninth >= first ? ninth - first : ninth - first + tiles;
  for (int64_t i = 0; i < count; i += 8) {
    *reinterpret_cast<Unaligned*>(numbers + i) = eight;
    eight += apart;
    const Words less = eight - tiles;
    eight = less < eight ? less : eight;
  }
}

HOT void turn_tiles(uint32_t turns, uint32_t first, int64_t count, Places& places) {
  for (int64_t i = 0; i < count; ++i) {
    const Turn turn = SketchHash::turn(turns, first + static_cast<uint32_t>(i));
    places.turns[i] = turn.bits;
    places.halves[i] = turn.flip() & 8;
    places.flips[i] = turn.flip() & 7;
  }
}

// A walk through the tiles of one row.
class Walk {
 public:
  Walk(const SketchHash& hash, int64_t row, int64_t first)
      : hash_(&hash), row_(static_cast<uint32_t>(row)), turns_(hash.turns_of(row_)), tile_(static_cast<uint32_t>(first)) {
    enter(tile_ / hash.tiles, tile_ % hash.tiles);
  }

  // The next tiles, at most a block of them.
  void next(int64_t count, Places& places) {
    turn_tiles(turns_, tile_, count, places);
    tile_ += static_cast<uint32_t>(count);
    for (int64_t i = 0; i < count;) {
      const int64_t here = std::min<int64_t>(count - i, hash_->tiles - inside_);
      step_along(column_, deal_.step, hash_->tiles, here + 1, places.columns + i);
      i += here;
      inside_ += static_cast<uint32_t>(here);
      if (inside_ == hash_->tiles) {
        enter(round_ + 1, 0);
      } else {
        column_ = places.columns[i];
      }
    }
  }

 private:
  void enter(uint32_t round, uint32_t inside) {
    round_ = round;
    inside_ = inside;
    deal_ = hash_->deal(row_, round);
    column_ = static_cast<uint32_t>((uint64_t{deal_.step} * inside + deal_.first) % hash_->tiles);
  }

  const SketchHash* hash_;
  uint32_t row_, turns_, tile_, round_ = 0, inside_ = 0, column_ = 0;
  Deal deal_{};
};

HOT void add_tiles(const float* x, int64_t count, const Places& places, float* row) {
  for (int64_t i = 0; i < count; ++i) {
    const Words bits = Words{} + places.turns[i], lanes = *reinterpret_cast<const Words*>(kFlipped[places.flips[i]]);
    const uint32_t half = places.halves[i];
    const float* from = x + i * kLanes;
    float* to = row + int64_t{places.columns[i]} * kLanes;
    const Floats low = *reinterpret_cast<const Floats*>(from + half),
                 high = *reinterpret_cast<const Floats*>(from + (half ^ 8));
    *reinterpret_cast<Floats*>(to) += with_signs(exchange(low, lanes), bits, false);
    *reinterpret_cast<Floats*>(to + 8) += with_signs(exchange(high, lanes), bits, true);
  }
}

HOT void read_tiles(const float* row, int64_t count, const Places& places, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    const Words bits = Words{} + places.turns[i], lanes = *reinterpret_cast<const Words*>(kFlipped[places.flips[i]]);
    const uint32_t half = places.halves[i];
    const float* from = row + int64_t{places.columns[i]} * kLanes;
    float* to = x + i * kLanes;
    const Floats low = *reinterpret_cast<const Floats*>(from), high = *reinterpret_cast<const Floats*>(from + 8);
    *reinterpret_cast<Floats*>(to + half) = exchange(with_signs(low, bits, false), lanes);
    *reinterpret_cast<Floats*>(to + (half ^ 8)) = exchange(with_signs(high, bits, true), lanes);
  }
}

INLINE void order(Floats& a, Floats& b) {
  const Floats low = a < b ? a : b;
  b = a < b ? b : a;
  a = low;
}

// The middle one of kRows numbers, an odd number of them: sorted just as far as is needed for that.
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

std::vector<Walk> walks(const SketchHash& hash, int64_t row, int64_t last_row, int64_t first_tile) {
  std::vector<Walk> found;
  for (; row < last_row; ++row) found.emplace_back(hash, row, first_tile);
  return found;
}

// The estimates of a sketch's entries, from one on.
class Estimates {
 public:
  Estimates(Span<const float> table, int64_t rows, const SketchHash& hash, int64_t begin)
      : table_(table.data), columns_(table.size / rows), walks_(walks(hash, 0, rows, begin / kLanes)) {}

  // Those of the next tiles, at most a block of them.
  void next(int64_t count, float* to) {
    const auto rows = static_cast<int64_t>(walks_.size());
    for (int64_t row = 0; row < rows; ++row) {
      walks_[static_cast<size_t>(row)].next(count, places_);
      read_tiles(table_ + row * columns_, count, places_, read_ + row * kSketchBlock);
    }
    medians_of(rows, read_, count * kLanes, to);
  }

 private:
  const float* table_;
  int64_t columns_;
  std::vector<Walk> walks_;
  Places places_;
  float read_[kMostRows * kSketchBlock];
};

}  // namespace

void sketch(Span<const float> value, int64_t rows, int64_t seed, Span<float> table, Queue queue) {
  const int64_t n = value.size, columns = table.size / rows, whole = n / kLanes;
  const SketchHash hash(columns, seed);
  std::fill_n(table.data, table.size, 0.0f);
  float last[kLanes] = {};
  std::copy(value.data + whole * kLanes, value.data + n, last);
  const auto work = [&](int64_t row, int64_t last_row) {
    std::vector<Walk> through = walks(hash, row, last_row, 0);
    Places places;
    const auto add = [&](const float* x, int64_t count) {
      for (size_t i = 0; i < through.size(); ++i) {
        through[i].next(count, places);
        add_tiles(x, count, places, table.data + (row + static_cast<int64_t>(i)) * columns);
      }
    };
    for (int64_t tile = 0; tile < whole; tile += kBlockTiles) {
      add(value.data + tile * kLanes, std::min(kBlockTiles, whole - tile));
    }
    if (whole * kLanes < n) add(last, 1);
  };
  // A thread has rows of its own.
  const int count = std::min(parts(n, queue.threads), static_cast<int>(rows));
  std::vector<std::thread> threads;
  for (int part = 1; part < count; ++part) threads.emplace_back(work, rows * part / count, rows * (part + 1) / count);
  work(0, rows / count);
  for (std::thread& thread : threads) thread.join();
}

int64_t heaviest_scratch(int64_t n, int64_t k) { return select_words(n, k); }

void heaviest(Span<const float> table, int64_t rows, int64_t seed, int64_t n, Span<int32_t> indices, Span<float> estimates,
              Span<uint32_t> scratch, Queue queue) {
  const int64_t k = indices.size, words = heaviest_scratch(n, k);
  EXPECTS(scratch.size >= words, "heaviest: scratch has ", scratch.size, " words; ", words, " are needed");
  const int64_t columns = table.size / rows;
  const SketchHash hash(columns, seed);
  const auto sample = [&](int64_t entry, float* to) { Estimates(table, rows, hash, entry).next(1, to); };
  const auto look = [&](Shortlist& shortlist, int64_t begin, int64_t end, int32_t bar) {
    Estimates estimates_from(table, rows, hash, begin);
    uint8_t marks[kSketchBlock / kLine];
    float block[kSketchBlock];
    for (int64_t at = begin; at < end; at += kSketchBlock) {
      const int64_t to = std::min(at + kSketchBlock, end), lines = (to - at) / kLine;
      estimates_from.next((to - at + kLanes - 1) / kLanes, block);
      mark_lines(block, lines, 0.0f, shortlist.least(bar), marks);
      if (at + lines * kLine < to) marks[lines] = 1;
      shortlist.look_at(marks, block, at, at, to, 0.0f, bar);
    }
  };
  select_largest(n, k, scratch, queue.threads, sample, look);
  const Candidates list = candidates(scratch);
  std::copy_n(list.places, k, indices.data);
  std::copy_n(list.apart, k, estimates.data);
}

}  // namespace gradcomp::cpu
