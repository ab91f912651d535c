// Exact top-k on a GPU, over a residual.
//
//   count_first_digits   a histogram of all keys' leading 11 bits; the digits of the k-th key and how many entries reach them;
//                        the largest key of each line
//   or, for few entries of a large bucket whose peaks are there:
//   count_peaks          the k-th largest peak's leading 11 bits, which are a bound for those of the k-th key
//   count_by_peaks       what count_first_digits does, from the lines whose peaks reach the bound
//   list_candidates      those entries and their indices, a tile's in order, from lines that have some; a histogram of their
//                        next digit
//   count_last_digits    the last digit, from the candidates only; each tile's number of chosen ones
//   count_taken          these numbers, if too many candidates are equal in all but the last digit
//   take_chosen          each chosen entry goes to its place in the payload
//
// The last four read all entries if the candidates are too many for the list (many equal entries, or k near n).
// Five launches and one memset, or six with peaks.
//
// Bytes an entry: 4.1, or 0.1 and 4 for those of a line with a large peak; 4 for those of a line with candidates, and about 20
// a candidate, which the second cache holds; 20 if the candidates are too many for a list.

#include "../math.h"
#include "../ops.h"
#include "device_select.cuh"
#include "thread_residual.cuh"

namespace gradcomp::cuda {
namespace {

// Two launches by peaks cost less than one that reads all if there are so many entries, and if most lines have none of the k,
// one in each being the worst case (estimated, not measured). kPeaks: a thread asks for so many at once.
#ifdef GRADCOMP_SIMT
constexpr int64_t kLeastByPeaks = 1 << 10;
#else
constexpr int64_t kLeastByPeaks = 1 << 22;
#endif
constexpr int64_t kLeastLinesOfOne = 4;
constexpr uint32_t kPeaks = 4;

// Pick the first digits in the last block, and note what there is to choose from. least: all digits from it on are counted.
__device__ __forceinline__ void pick_first(const uint32_t* counts, const MovingHand& hand, uint32_t n, uint32_t k,
                                           uint32_t least, const Plan& plan, Digit* picked) {
  add_up_digits<kThreads, kFirstDigits>(counts, plan.first_counts);
  if (!is_last_block(plan.tickets + 0, gridDim.x)) return;
  pick_digit<kThreads, kFirstDigits>(plan.first_counts, k, picked);
  if (threadIdx.x != 0) return;
  const uint32_t candidates = picked->digit < least ? n : picked->reach;
  const bool listed = candidates <= plan.longest_list;
  *plan.choice = {picked->digit << kFirstShift, k - picked->above, listed ? candidates : n, listed ? 1u : 0u, 0};
  hand.announce(k);
}

__global__ void __launch_bounds__(kThreads)
    count_first_digits(const __grid_constant__ ResidualReader reader, MovingHand hand, uint32_t n, uint32_t k, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
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
  pick_first(counts, hand, n, k, 1, plan, &picked);
}

__device__ __forceinline__ uint32_t first_digit(uint32_t key) { return min(key >> kFirstShift, kFirstDigits - 1); }

__global__ void __launch_bounds__(kThreads) count_peaks(const uint32_t* peaks, uint32_t lines, uint32_t k, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  clear_digits<kThreads, kFirstDigits>(counts);
  for (uint32_t first = blockIdx.x * kPeaks * kThreads + threadIdx.x; first < lines; first += gridDim.x * kPeaks * kThreads) {
    uint32_t its[kPeaks];
    UNROLLED for (uint32_t i = 0; i < kPeaks; ++i) its[i] = first + i * kThreads < lines ? peaks[first + i * kThreads] : 0;
    UNROLLED for (uint32_t i = 0; i < kPeaks; ++i) count_digit<kFirstDigits>(counts, first_digit(its[i]));
  }
  add_up_digits<kThreads, kFirstDigits>(counts, plan.peak_counts);
  if (!is_last_block(plan.tickets + 5, gridDim.x)) return;
  pick_digit<kThreads, kFirstDigits>(plan.peak_counts, k, &picked);
  if (threadIdx.x == 0) plan.choice->digits = picked.digit << kFirstShift;
}

// A warp has a peak for each lane, and reads two lines at once. Each of at least k entries has a line whose peak reaches the
// bound, and those that do not reach it are none of the k. An entry beyond its line's peak counts as the peak: wrong peaks then
// list as many entries as they count.
__global__ void __launch_bounds__(kThreads) count_by_peaks(const __grid_constant__ ResidualReader reader, MovingHand hand,
                                                           uint32_t n, uint32_t k, const uint32_t* peaks, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  clear_digits<kThreads, kFirstDigits>(counts);
  const uint32_t bound = plan.choice->digits >> kFirstShift, lane = threadIdx.x % kWarp;
  const uint32_t lines = (n + static_cast<uint32_t>(kLine) - 1) / static_cast<uint32_t>(kLine);
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x - lane; first < lines; first += gridDim.x * kThreads) {
    const uint32_t peak = first + lane < lines ? first_digit(peaks[first + lane]) : 0;
    for (unsigned left = __ballot_sync(kWholeWarp, first + lane < lines && peak >= bound); left != 0;) {
      const unsigned second = left & (left - 1), own = lane < kLineLanes ? left : second;
      const int line = own != 0 ? __ffs(static_cast<int>(own)) - 1 : 0;
      const int64_t entry = int64_t{first + line} * kLine + lane % kLineLanes * 4;
      const Four four = reader.read(entry, own != 0 ? n - entry : 0);
      const uint32_t most = __shfl_sync(kWholeWarp, peak, line);
      for (const float x : four.x) count_digit<kFirstDigits>(counts, min(magnitude_key(x) >> kFirstShift, most));
      left = second & (second - 1);
    }
  }
  pick_first(counts, hand, n, k, max(bound, 1u), plan, &picked);
}

__global__ void __launch_bounds__(kThreads, ResidualReader::kBlocks)
    list_candidates(const __grid_constant__ ResidualReader reader, uint32_t n, const uint32_t* peaks, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kNextDigits>];
  __shared__ Digit picked;
  const uint32_t blocks = plan.choice->listed != 0 ? gridDim.x : blocks_with_work(plan);
  if (blockIdx.x >= blocks) return;
  const Choice choice = *plan.choice;
  clear_digits<kThreads, kNextDigits>(counts);
  if (choice.listed != 0) {
    const uint32_t marks = marks_by_peaks(reader, n, peaks, [&](uint32_t key) { return key >= choice.digits; });
    list_tile(reader, marks, plan,
              [&](float x) { count_next<kNextDigits>(counts, magnitude_key(x), choice.digits, kNextBits); });
  } else {
    count_all<kNextDigits>(reader, Magnitude{}, choice, kNextBits, blocks, counts);
  }
  pick_next<kNextDigits>(counts, plan.next_counts, plan.tickets + 1, blocks, choice, kNextBits, plan, &picked);
}

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return Plan(n, k, false, nullptr).words; }

void take_topk(Span<float> residual, OptionalSpan<float> velocity, OptionalSpan<uint8_t> sent_in, int64_t step,
               OptionalSpan<const int32_t> flag, OptionalSpan<const uint32_t> peaks, int64_t k, Span<float> values,
               Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const MovingHand hand = {residual.data,
                           {velocity.data, sent_in.data, static_cast<uint8_t>(step)},
                           static_cast<uint32_t>(k),
                           values.data,
                           indices.data,
                           flag.data,
                           header.data};
  const ResidualReader reader = {residual.data};
  const Plan plan(residual.size, k, false, scratch.data);
  const auto n = static_cast<uint32_t>(residual.size), wanted = static_cast<uint32_t>(k);
  const auto lines = static_cast<uint32_t>(peaks.size);
  const auto blocks = [](int64_t entries, int64_t each) {
    const unsigned found = blocks_for(entries, each);
    return found < kMostBlocks ? found : kMostBlocks;
  };
  const bool known = peaks.given() && n >= kLeastByPeaks && kLeastLinesOfOne * k <= peaks.size;

  CUDA_TRY(cudaMemsetAsync(scratch.data, 0, plan.zeroed * sizeof(uint32_t), static_cast<cudaStream_t>(queue.stream)));
  if (known) {
    LAUNCH(count_peaks, blocks(lines, kPeaks * kThreads), kThreads, 0, queue, peaks.data, lines, wanted, plan);
    LAUNCH(count_by_peaks, blocks(lines, kThreads), kThreads, 0, queue, reader, hand, n, wanted, peaks.data, plan);
  } else {
    LAUNCH(count_first_digits, blocks(n, kTile), kThreads, 0, queue, reader, hand, n, wanted, plan);
  }
  LAUNCH(list_candidates, blocks_for(n, kTile), kThreads, 0, queue, reader, n, known ? peaks.data : plan.peaks, plan);
  choose_and_take(reader, hand, n, Magnitude{}, plan, queue);
}

}  // namespace gradcomp::cuda
