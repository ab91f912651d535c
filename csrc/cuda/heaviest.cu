// The heaviest entries of a count sketch, on a GPU: top-k over estimates that are computed wherever they are read.
//
// The launches are those of device_largest.cuh. Bytes of one pass: 4 an entry and row of the table, 16 at a time; a table that
// fits into the second cache comes from memory once. With a list of candidates there is one pass, and one over the lines that
// have some; five without. A candidate is estimated once more for the list: 32 bytes a row.

#include "../math_sketch.h"
#include "../ops.h"
#include "device_largest.cuh"

namespace gradcomp::cuda {
namespace {

__device__ __forceinline__ void swap_if(bool wanted, float& a, float& b) {
  const float first = a;
  a = wanted ? b : a;
  b = wanted ? first : b;
}

// Find the median of an odd number of numbers. They are sorted just as far as that needs, in the same steps as on CPUs.
template <int kRows>
__device__ __forceinline__ float median_of(float* x) {
  UNROLLED for (int i = 0; i <= kRows / 2; ++i) {
    UNROLLED for (int j = kRows - 1; j > i; --j) {
      const float low = x[j - 1] < x[j] ? x[j - 1] : x[j];
      x[j] = x[j - 1] < x[j] ? x[j] : x[j - 1];
      x[j - 1] = low;
    }
  }
  return x[kRows / 2];
}

// The deals of a round, which most fours of a tile share.
template <int kRows>
struct KnownRound {
  uint32_t round;
  Deal deals[kRows];
};

// Reads a tile whose first round is known.
template <int kRows, class Reader>
struct TileReader {
  static constexpr int kShare = 1;

  const Reader& reader;
  const KnownRound<kRows>& known;

  __device__ __forceinline__ bool is_aligned() const { return cuda::is_aligned(reader.table); }
  __device__ __forceinline__ Four read_whole(int64_t own) const { return reader.template estimate<true>(own, 4, &known); }
  __device__ __forceinline__ Four read(int64_t own, int64_t count) const { return reader.read(own, count, &known); }
};

template <int kRows>
struct EstimateReader {
  static constexpr int kBlocks = kRows > 7 ? 3 : kRows > 5 ? 4 : 5;

  SketchHash hash;
  const float* table;
  SketchPart part;

  // All threads of the block must call this.
  __device__ __forceinline__ TileReader<kRows, EstimateReader> over(int64_t tile) const {
    __shared__ KnownRound<kRows> known;
    const uint32_t round = hash.round_of(part.entry(static_cast<uint32_t>(tile)) / kSketchTile);
    __syncthreads();  // the tile before has been read
    if (threadIdx.x < kRows) known.deals[threadIdx.x] = hash.deal(threadIdx.x, round);
    if (threadIdx.x == 0) known.round = round;
    __syncthreads();
    return {*this, known};
  }

  __device__ __forceinline__ Four read(int64_t own, int64_t count, const KnownRound<kRows>* known = nullptr) const {
    return count > 0 ? estimate<false>(own, count, known) : Four{};
  }

  // Four entries from a multiple of four on lie in one tile, and in each row in four columns from a multiple of four on.
  template <bool kWhole>
  __device__ __forceinline__ Four estimate(int64_t own, int64_t count, const KnownRound<kRows>* known) const {
    Four four;
    const uint32_t entry = part.entry(static_cast<uint32_t>(own)), tile = entry / kSketchTile, lane = entry % kSketchTile;
    const uint32_t round = hash.round_of(tile), place = tile - round * hash.tiles;
    float x[4][kRows];
    UNROLLED for (uint32_t row = 0; row < kRows; ++row) {
      const Deal deal = known != nullptr && known->round == round ? known->deals[row] : hash.deal(row, round);
      const Turn turn = SketchHash::turn(hash.turns_of(row), tile);
      const uint32_t column_tile = deal.column_tile(place, hash.tiles);
      const uint32_t column_lane = (lane ^ turn.flip()) & ~3u;
      Four cells = load<kWhole>(table + (int64_t{row} * hash.tiles + column_tile) * kSketchTile + column_lane, 4);
      for (uint32_t i = 0; i < 4; ++i) cells.x[i] = float_of(bits_of(cells.x[i]) ^ turn.sign(column_lane + i));
      for (uint32_t i = 0; i < 4; i += 2) swap_if(turn.flip() & 1, cells.x[i], cells.x[i + 1]);
      for (uint32_t i = 0; i < 2; ++i) swap_if(turn.flip() & 2, cells.x[i], cells.x[i + 2]);
      for (uint32_t i = 0; i < 4; ++i) x[i][row] = cells.x[i];
    }
    UNROLLED for (int i = 0; i < 4; ++i) four.x[i] = i < count ? median_of<kRows>(x[i]) : 0.0f;
    return four;
  }

  __device__ __forceinline__ float at(uint32_t index) const {
    const Four four = read(index & ~3u, 4);
    const float low = index & 1 ? four.x[1] : four.x[0], high = index & 1 ? four.x[3] : four.x[2];
    return index & 2 ? high : low;
  }
};

// Writes the chosen entries down, and moves nothing.
struct NotingHand {
  float* estimates;
  int32_t* indices;
  SketchPart part;

  __device__ __forceinline__ void announce(uint32_t) const {}
  __device__ __forceinline__ void take(uint32_t place, uint32_t index, float x) const {
    estimates[place] = x;
    indices[place] = static_cast<int32_t>(part.entry(index));
  }
};

}  // namespace

int64_t heaviest_scratch(int64_t n, int64_t k) { return Plan(n, k, false, nullptr).words; }

void heaviest(Span<const float> table, int64_t rows, int64_t seed, int64_t n, int64_t part, int64_t parts,
              Span<int32_t> indices, Span<float> estimates, Span<uint32_t> scratch, Queue queue) {
  const SketchHash hash(table.size / rows, seed);
  const SketchPart own = {part, parts};
  const NotingHand hand = {estimates.data, indices.data, own};
  const auto take = [&](const auto& reader) { take_largest(reader, hand, own.size(n), indices.size, scratch, queue); };
  switch (rows) {
    case 3:
      return take(EstimateReader<3>{hash, table.data, own});
    case 5:
      return take(EstimateReader<5>{hash, table.data, own});
    case 7:
      return take(EstimateReader<7>{hash, table.data, own});
    default:
      return take(EstimateReader<9>{hash, table.data, own});
  }
}

}  // namespace gradcomp::cuda
