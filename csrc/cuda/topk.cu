// Exact top-k on a GPU, over a residual.
//
//   count_peaks          given peaks: the k-th largest peak's leading 11 bits, a bound for those of the k-th key
//   count_by_peaks       a histogram of the leading 11 bits of all keys in lines whose peaks reach the bound; the digits of the
//                        k-th key and how many entries reach them; the largest key of each of these lines
//   count_first_digits   the same of all entries: without peaks, or where peaks do not serve
//   list_candidates      the candidates and their indices, a tile's in order, from lines that have some; a histogram of their
//                        next digit
//   count_last_digits    the last digit, from the candidates only; each tile's number of chosen ones
//   count_taken          these numbers, if too many candidates are equal in all but the last digit
//   take_chosen          each chosen entry goes to its place in the payload
//
// The last four read all entries if the candidates are too many for the list (many equal entries, or k near n). Five launches
// and one memset, or seven with peaks. Peaks do not serve if they are too large, or leave too many lines or candidates.
//
// Bytes an entry: 4.1, or 0.1 and 4 for those of a line with a large peak; 4 for those of a line with candidates, and about 20
// a candidate, which the second cache holds; 20 if the candidates are too many for a list.

#include "../math.h"
#include "../ops.h"
#include "device_select.cuh"
#include "thread_residual.cuh"

namespace gradcomp::cuda {
namespace {

constexpr uint32_t kPeaksOfBlock = 4 * kThreads;

__device__ __forceinline__ uint32_t first_digit(uint32_t key) { return min(key >> kFirstShift, kFirstDigits - 1); }

// Add up the blocks' histograms, and pick the first digits of the k-th key in the last block. Returns true in one thread there.
__device__ __forceinline__ bool pick_first(const uint32_t* counts, uint32_t* all, uint32_t* ticket, uint32_t k, Digit* picked) {
  add_up_digits<kThreads, kFirstDigits>(counts, all);
  if (!is_last_block(ticket, gridDim.x)) return false;
  pick_digit<kThreads, kFirstDigits>(all, k, picked);
  return threadIdx.x == 0;
}

// The k-th largest peak bounds the k-th key, since k lines have an entry as large. All entries are read if the bound leaves
// most lines.
__global__ void __launch_bounds__(kThreads) count_peaks(const uint32_t* peaks, uint32_t lines, uint32_t k, Plan plan) {
  constexpr uint32_t kEach = kPeaksOfBlock / kThreads;
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  clear_digits<kThreads, kFirstDigits>(counts);
  for (uint32_t first = blockIdx.x * kPeaksOfBlock + threadIdx.x; first < lines; first += gridDim.x * kPeaksOfBlock) {
    uint32_t its[kEach];
    UNROLLED for (uint32_t i = 0; i < kEach; ++i) its[i] = first + i * kThreads < lines ? peaks[first + i * kThreads] : 0;
    UNROLLED for (uint32_t i = 0; i < kEach; ++i) count_digit<kFirstDigits>(counts, first_digit(its[i]));
  }
  if (!pick_first(counts, plan.first_counts + kFirstDigits, plan.tickets + 5, k, &picked)) return;
  plan.choice->digits = picked.digit << kFirstShift;
  if (picked.digit == 0 || picked.reach > lines / 2) plan.counters[2] = 1;
}

// A warp has a peak for each lane, and reads two lines at once. It notes the peaks that it finds, and 0 for other lines.
__global__ void __launch_bounds__(kThreads)
    count_by_peaks(const __grid_constant__ ResidualReader reader, MovingHand hand, uint32_t n, const uint32_t* peaks,
                   uint32_t lines, uint32_t k, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  if (plan.counters[2] != 0) return;
  clear_digits<kThreads, kFirstDigits>(counts);
  const uint32_t bound = plan.choice->digits >> kFirstShift, lane = threadIdx.x % kWarp;
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x - lane; first < lines; first += gridDim.x * kThreads) {
    const bool reaches = first + lane < lines && first_digit(peaks[first + lane]) >= bound;
    if (first + lane < lines && !reaches) plan.peaks[first + lane] = 0;
    for (unsigned left = __ballot_sync(kWholeWarp, reaches); left != 0;) {
      const unsigned others = left & (left - 1), mine = lane < kLineLanes ? left : others;
      const uint32_t line = first + (mine != 0 ? __ffs(static_cast<int>(mine)) - 1 : 0);
      const int64_t entry = int64_t{line} * kLine + lane % kLineLanes * 4;
      const Four four = reader.read(entry, mine != 0 ? n - entry : 0);
      uint32_t keys[4];
      for (int i = 0; i < 4; ++i) {
        keys[i] = magnitude_key(four.x[i]);
        count_digit<kFirstDigits>(counts, keys[i] >> kFirstShift);
      }
      const uint32_t peak = peak_of_line(keys);
      if (mine != 0 && lane % kLineLanes == 0) plan.peaks[line] = peak;
      left = others & (others - 1);
    }
  }
  if (!pick_first(counts, plan.first_counts + 2 * kFirstDigits, plan.tickets + 6, k, &picked)) return;
  // Peaks may be too large: then fewer than k entries reach the bound, below which not all are counted.
  if (picked.digit < bound || picked.reach > plan.longest_list) {
    plan.counters[2] = 1;
    return;
  }
  *plan.choice = {picked.digit << kFirstShift, k - picked.above, picked.reach, 1, 0};
  hand.announce(k);
}

__global__ void __launch_bounds__(kThreads) count_first_digits(const __grid_constant__ ResidualReader reader, MovingHand hand,
                                                               uint32_t n, uint32_t k, bool by_peaks, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  if (by_peaks && plan.counters[2] == 0) return;
  clear_digits<kThreads, kFirstDigits>(counts);
  for (int64_t tile = int64_t{blockIdx.x} * kTile; tile < n; tile += int64_t{gridDim.x} * kTile) {
    uint32_t* const peaks = plan.peaks + (tile + 4 * threadIdx.x) / kLine;
    const auto count = [&](const Four& four, int number) {
      uint32_t keys[4];
      for (int i = 0; i < 4; ++i) {
        keys[i] = magnitude_key(four.x[i]);
        count_digit<kFirstDigits>(counts, keys[i] >> kFirstShift);
      }
      const uint32_t peak = peak_of_line(keys);
      if (threadIdx.x % kLineLanes == 0) peaks[number * (kThreads / kLineLanes)] = peak;
    };
    const auto& its = reader.over(tile);
    if (is_whole(its, tile, n)) {
      for_each_whole(its, tile, count);
    } else {
      for_each_there(its, tile, n, count);
    }
  }
  if (!pick_first(counts, plan.first_counts, plan.tickets + 0, k, &picked)) return;
  const uint32_t candidates = picked.digit == 0 ? n : picked.reach;
  const bool listed = candidates <= plan.longest_list;
  *plan.choice = {picked.digit << kFirstShift, k - picked.above, listed ? candidates : n, listed ? 1u : 0u, 0};
  hand.announce(k);
}

__global__ void __launch_bounds__(kThreads, ResidualReader::kBlocks)
    list_candidates(const __grid_constant__ ResidualReader reader, uint32_t n, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kNextDigits>];
  __shared__ Digit picked;
  const uint32_t blocks = plan.choice->listed != 0 ? gridDim.x : blocks_with_work(plan);
  if (blockIdx.x >= blocks) return;
  const Choice choice = *plan.choice;
  clear_digits<kThreads, kNextDigits>(counts);
  if (choice.listed != 0) {
    const uint32_t marks = marks_by_peaks(reader, n, plan.peaks, [&](uint32_t key) { return key >= choice.digits; });
    list_tile(reader, marks, plan,
              [&](float x) { count_next<kNextDigits>(counts, magnitude_key(x), choice.digits, kNextBits); });
  } else {
    count_all<kNextDigits>(reader, Magnitude{}, choice, kNextBits, blocks, counts);
  }
  pick_next<kNextDigits>(counts, plan.next_counts, plan.tickets + 1, blocks, choice, kNextBits, plan, &picked);
}

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return Plan(n, k, false, nullptr).words; }

void take_topk(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag,
               OptionalSpan<const uint32_t> peaks, int64_t k, Span<float> values, Span<int32_t> indices, Span<int32_t> header,
               Span<uint32_t> scratch, Queue queue) {
  const MovingHand hand = {residual.data, ages.data, values.data, indices.data, flag.data, header.data};
  const ResidualReader reader = {residual.data};
  const Plan plan(residual.size, k, false, scratch.data);
  const auto n = static_cast<uint32_t>(residual.size), wanted = static_cast<uint32_t>(k);

  plan.clear(queue);
  if (peaks.given()) {
    const auto lines = static_cast<uint32_t>(peaks.size);
    LAUNCH(count_peaks, blocks_for(lines, kPeaksOfBlock, kMostBlocks), kThreads, 0, queue, peaks.data, lines, wanted, plan);
    LAUNCH(count_by_peaks, blocks_for(lines, kThreads, kMostBlocks), kThreads, 0, queue, reader, hand, n, peaks.data, lines,
           wanted, plan);
  }
  LAUNCH(count_first_digits, blocks_for(n, kTile, kMostBlocks), kThreads, 0, queue, reader, hand, n, wanted, peaks.given(),
         plan);
  LAUNCH(list_candidates, blocks_for(n, kTile), kThreads, 0, queue, reader, n, plan);
  choose_and_take(reader, hand, n, Magnitude{}, plan, queue);
}

}  // namespace gradcomp::cuda
