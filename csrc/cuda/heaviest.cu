// The heaviest entries of a count sketch, on a GPU: top-k over estimates, of which few are computed. Each is the median of a
// cell from every row.
//
//   sample_digits        a histogram of the leading bits of some estimates, and a threshold that a few more than k should reach
//   mark_cells           two bits for each cell: whether it reaches the threshold, and whether it does so with the other sign
//   mark_reaching        a bit for each entry of which most cells reach the threshold with one sign: so does their median
//   select_reaching      these entries and their estimates, and the largest of them (device_select.cuh)
//
// The last one computes the estimates of all entries if those marked are fewer than k, or too many for the list, or if a cell
// is NaN. Four launches and one memset. Bytes: the table once, 4 bytes an entry and row of its bits for 16 entries, which the
// first cache mostly holds, 0.3 an entry, and 8 a candidate in each of five passes; without a list, 20 an entry of the table in
// each. Predicted for 25 M entries and 16,000 candidates: 20 us, 5 us, 60 us, and 15 us for seven meetings of few blocks.

#include "../math_sketch.h"
#include "../ops.h"
#include "device_select.cuh"

namespace gradcomp::cuda {
namespace {

// Threads of a block, and blocks of a launch, at most, in the passes before the selection.
constexpr unsigned kThreads = 256, kMostBlocks = 2048;

// The scratch of these passes: zeros first, the threshold, the entries' bits, those of the cells.
struct Marks {
  uint32_t* counts;   // of the sample's leading digits
  uint32_t* tickets;  // of the sample, and of the selection
  uint32_t* odd;      // NaN among the cells
  uint32_t* threshold;
  uint32_t* bits;
  uint32_t* cells;

  static constexpr int64_t kZeroed = kFirstDigits + 3;
  static int64_t words(int64_t n, int64_t search_size) { return kZeroed + 1 + (n + 31) / 32 + 4 * search_size; }
  Marks(uint32_t* at, int64_t n)
      : counts(at),
        tickets(at + kFirstDigits),
        odd(tickets + 2),
        threshold(odd + 1),
        bits(threshold + 1),
        cells(bits + (n + 31) / 32) {}
};

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

template <int kRows>
struct EstimateReader {
  SketchHash hash;
  const float* table;
  SketchPart part;

  __device__ __forceinline__ Four read(int64_t own, int64_t count) const {
    Four four = {};
    if (count <= 0) return four;
    // Four entries from a multiple of four on lie in one tile, and in each row in four columns from a multiple of four on.
    const uint32_t entry = part.entry(static_cast<uint32_t>(own)), tile = entry / kSketchTile, lane = entry % kSketchTile;
    float x[4][kRows];
    UNROLLED for (uint32_t row = 0; row < kRows; ++row) {
      const Turn turn = SketchHash::turn(hash.turns_of(row), tile);
      const uint32_t column_lane = (lane ^ turn.flip()) & ~3u;
      Four cells = load_four(table + column_of(row, tile) + column_lane, 4);
      for (uint32_t i = 0; i < 4; ++i) cells.x[i] = float_of(bits_of(cells.x[i]) ^ turn.sign(column_lane + i));
      for (uint32_t i = 0; i < 4; i += 2) swap_if(turn.flip() & 1, cells.x[i], cells.x[i + 1]);
      for (uint32_t i = 0; i < 2; ++i) swap_if(turn.flip() & 2, cells.x[i], cells.x[i + 2]);
      for (uint32_t i = 0; i < 4; ++i) x[i][row] = cells.x[i];
    }
    UNROLLED for (int i = 0; i < 4; ++i) four.x[i] = i < count ? median_of<kRows>(x[i]) : 0.0f;
    return four;
  }

  __device__ __forceinline__ float at(uint32_t own) const {
    const uint32_t entry = part.entry(own), tile = entry / kSketchTile, lane = entry % kSketchTile;
    float x[kRows];
    UNROLLED for (uint32_t row = 0; row < kRows; ++row) {
      const Turn turn = SketchHash::turn(hash.turns_of(row), tile);
      const uint32_t column_lane = lane ^ turn.flip();
      x[row] = float_of(bits_of(table[column_of(row, tile) + column_lane]) ^ turn.sign(column_lane));
    }
    return median_of<kRows>(x);
  }

 private:
  // The first cell of the tile of columns that a tile of entries goes to.
  __device__ __forceinline__ int64_t column_of(uint32_t row, uint32_t tile) const {
    const uint32_t round = hash.round_of(tile), place = tile - round * hash.tiles;
    return (int64_t{row} * hash.tiles + hash.deal(row, round).column_tile(place, hash.tiles)) * kSketchTile;
  }
};

// A sample of the entries: one tile of every `each` in a row, chosen by a hash. The threshold is that of its entry number
// `wanted`, unless that is among the ones with equal digits, which at most `most` should reach.
struct Sample {
  uint32_t tiles, each, wanted, most;

  // Small buckets are looked at as a whole. In the emulator they are smaller.
#ifdef GRADCOMP_SIMT
  static constexpr int64_t kLarge = 1 << 14;
#else
  static constexpr int64_t kLarge = 1 << 20;
#endif

  Sample(int64_t n, int64_t k, int64_t longest_list) {
    const int64_t step = n < kLarge ? 1 : 16, count = n / kSketchTile / step, entries = count * kSketchTile;
    const int64_t wish = 4 * k < 4096 ? 4096 : 4 * k, middle = (k + (wish < longest_list ? wish : longest_list)) / 2;
    tiles = static_cast<uint32_t>(count);
    each = static_cast<uint32_t>(step);
    wanted = static_cast<uint32_t>(middle * entries / n) + 1;
    most = static_cast<uint32_t>(longest_list * entries / n * 4 / 5);
  }

  __device__ __forceinline__ uint32_t tile(uint32_t number) const { return number * each + mix(number) % each; }

  // A magnitude that about as many entries reach as are wanted.
  __device__ __forceinline__ uint32_t threshold(const Digit& found) const {
    const uint32_t low = found.digit << kFirstShift;
    if (found.digit == 0 || found.reach <= most) return low;
    // Most of the digits' entries are smaller: a straight line marks a few less than are wanted.
    return low + static_cast<uint32_t>((uint64_t{found.reach - wanted} << kFirstShift) / (found.reach - found.above));
  }
};

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    sample_digits(const __grid_constant__ EstimateReader<kRows> reader, Sample sample, Marks marks) {
  constexpr uint32_t kFoursOfTile = kSketchTile / 4;
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  clear_digits<kThreads, kFirstDigits>(counts);
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < kFoursOfTile * sample.tiles; i += gridDim.x * kThreads) {
    const uint32_t own = sample.tile(i / kFoursOfTile) * kSketchTile + i % kFoursOfTile * 4;
    const Four four = reader.read(own, 4);
    for (const float x : four.x) count_digit<kFirstDigits>(counts, magnitude_key(x) >> kFirstShift);
  }
  add_up_digits<kThreads, kFirstDigits>(counts, marks.counts);
  if (!is_last_block(marks.tickets, gridDim.x)) return;
  pick_digit<kThreads, kFirstDigits>(marks.counts, sample.wanted, &picked);
  if (threadIdx.x == 0) *marks.threshold = sample.threshold(picked);
}

// The bits of a tile of columns, from the highest on: those of the sixteen cells that reach the threshold, then those that do
// so with the other sign. So the signs of a turn belong to the first sixteen.
__global__ void __launch_bounds__(kThreads) mark_cells(Span<const float> table, Marks marks) {
  const float threshold = float_of(*marks.threshold);
  // A warp has two tiles. Its lanes stand for bits, the first one for the last cell.
  const int64_t cell = (int64_t{blockIdx.x} * kThreads + threadIdx.x) ^ (kWarp - 1);
  const float x = cell < table.size ? table.data[cell] : 0.0f;
  const uint32_t above = __ballot_sync(kWholeWarp, x >= threshold), below = __ballot_sync(kWholeWarp, x <= -threshold);
  const uint32_t odd = __ballot_sync(kWholeWarp, x != x);
  if (threadIdx.x % kWarp == 0 && odd != 0) atomicOr(marks.odd, 1u);
  if (threadIdx.x % kSketchTile != 0 || cell >= table.size) return;
  marks.cells[cell / kSketchTile] =
      threadIdx.x % kWarp == 0 ? above << 16 | (below & 0xffffu) : (above & 0xffff0000u) | below >> 16;
}

// Move the bits of both halves of a word: bit i to bit i ^ flip.
__device__ __forceinline__ uint32_t flipped(uint32_t word, uint32_t flip) {
  const auto move = [&](uint32_t apart, uint32_t low) {
    const uint32_t by = flip & apart;  // 0 moves none
    word = (word & low) << by | (word & ~low) >> by;
  };
  move(1, 0x55555555u);
  move(2, 0x33333333u);
  move(4, 0x0f0f0f0fu);
  move(8, 0x00ff00ffu);
  return word;
}

// The bits that most of an odd number of words have. Each bit has a counter, which overflows if the bit is in most of them.
template <int kRows>
__device__ __forceinline__ uint32_t bits_of_most(const uint32_t* words) {
  constexpr int kMost = kRows / 2 + 1, kBits = kMost > 4 ? 3 : kMost > 2 ? 2 : 1, kStart = (1 << kBits) - kMost;
  uint32_t counter[kBits], most = 0;
  UNROLLED for (int i = 0; i < kBits; ++i) counter[i] = kStart >> i & 1 ? 0xffffffffu : 0;
  UNROLLED for (int row = 0; row < kRows; ++row) {
    uint32_t carry = words[row];
    UNROLLED for (int i = 0; i < kBits; ++i) {
      const uint32_t sum = counter[i] ^ carry;
      carry &= counter[i];
      counter[i] = sum;
    }
    most |= carry;
  }
  return most;
}

// A thread has two tiles of entries: a word of bits.
template <int kRows>
__device__ __forceinline__ uint32_t reaching(const SketchHash& hash, const uint32_t* cells, uint32_t tile) {
  const uint32_t round = hash.round_of(tile), place = tile - round * hash.tiles;
  const bool parted = place + 1 == hash.tiles;  // the second tile begins a round
  uint32_t words[2][kRows];
  UNROLLED for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t turns = hash.turns_of(row);
    const auto word_of = [&](uint32_t its, uint32_t column_tile) {
      const uint32_t word = cells[int64_t{row} * hash.tiles + column_tile];
      const Turn turn = SketchHash::turn(turns, its);
      const uint32_t minus = turn.bits >> 16 | (turn.bits & 0xffff0000u), opposite = word << 16 | word >> 16;
      return flipped((word & ~minus) | (opposite & minus), turn.flip());
    };
    Deal deal = hash.deal(row, round);
    words[0][row] = word_of(tile, deal.column_tile(place, hash.tiles));
    if (parted) deal = hash.deal(row, round + 1);
    words[1][row] = word_of(tile + 1, deal.column_tile(parted ? 0 : place + 1, hash.tiles));
  }
  const uint32_t first = bits_of_most<kRows>(words[0]), second = bits_of_most<kRows>(words[1]);
  return __brev(((first | first << 16) & 0xffff0000u) | ((second | second >> 16) & 0xffffu));
}

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    mark_reaching(const __grid_constant__ SketchHash hash, SketchPart part, uint32_t n, Marks marks) {
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x, own = thread * 32;
  if (own >= n) return;
  const uint32_t word = reaching<kRows>(hash, marks.cells, part.entry(own) / kSketchTile);
  marks.bits[thread] = n - own < 32 ? word & ((1u << (n - own)) - 1) : word;
}

// Writes the chosen entries down, and moves nothing.
struct NotingHand {
  float* estimates;
  int32_t* indices;
  SketchPart part;

  __device__ __forceinline__ void take(uint32_t place, uint32_t index, float x) const {
    estimates[place] = x;
    indices[place] = static_cast<int32_t>(part.entry(index));
  }
};

template <int kRows>
__global__ void __launch_bounds__(kSelecting)
    select_reaching(const __grid_constant__ EstimateReader<kRows> reader, NotingHand hand, uint32_t n, uint32_t k,
                    const __grid_constant__ Plan plan, Marks marks) {
  const Counted own = shared_digits();
  Meeting meeting = {marks.tickets + 1};
  plan.clear();
  meeting.wait();
  for_each_own_tile(plan, [&](uint32_t tile) {
    const uint32_t first = tile * kSelectTile + threadIdx.x % kWarp * 32;
    uint32_t bits = threadIdx.x % kWarp * 32 < kSelectTile && first < n ? marks.bits[first / 32] : 0;
    const uint32_t count = __popc(bits), inclusive = warp_inclusive_sum(count);
    uint32_t place = begin_in_list(plan, tile, __shfl_sync(kWholeWarp, inclusive, kWarp - 1)) + inclusive - count;
    for (; bits != 0; bits &= bits - 1) {
      const uint32_t index = first + __ffs(static_cast<int>(bits)) - 1;
      if (place < plan.longest_list) put_in_list(plan, place, index, reader.at(index));
      ++place;
    }
  });
  meeting.wait();
  const uint32_t found = __ldcg(plan.found);
  const bool listed = k <= found && found <= plan.longest_list && *marks.odd == 0;
  choose_and_take(Sources<EstimateReader<kRows>, Magnitude>{reader, Magnitude{}, plan, n, listed}, hand, Choice{0, k, 0}, own,
                  meeting);
  meeting.end();
}

template <int kRows>
void find(Span<const float> table, const SketchHash& hash, SketchPart part, const NotingHand& hand, int64_t n, int64_t k,
          const Plan& plan, const Marks& marks, Queue queue) {
  const EstimateReader<kRows> reader = {hash, table.data, part};
  const Sample sample(n, k, plan.longest_list);
  const auto entries = static_cast<uint32_t>(n);
  const unsigned blocks = blocks_for(sample.tiles * kSketchTile + 1, 16 * kThreads, kMostBlocks);

  CUDA_TRY(cudaMemsetAsync(marks.counts, 0, Marks::kZeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  LAUNCH(sample_digits<kRows>, blocks, kThreads, 0, queue, reader, sample, marks);
  LAUNCH(mark_cells, blocks_for(table.size, kThreads), kThreads, 0, queue, table, marks);
  LAUNCH(mark_reaching<kRows>, blocks_for(n, 32 * kThreads), kThreads, 0, queue, hash, part, entries, marks);
  LAUNCH_TOGETHER(select_reaching<kRows>, plan.blocks(), kSelecting, queue, reader, hand, entries, static_cast<uint32_t>(k),
                  plan, marks);
}

}  // namespace

// A plan, and the marks behind it.
int64_t heaviest_scratch(int64_t n, int64_t search_size) {
  return Plan(n, search_size, nullptr).words + Marks::words(n, search_size);
}

void heaviest(Span<const float> table, int64_t rows, int64_t seed, int64_t n, int64_t part, int64_t parts,
              Span<int32_t> indices, Span<float> estimates, Span<uint32_t> scratch, Queue queue) {
  const SketchHash hash(table.size / rows, seed);
  const SketchPart own = {part, parts};
  const NotingHand hand = {estimates.data, indices.data, own};
  const Plan plan(own.size(n), search_size(indices.size, table.size), scratch.data);
  const Marks marks(scratch.data + plan.words, own.size(n));
  const auto by = rows == 3 ? find<3> : rows == 5 ? find<5> : rows == 7 ? find<7> : find<9>;
  by(table, hash, own, hand, own.size(n), indices.size, plan, marks, queue);
}

}  // namespace gradcomp::cuda
