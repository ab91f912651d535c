// Rounding to levels, and adding the levels up, on a GPU: a thread for each word. Groups that fit go through shared memory: a
// block copies some of them there in fours, and back. Longer groups are changed where they lie, a batch of a word's entries at
// a time; so are groups of two levels, whose threads read whole lines of memory.
//
// Bytes: take_levels 8 an entry, add_levels 8, both 8 a word. Where what was sent is settled, too, the last block does so after
// a failed exchange: a ticket a block, predicted 2 us a launch of 6 M entries; alone, it moves some 50 GB/s in a failed step.

#include "../math.h"
#include "../math_payload.h"
#include "../ops.h"
#include "block.cuh"
#include "launch.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {
namespace {

template <int kLevels>
constexpr Packing packing = *packing_of(kLevels);
template <int kLevels>
constexpr uint32_t per_word = packing<kLevels>.digits * packing<kLevels>.parts;

template <uint64_t kBase, int kTimes>
constexpr uint64_t power = kBase * power<kBase, kTimes - 1>;
template <uint64_t kBase>
constexpr uint64_t power<kBase, 0> = 1;

// Threads of a block, and blocks of a multiprocessor, at least. Where groups lie, 768 threads have 30 KB in flight with ten
// entries each. On the way to shared memory, 1,024 threads have 64 to 128 KB with four to eight fours each.
template <bool kStaged>
constexpr unsigned threads = kStaged ? 256 : 128;
template <bool kStaged>
constexpr unsigned blocks = kStaged ? 4 : 6;
// Entries of a block's groups in shared memory, without the rest that belongs to the last group.
constexpr int64_t kMost = 8192;
// Behind them, a spare place for each thread.
constexpr uint32_t kSpare = kMost + Groups::kShortest;

// A bucket's groups, in 32 bits, which count the entries of any bucket. A launch divides once for all threads.
struct Layout {
  uint32_t n, size, last;  // entries, those of a group, the number of the last group
  uint32_t all, words;     // words, those of a group
  uint32_t groups;         // of a block in shared memory; 0 if none fits

  Layout(const Groups& of, int64_t levels) {
    const Packing& packed = *packing_of(levels);
    const int64_t count = of.count(), each = count == 1 ? of.n : of.size, its_words = packed.words(each);
    const int64_t by_words = (threads<true> - packed.words(Groups::kShortest)) / its_words, by_size = kMost / each;
    n = static_cast<uint32_t>(of.n);
    size = static_cast<uint32_t>(each);
    last = static_cast<uint32_t>(count - 1);
    all = static_cast<uint32_t>(packed.words(of));
    words = static_cast<uint32_t>(its_words);
    groups = static_cast<uint32_t>(levels == 2 ? 0 : by_words < by_size ? by_words : by_size);
  }
  bool staged() const { return groups > 0; }
  unsigned launched_threads() const { return staged() ? threads<true> : threads<false>; }
  unsigned launched_blocks() const { return staged() ? blocks_for(last + 1, groups) : blocks_for(all, threads<false>); }
  size_t shared() const { return staged() ? sizeof(float) * (kSpare + threads<true>) : 0; }
  __device__ __forceinline__ uint32_t end(uint32_t group) const { return group < last ? (group + 1) * size : n; }
};

// A word's entries in an array of whole groups: its first, and every `words`-th from there, while the word's group lasts. In
// shared memory, the thread's spare place there.
struct Place {
  uint32_t group, begin, end, first, words, spare;
};

// Place a word of a group, in an array that begins with the bucket's entry `from`.
template <int kLevels>
__device__ __forceinline__ Place place_of(const Layout& layout, uint32_t group, uint32_t word, uint32_t from) {
  const uint32_t begin = group * layout.size - from, end = layout.end(group) - from;
  const uint32_t words = group < layout.last ? layout.words : (end - begin + per_word<kLevels> - 1) / per_word<kLevels>;
  return {group, begin, end, begin + word, words, kSpare + threadIdx.x};
}

// Entries that are read before the first of them is used: each needs three registers, for itself and for its address.
template <int kLevels>
constexpr int batch = packing<kLevels>.digits % 10 == 0  ? 10
                      : packing<kLevels>.digits % 9 == 0 ? 9
                                                         : 8;

// Let use(entries) change a batch of the word's entries, from x[first] on. Of those that the group does not have, it gets NaN,
// which is no level and rounds to the lowest: in shared memory they are the thread's spare place, so that no access waits for a
// condition.
template <bool kStaged, int kBatch, class Use>
__device__ __forceinline__ void change_batch(float* x, const Place& place, uint32_t first, Use use) {
  float own[kBatch];
  const auto index = [&](int next) { return first + next * place.words; };
  const auto at = [&](int next) { return index(next) < place.end ? index(next) : place.spare; };
  UNROLLED for (int next = 0; next < kBatch; ++next) {
    own[next] = kStaged ? x[at(next)] : index(next) < place.end ? x[index(next)] : not_a_number();
  }
  use(own);
  UNROLLED for (int next = 0; next < kBatch; ++next) {
    if (kStaged) {
      x[at(next)] = own[next];
    } else if (index(next) < place.end) {
      x[index(next)] = own[next];
    }
  }
}

// Call change(entries, place, number) for each word of a block.
template <int kLevels, bool kStaged, class Change>
__device__ __forceinline__ void change_words(uint32_t block, float* x, const Layout& layout, Change change) {
  // The block's first group, or the bucket's, and the number of this thread's word from that group's first on.
  const uint32_t group = kStaged ? block * layout.groups : 0;
  const uint32_t word = kStaged ? threadIdx.x : block * threads<false> + threadIdx.x;
  const uint32_t past = kStaged ? group + layout.groups - 1 : layout.last;
  const uint32_t number = group * layout.words + word, before = group + word / layout.words;
  const uint32_t its_group = before < layout.last ? before : layout.last;
  const auto change_word = [&](float* entries, uint32_t from) {
    if (number >= layout.all || (past < layout.last && word >= layout.groups * layout.words)) return;
    change(entries, place_of<kLevels>(layout, its_group, word - (its_group - group) * layout.words, from), number);
  };
  if constexpr (kStaged) {
    DYNAMIC_SHARED(float, staged);
    constexpr int kFours = kLevels == 5 ? 6 : kLevels == 9 ? 4 : 8;  // of a thread, where groups have 2,048 entries
    const uint32_t from = group * layout.size, count = layout.end(past) - from;
    const auto copy = [&](float* to, const float* its) {
      copy_share<threads<true>, kFours>(to, its, count, threadIdx.x, is_aligned(x + from), [](float entry) { return entry; });
    };
    copy(staged, x + from);
    staged[kSpare + threadIdx.x] = not_a_number();
    __syncthreads();
    change_word(staged, from);
    __syncthreads();
    copy(x + from, staged);
  } else {
    change_word(x, 0);
  }
}

struct Around {
  float low, high;
};

// Find the two levels around x, in halves of halves. sum += the number of the lower one, in units.
template <int kLevels>
__device__ __forceinline__ Around around(float x, const float (&level)[kLevels], uint32_t unit, uint32_t& sum) {
  if constexpr (kLevels == 2) {
    return {level[0], level[1]};
  } else {
    constexpr int kHalf = kLevels / 2;
    const bool upper = x >= level[kHalf];
    if (upper) sum += unit * kHalf;
    float half[kHalf + 1];
    UNROLLED
    for (int i = 0; i <= kHalf; ++i) half[i] = upper ? level[i + kHalf] : level[i];
    return around(x, half, unit, sum);
  }
}

// Round the entries of a word. Entries of more than two levels are always drawn.
template <int kLevels, bool kStaged>
__device__ __forceinline__ uint64_t round_word(float* x, const Place& place, const float* levels, const float* cuts,
                                               uint32_t seed) {
  constexpr int kBatch = batch<kLevels>;
  float level[kLevels];
  UNROLLED
  for (int i = 0; i < kLevels; ++i) level[i] = levels[int64_t{place.group} * kLevels + i];
  const bool draws = kLevels > 2 || cuts == nullptr;
  const float cut = draws ? 0.0f : cuts[place.group];
  const uint32_t draws_first = draws_of(seed, place.group);
  uint64_t word = 0, unit = 1;
  for (uint32_t digit = 0; digit < per_word<kLevels>; digit += kBatch) {
    const uint32_t first = place.first + digit * place.words;
    change_batch<kStaged, kBatch>(x, place, first, [&](float(&own)[kBatch]) {
      uint32_t i = draws_first + first - place.begin, sum = 0, unit_of_digit = 1;
      UNROLLED
      for (float& entry : own) {
        const auto [low, high] = around(entry, level, unit_of_digit, sum);
        const bool up = draws ? rounds_up(entry, low, high, draw(i)) : entry >= cut;
        if (up) sum += unit_of_digit;
        unit_of_digit *= kLevels;
        entry -= up ? high : low;
        i += place.words;
      }
      word += unit * sum;
    });
    unit *= power<kLevels, kBatch>;
  }
  return word;
}

template <int kLevels, bool kStaged>
__global__ void __launch_bounds__(threads<kStaged>, blocks<kStaged>)
    round_words(float* residual, const float* levels, const float* cuts, const __grid_constant__ Layout layout, uint32_t seed,
                uint64_t* words) {
  change_words<kLevels, kStaged>(blockIdx.x, residual, layout, [&](float* x, const Place& place, uint32_t at) {
    words[at] = round_word<kLevels, kStaged>(x, place, levels, cuts, seed);
  });
}

// A group's levels, times a factor. A few are kept in registers.
template <int kLevels>
struct Scaled {
  const float* levels;
  float factor;
  float few[3];

  __device__ __forceinline__ Scaled(const float* all, int64_t group, float factor_)
      : levels(all + group * kLevels), factor(factor_), few{} {
    UNROLLED
    for (int i = 0; i < kLevels && i < 3; ++i) few[i] = factor * __ldg(levels + i);
  }

  // Add to each entry the level that the number's digit names.
  template <int kCount>
  __device__ __forceinline__ void add_to(float (&entries)[kCount], uint32_t number) const {
    if constexpr (kLevels == 3) {
      add_thirds(entries, number);
      return;
    }
    UNROLLED
    for (float& entry : entries) {
      const uint32_t left = number / kLevels, code = number - left * kLevels;
      number = left;
      entry += kLevels > 3 ? factor * __ldg(levels + code) : code == 0 ? few[0] : few[1];
    }
  }

  // The same for three levels, without a division for each entry. A number of ten digits becomes a fraction of 2^32, not below
  // its own and below the next number's: the third that it is in is the highest digit, which a multiplication pushes out.
  template <int kCount>
  __device__ __forceinline__ void add_thirds(float (&entries)[kCount], uint32_t number) const {
    constexpr uint64_t kWhole = uint64_t{1} << 32;
    constexpr uint32_t kTen = 59049, kStep = kWhole / kTen, kRest = kWhole % kTen;
    constexpr uint32_t kThird = kWhole / 3 + 1, kTwoThirds = 2 * kWhole / 3 + 1;
    static_assert(kRest < kStep && kCount % 10 == 0);
    UNROLLED
    for (int first = 0; first < kCount; first += 10) {
      const uint32_t left = number / kTen;
      uint32_t fraction = (number - left * kTen) * kStep + kRest;
      number = left;
      UNROLLED
      for (int i = 9; i >= 0; --i) {
        entries[first + i] += fraction < kThird ? few[0] : fraction < kTwoThirds ? few[1] : few[2];
        fraction *= 3;
      }
    }
  }
};

struct Ranks {
  const Spans<const float>& levels;
  const Spans<const uint64_t>& words;
  float scale;
};

// Add the levels of all ranks to each batch of a word's entries in turn, and then write the batch. A rank's word is on its way
// while the one before is added.
template <int kLevels, bool kStaged, int kDigit = 0>
__device__ __forceinline__ void add_word(float* x, const Place& place, uint32_t at, const Ranks& ranks) {
  constexpr int kBatch = kStaged ? packing<kLevels>.digits : batch<kLevels>;
  uint64_t next = ranks.words.data[0][at];
  change_batch<kStaged, kBatch>(x, place, place.first + kDigit * place.words, [&](float(&own)[kBatch]) {
    for (int rank = 0; rank < ranks.words.count; ++rank) {
      const uint64_t word = next;
      if (rank + 1 < ranks.words.count) next = ranks.words.data[rank + 1][at];
      const Scaled<kLevels> level(ranks.levels.data[rank], place.group, ranks.scale);
      // Divisions by runtime values would take most of the time.
      const auto number = static_cast<uint32_t>(word / power<kLevels, kDigit> % power<kLevels, kBatch>);
      level.add_to(own, number);
    }
  });
  if constexpr (kDigit + kBatch < per_word<kLevels>) add_word<kLevels, kStaged, kDigit + kBatch>(x, place, at, ranks);
}

// What a failed exchange puts back: what this rank has sent, if the residual is given. Also the ticket of those that add.
struct Repair {
  float* residual;
  Spans<const float> levels;
  Spans<const uint64_t> words;
  uint32_t* ticket;
};

template <int kLevels, bool kStaged>
__device__ __forceinline__ void put_back(uint32_t block, float* residual, const Layout& layout, const Ranks& own) {
  change_words<kLevels, kStaged>(block, residual, layout, [&](float* x, const Place& place, uint32_t at) {
    add_word<kLevels, kStaged>(x, place, at, own);
  });
}

// The thread that wrote the first entry sets it to NaN.
template <int kLevels, bool kStaged>
__global__ void __launch_bounds__(threads<kStaged>, blocks<kStaged>)
    add_words(float* target, const __grid_constant__ Spans<const float> levels,
              const __grid_constant__ Spans<const uint64_t> words, const __grid_constant__ Spans<const int32_t> headers,
              const __grid_constant__ Layout layout, float scale, const __grid_constant__ Repair own) {
  put_back<kLevels, kStaged>(blockIdx.x, target, layout, {levels, words, scale});
  for (int rank = 0; rank < headers.count && blockIdx.x + threadIdx.x == 0; ++rank) {
    if (headers.data[rank][1] != 0) target[0] = not_a_number();
  }
  if (own.residual == nullptr || !is_last_block(own.ticket, gridDim.x) || is_finite(__ldcg(target))) return;
  for (uint32_t block = 0; block < gridDim.x; ++block) {
    put_back<kLevels, kStaged>(block, own.residual, layout, {own.levels, own.words, 1.0f});
    __syncthreads();  // the next one writes shared memory
  }
}

template <int kLevels, bool kStaged>
__global__ void __launch_bounds__(threads<kStaged>, blocks<kStaged>)
    settle_words(float* residual, const __grid_constant__ Spans<const float> levels,
                 const __grid_constant__ Spans<const uint64_t> words, const __grid_constant__ Layout layout,
                 const float* update) {
  if (!is_finite(update[0])) put_back<kLevels, kStaged>(blockIdx.x, residual, layout, {levels, words, 1.0f});
}

// Choose the kernel for this number of levels.
template <class Kernel>
Kernel* for_levels(int64_t count, Kernel* two, Kernel* three, Kernel* five, Kernel* nine) {
  return count == 2 ? two : count == 3 ? three : count == 5 ? five : nine;
}
#define FOR_LEVELS(kernel, count, staged)                                                           \
  (staged) ? for_levels(count, kernel<2, false>, kernel<3, true>, kernel<5, true>, kernel<9, true>) \
           : for_levels(count, kernel<2, false>, kernel<3, false>, kernel<5, false>, kernel<9, false>)

}  // namespace

void take_levels(Span<float> residual, Span<const float> levels, OptionalSpan<const float> cuts, int64_t group, int64_t count,
                 int64_t key, Span<uint64_t> words, Queue queue) {
  const Layout layout({residual.size, group}, count);
  const auto round_words_of = FOR_LEVELS(round_words, count, layout.staged());
  LAUNCH(round_words_of, layout.launched_blocks(), layout.launched_threads(), layout.shared(), queue, residual.data,
         levels.data, cuts.data, layout, seed_of(key), words.data);
}

void add_and_settle(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                    const Spans<const int32_t>& headers, int64_t group, int64_t count, float scale, Span<float> residual,
                    const OwnLevels& own, uint32_t* ticket, Queue queue) {
  const Layout layout({target.size, group}, count);
  const Repair repair = {residual.data, Spans(own.levels), Spans(own.words), ticket};
  const auto add_words_of = FOR_LEVELS(add_words, count, layout.staged());
  LAUNCH(add_words_of, layout.launched_blocks(), layout.launched_threads(), layout.shared(), queue, target.data, levels, words,
         headers, layout, scale, repair);
}

void add_levels(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                const Spans<const int32_t>& headers, int64_t group, int64_t count, float scale, Queue queue) {
  add_and_settle(target, levels, words, headers, group, count, scale, {}, {}, nullptr, queue);
}

void settle_levels(Span<float> residual, Span<const float> levels, Span<const uint64_t> words, int64_t group, int64_t count,
                   Span<const float> update, Queue queue) {
  const Layout layout({residual.size, group}, count);
  const auto settle_words_of = FOR_LEVELS(settle_words, count, layout.staged());
  LAUNCH(settle_words_of, layout.launched_blocks(), layout.launched_threads(), layout.shared(), queue, residual.data,
         Spans(levels), Spans(words), layout, update.data);
}

}  // namespace gradcomp::cuda
