// A walk through the tiles of a sketch's rows on CPUs: where each lies among the columns, and how it is turned.
#pragma once

#include <algorithm>
#include <vector>

#include "../sketch.h"
#include "parallel.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between functions of one file only

namespace gradcomp::cpu {
namespace {

constexpr int64_t kBlockTiles = 64;
constexpr int64_t kSketchBlock = kBlockTiles * kSketchTile;

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

// A walk through each row from row to last_row.
inline std::vector<Walk> walks(const SketchHash& hash, int64_t row, int64_t last_row, int64_t first_tile) {
  std::vector<Walk> found;
  for (; row < last_row; ++row) found.emplace_back(hash, row, first_tile);
  return found;
}

}  // namespace
}  // namespace gradcomp::cpu
