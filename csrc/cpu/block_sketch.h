// A walk through the tiles of a sketch's rows on CPUs: each tile's place among the columns, and its turn.
#pragma once

#include <algorithm>
#include <vector>

#include "../math_sketch.h"
#include "lane_hot.h"
#include "lane_vectors.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

constexpr int64_t kBlockTiles = 64;
constexpr int64_t kSketchBlock = kBlockTiles * kSketchTile;

// Permute half a tile: lane i comes from lane i ^ flip. The flip is the lowest three bits of a turn; the others are ignored.
INLINE Floats exchange(const Floats& x, const Words& bits) { return chosen(x, bits ^ kLanes); }

// Apply the signs of eight lanes: the highest bits, or for the upper half of a tile the next eight.
INLINE Floats with_signs(const Floats& x, const Words& bits, bool upper) {
  const Words shifts = upper ? kLanes + 8 : kLanes;
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ (bits << shifts & 0x80000000u));
}

// The columns and turns of a block's tiles in one row. Columns are written eight at a time, hence the spare ones.
struct Places {
  uint32_t columns[kBlockTiles + 8] = {};
  uint32_t turns[kBlockTiles];
};

// Prefetch the columns of a later tile; behind the last tile, of any.
INLINE void fetch_ahead(const float* row, const Places& places, int64_t i) {
  constexpr int64_t kAhead = 5;
  __builtin_prefetch(row + int64_t{places.columns[i + kAhead]} * kSketchTile);
}

// numbers[i] <- (first + i * step) mod tiles; first and step are below tiles.
HOT void step_along(uint32_t first, uint32_t step, uint32_t tiles, int64_t count, uint32_t* numbers) {
  Words eight;
  uint32_t ninth = first;
  for (int i = 0; i < 8; ++i) {
    eight[i] = ninth;
    ninth += step;
    ninth = std::min(ninth, ninth - tiles);  // a negative difference wraps to a huge number
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
  for (int64_t i = 0; i < count; ++i) places.turns[i] = SketchHash::turn(turns, first + static_cast<uint32_t>(i)).bits;
}

// A walk through the tiles of one row.
class Walk {
 public:
  Walk(const SketchHash& hash, int64_t row, int64_t first)
      : hash_(&hash), row_(static_cast<uint32_t>(row)), turns_(hash.turns_of(row_)), tile_(static_cast<uint32_t>(first)) {
    enter(tile_ / hash.tiles, tile_ % hash.tiles);
  }

  // Find the places of the next tiles, at most a block of them.
  void next(int64_t count, Places& places) {
    turn_tiles(turns_, tile_, count, places);
    tile_ += static_cast<uint32_t>(count);
    for (int64_t i = 0; i < count;) {
      const int64_t here = std::min<int64_t>(count - i, hash_->tiles - inside_);
      step_along(column_, deal_.step.number, hash_->tiles, here + 1, places.columns + i);
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
    column_ = deal_.column_tile(inside, hash_->tiles);
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
