// Progress out of the weights and updates into them, on a GPU. A bucket's scattered weights are read and written where they
// lie.
//
// Bytes an entry (f32 pieces): offer_progress 24 (2 more with ages), deliver_progress 12, and 12 more in marked lines, or 16
// where it wipes them: predicted 1 us more for 1 % of 25 M entries. One launch each, for the whole bucket; offer_progress
// resets its flag by a memset. Moments leave a record of 24 bytes in scratch for each part, which one more launch joins.

#include <type_traits>

#include "../math_progress.h"
#include "../ops.h"
#include "block_pieces.cuh"
#include "block_records.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = kTileThreads;
// Runs that a thread reads before it uses the first: as many as fit into the registers of half a multiprocessor's threads.
constexpr int kRuns = kRows / 2;

struct Offer {
  const float* decays;
  float* start;
  float* residual;
  uint8_t* ages;
  const float* shares;
  Progress rule;
};

__device__ __forceinline__ bool is_aligned(const Offer& to) {
  return cuda::is_aligned(to.start) && cuda::is_aligned(to.residual) && cuda::is_aligned(to.ages);
}

// Copy the shares of all ages into shared memory: neighbours of different ages would wait for one another elsewhere.
__device__ __forceinline__ void copy_shares(const Offer& to, float* shares) {
  for (uint32_t i = threadIdx.x; i < 2 * kAges; i += kThreads) shares[i] = to.shares[i];
  __syncthreads();
}

// A run before it is offered; then start is what is offered. kWhole: all four are there and aligned.
template <bool kWhole>
struct Run {
  Four start, residual;
  FourBytes ages = {};

  __device__ __forceinline__ void read(const Offer& to, int64_t entry, int count) {
    start = load<kWhole>(to.start + entry, count);
    residual = load<kWhole>(to.residual + entry, count);
  }

  // After all other loads: its bytes are taken apart where they are read.
  __device__ __forceinline__ void read_ages(const Offer& to, int64_t entry, int count) {
    if (to.ages != nullptr) ages = load<kWhole>(to.ages + entry, count);
  }

  // Offer what the weights, as they are now, differ from their start, and write. Returns true if an entry was refused.
  __device__ __forceinline__ bool offer(const Offer& to, const float* shares, const Pieces& weights, int piece, int64_t entry,
                                        int count, const Four& now) {
    const float decay = to.decays != nullptr ? to.decays[piece] : 0.0f;
    bool refused = false;
    write_piece<kWhole>(weights, piece, entry, count, start);
    for (int i = 0; i < 4; ++i) {
      const float whole = start.x[i] - now.x[i];
      const bool good = is_finite(whole);
      refused |= !good && i < count;
      const float made = good ? to.rule.made(whole, decay * start.x[i]) : 0.0f, all = to.rule.all(residual.x[i], made);
      const uint8_t age = next_age(ages.x[i]);
      ages.x[i] = age;
      start.x[i] = offered_of(all, made, shares[age], shares[kAges + age]);
      residual.x[i] = kept_of(all, start.x[i]);
    }
    if (to.ages != nullptr) store<kWhole>(to.ages + entry, count, ages);
    store<kWhole>(to.residual + entry, count, residual);
    store<kWhole>(to.start + entry, count, start);
    return refused;
  }
};

// Offer a whole tile, and call use(offered) with some rows at a time. Returns true if an entry was refused.
template <class Use>
__device__ __forceinline__ bool offer_whole(const Pieces& weights, const Offer& to, const float* shares, int piece,
                                            int64_t tile, Use use) {
  bool refused = false;
  for (int row = 0; row < kRows; row += kRuns) {
    const int64_t entry = tile + row * kRow + threadIdx.x * 4;
    Run<true> runs[kRuns];
    Four now[kRuns], offered[kRuns];
    UNROLLED for (int i = 0; i < kRuns; ++i) runs[i].read(to, entry + i * kRow, 4);
    read_share(weights, piece, entry, now);
    UNROLLED for (int i = 0; i < kRuns; ++i) runs[i].read_ages(to, entry + i * kRow, 4);
    UNROLLED for (int i = 0; i < kRuns; ++i) {
      refused |= runs[i].offer(to, shares, weights, piece, entry + i * kRow, 4, now[i]);
      offered[i] = runs[i].start;
    }
    use(offered);
  }
  return refused;
}

__global__ void __launch_bounds__(kThreads) offer_tiles(const __grid_constant__ Pieces weights, Offer to, int32_t* flag) {
  __shared__ float shares[2 * kAges];
  bool refused = false;
  copy_shares(to, shares);
  const int piece = is_aligned(to) ? only_piece(weights) : -1;
  if (piece >= 0) {
    refused = offer_whole(weights, to, shares, piece, blockIdx.x * kTile, [](const auto&) {});
  } else {
    for_each_run(weights, [&](int its, int64_t entry, int count) {
      Run<false> run;
      run.read(to, entry, count);
      run.read_ages(to, entry, count);
      refused |= run.offer(to, shares, weights, its, entry, count, read_piece(weights, its, entry, count));
    });
  }
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
}

__global__ void __launch_bounds__(kThreads)
    offer_and_measure_tiles(const __grid_constant__ Pieces weights, Offer to, int32_t* flag, MomentsRecord* records) {
  __shared__ float shares[2 * kAges];
  const bool aligned = is_aligned(to);
  bool refused = false;
  copy_shares(to, shares);
  for_each_part<kMeasured>(weights, [&](int piece, int64_t begin, int64_t end) {
    Shifted<float> mine = {};
    for_each_tile_of(
        weights, piece, begin, end, aligned,
        [&](int64_t tile) {
          refused |= offer_whole(weights, to, shares, piece, tile, [&](const auto& offered) { include(mine, offered); });
        },
        [&](int64_t entry, int count) {
          Run<false> run;
          run.read(to, entry, count);
          run.read_ages(to, entry, count);
          refused |= run.offer(to, shares, weights, piece, entry, count, read_piece(weights, piece, entry, count));
          include(mine, run.start, count);
        });
    const Shifted<float> all = join_block<kThreads>(mine, Merge{});
    if (threadIdx.x == 0) records[blockIdx.x + piece] = record_of(all);
  });
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
}

__global__ void __launch_bounds__(kThreads)
    join_offered(const __grid_constant__ Pieces weights, const MomentsRecord* records, double* moments) {
  const Moments<double> all = join_records(weights, records);
  if (threadIdx.x == 0) store_moments(all, moments + kMoments * blockIdx.x);
}

struct Delivery {
  float* update;
  const float* first;
  uint8_t* marks;
  const float* rest;
  float* residual;
  float scale;
  bool wipes;
};

// A float as a weight of a piece of this type.
template <class Element>
__device__ __forceinline__ Element narrowed(Dtype dtype, float weight) {
  if constexpr (std::is_same_v<Element, float>) return weight;
  return dtype == Dtype::f16 ? float_to_f16(weight) : float_to_bf16(weight);
}

// A run of weights and what comes to it. Nothing is read of the weights and of the update in a line that is not marked.
template <class Element, bool kWhole>
struct Move {
  bool marked;
  Four rest, residual, update = {};
  FourOf<Element> weights = {};

  __device__ __forceinline__ void look(const Delivery& how, int64_t entry) {
    marked = how.marks == nullptr || how.marks[entry / kLine] != 0;
  }

  __device__ __forceinline__ void read(const Delivery& how, const Pieces& of, int piece, int64_t entry, int count) {
    rest = load<kWhole>(how.rest + entry, count);
    residual = load<kWhole>(how.residual + entry, count);
    if (!marked) return;
    update = load<kWhole>(how.update + entry, count);
    weights = load<kWhole>(place<Element>(of, piece, entry), count);
  }

  __device__ __forceinline__ void deliver(const Delivery& how, bool failed, const Pieces& of, int piece, int64_t entry,
                                          int count) {
    const Dtype dtype = of.dtype[piece];
    bool moved = false;
    for (int i = 0; i < 4; ++i) {
      residual.x[i] = within_largest(residual.x[i] + rest.x[i]);
      if (update.x[i] == 0.0f) continue;
      moved = true;
      const float was = widened(dtype, weights.x[i]);
      weights.x[i] = narrowed<Element>(dtype, updated(was, update.x[i], how.scale));
      if (std::is_same_v<Element, float> || failed) continue;
      const float left = left_of_update(update.x[i], was, widened(dtype, weights.x[i]), how.scale);
      residual.x[i] = add_if_finite(residual.x[i], left);
    }
    store<kWhole>(how.residual + entry, count, residual);
    if (how.wipes && marked) store<kWhole>(how.update + entry, count, Four{});
    if (moved) store<kWhole>(place<Element>(of, piece, entry), count, weights);
    if (failed && entry == of.begin[piece]) *place<Element>(of, piece, entry) = narrowed<Element>(dtype, not_a_number());
  }
};

// Deliver fours of a whole tile, from entry on, which is this thread's.
template <class Element>
__device__ __forceinline__ void deliver_share(const Delivery& how, bool failed, const Pieces& weights, int piece,
                                              int64_t entry) {
  Move<Element, true> moves[kRuns];
  UNROLLED for (int i = 0; i < kRuns; ++i) moves[i].look(how, entry + i * kRow);
  UNROLLED for (int i = 0; i < kRuns; ++i) moves[i].read(how, weights, piece, entry + i * kRow, 4);
  UNROLLED for (int i = 0; i < kRuns; ++i) moves[i].deliver(how, failed, weights, piece, entry + i * kRow, 4);
}

template <class Element>
__device__ __forceinline__ void deliver_run(const Delivery& how, bool failed, const Pieces& weights, int piece, int64_t entry,
                                            int count) {
  Move<Element, false> move;
  move.look(how, entry);
  move.read(how, weights, piece, entry, count);
  move.deliver(how, failed, weights, piece, entry, count);
}

__global__ void __launch_bounds__(kThreads, 4) deliver_tiles(const __grid_constant__ Pieces weights, Delivery how) {
  const bool failed = !is_finite(how.first[0]);
  const bool aligned = cuda::is_aligned(how.update) && cuda::is_aligned(how.rest) && cuda::is_aligned(how.residual);
  const int piece = aligned ? only_piece(weights) : -1;
  if (piece >= 0) {
    const bool wide = weights.dtype[piece] == Dtype::f32;
    for (int row = 0; row < kRows; row += kRuns) {
      const int64_t entry = blockIdx.x * kTile + row * kRow + threadIdx.x * 4;
      if (wide) {
        deliver_share<float>(how, failed, weights, piece, entry);
      } else {
        deliver_share<uint16_t>(how, failed, weights, piece, entry);
      }
    }
  } else {
    for_each_run(weights, [&](int its, int64_t entry, int count) {
      if (weights.dtype[its] == Dtype::f32) {
        deliver_run<float>(how, failed, weights, its, entry, count);
      } else {
        deliver_run<uint16_t>(how, failed, weights, its, entry, count);
      }
    });
  }
  if (how.wipes) wipe_marks<kTile>(how.marks, weights.begin[weights.count]);
}

}  // namespace

void offer_progress(const Pieces& weights, OptionalSpan<const float> decays, Span<float> start, Span<float> residual,
                    OptionalSpan<uint8_t> ages, Span<const float> shares, Span<int32_t> flag, OptionalSpan<double> moments,
                    OptionalSpan<uint32_t> scratch, float factor, float of_residual, Queue queue) {
  const bool measured = moments.given() && weights.count > 0;
  auto* const records = reinterpret_cast<MomentsRecord*>(scratch.data);
  CUDA_TRY(cudaMemsetAsync(flag.data, 0, sizeof(int32_t), static_cast<cudaStream_t>(queue.stream)));
  const float* const decays_apart = factor != 1.0f ? decays.data : nullptr;
  const Offer to = {decays_apart, start.data, residual.data, ages.data, shares.data, {factor, of_residual}};
  if (start.size > 0 && measured) {
    LAUNCH(offer_and_measure_tiles, blocks_for(start.size, kMeasured), kThreads, 0, queue, weights, to, flag.data, records);
  } else if (start.size > 0) {
    LAUNCH(offer_tiles, blocks_for(start.size, kTile), kThreads, 0, queue, weights, to, flag.data);
  }
  if (measured) LAUNCH(join_offered, weights.count, kThreads, 0, queue, weights, records, moments.data);
}

void deliver_progress(Span<float> update, Span<const float> first, OptionalSpan<uint8_t> marks, const Pieces& weights,
                      Span<const float> rest, Span<float> residual, float scale, bool wipes, Queue queue) {
  if (update.size == 0) return;
  const Delivery how = {update.data, first.data, marks.data, rest.data, residual.data, scale, wipes};
  LAUNCH(deliver_tiles, blocks_for(update.size, kTile), kThreads, 0, queue, weights, how);
}

}  // namespace gradcomp::cuda
