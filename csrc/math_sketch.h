// The hash of a count sketch: each entry's cell and sign in each row.
//
// Entries and columns come in tiles of 16, so that every access is a vector access. A round is as many tiles of entries as a
// row has tiles of columns. Each round has a permutation, x -> step * x + first modulo the number of tiles, which gives every
// tile of columns one tile of entries. The map works in both directions, so that a table can be summed in the order of the
// entries and without atomics. Inside a tile, lanes are XORed with four hashed bits, and each entry has a hashed sign.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>

#include "math.h"

namespace gradcomp {

// Entries, or columns, of a tile.
constexpr int64_t kSketchTile = 16;

// A part of the entries, for a search that several ranks divide: every parts-th block, from block number part on. Blocks of all
// layers are spread over the parts. A part's entries are counted through, which keeps their order.
struct SketchPart {
  static constexpr uint32_t kBlock = 1024;

  uint32_t part, parts;

  SketchPart(int64_t part_, int64_t parts_) : part(static_cast<uint32_t>(part_)), parts(static_cast<uint32_t>(parts_)) {}

  int64_t size(int64_t n) const {
    const int64_t blocks = n / kBlock, own = (blocks + parts - 1 - part) / parts;
    return own * kBlock + (blocks % parts == part ? n % kBlock : 0);
  }
  // Entries are fewer than 2^31.
  SHARED_MATH uint32_t entry(uint32_t own) const { return (own / kBlock * parts + part) * kBlock + own % kBlock; }
};

// The number of entries that heaviest gets scratch for: those that it finds, or a 64th of the cells if that is more.
inline int64_t search_size(int64_t k, int64_t cells) { return cells / 64 < k ? k : (cells + 63) / 64; }

// A number below a modulus, to multiply by without a division: `over` is the number times 2^32 over the modulus, rounded down.
struct Multiplier {
  uint32_t number, over;

  Multiplier() = default;
  Multiplier(uint32_t number_, uint32_t modulus)
      : number(number_), over(static_cast<uint32_t>((uint64_t{number_} << 32) / modulus)) {}

  // The quotient found is the true one, or one less. The modulus is below 2^31.
  SHARED_MATH uint32_t times(uint32_t x, uint32_t modulus) const {
    const uint32_t left = number * x - static_cast<uint32_t>(uint64_t{over} * x >> 32) * modulus;
    return left >= modulus ? left - modulus : left;
  }
};

// The permutation of a round.
struct Deal {
  Multiplier step, inverse;  // inverse undoes the step
  uint32_t first;

  // The tile of columns that tile `place` of the round goes to, and the way back.
  SHARED_MATH uint32_t column_tile(uint32_t place, uint32_t tiles) const {
    const uint32_t far = step.times(place, tiles) + first;
    return far >= tiles ? far - tiles : far;
  }
  SHARED_MATH uint32_t place(uint32_t column_tile, uint32_t tiles) const {
    return inverse.times(column_tile - first + (column_tile < first ? tiles : 0), tiles);
  }
};

// The lanes and signs of a tile in one row. Entry lane `lane` goes to column lane `lane ^ flip`. The sign belongs to the column
// lane. The flip is the lowest four bits. The signs are the highest bits, from the first lane on, which takes the fewest
// instructions.
struct Turn {
  uint32_t bits;

  SHARED_MATH uint32_t flip() const { return bits & 15u; }
  SHARED_MATH uint32_t sign(uint32_t column_lane) const { return bits << column_lane & 0x80000000u; }
};

struct SketchHash {
  static constexpr uint32_t kSteps = 32;

  uint32_t seed, tiles;
  uint32_t per_tile;  // 2^32 over the number of tiles, or a little less
  Multiplier steps[kSteps], inverses[kSteps];

  SketchHash(int64_t columns, int64_t seed_)
      : seed(mix(static_cast<uint32_t>(seed_))),
        tiles(static_cast<uint32_t>(columns / kSketchTile)),
        per_tile(0xffffffffu / tiles) {
    uint32_t drawn = seed, step = 0;
    for (uint32_t i = 0; i < kSteps; ++i) {
      do {
        drawn = mix(drawn + 1);
        step = static_cast<uint32_t>((uint64_t{drawn} * tiles) >> 32);
      } while (std::gcd(step, tiles) != 1);  // with one tile, the step is 0 and its own inverse
      steps[i] = {step, tiles};
      inverses[i] = {inverse_of(step), tiles};
    }
  }

  // The round of a tile of entries. The quotient found is the true one, or one less.
  SHARED_MATH uint32_t round_of(uint32_t tile) const {
    const auto round = static_cast<uint32_t>(uint64_t{per_tile} * tile >> 32);
    return tile - round * tiles >= tiles ? round + 1 : round;
  }

  SHARED_MATH Deal deal(uint32_t row, uint32_t round) const {
    const uint32_t drawn = mix(mix(seed ^ (2 * row + 1)) ^ round), which = drawn % kSteps;
    return {steps[which], inverses[which], static_cast<uint32_t>((uint64_t{mix(drawn)} * tiles) >> 32)};
  }

  SHARED_MATH uint32_t turns_of(uint32_t row) const { return mix(seed ^ (2 * row + 2)); }
  static SHARED_MATH Turn turn(uint32_t turns, uint32_t tile) { return {mix(turns + tile)}; }

 private:
  uint32_t inverse_of(uint32_t step) const {
    int64_t a = tiles, b = step, x = 0, y = 1;
    while (b > 1) {
      const int64_t times = a / b;
      a -= times * b;
      x -= times * y;
      std::swap(a, b);
      std::swap(x, y);
    }
    return static_cast<uint32_t>(b == 0 ? 0 : (y % tiles + tiles) % tiles);
  }
};

}  // namespace gradcomp
