// Gradients in, on a GPU. A bucket's scattered pieces are read where they lie.
//
// Bytes an entry (f32 pieces): flatten 8, accumulate 20 (12 without velocity, 28 with second, 1 more with sent_in),
// sum_squares 4. One launch each, for the whole bucket; accumulate resets its flag by a memset. Moments and sums leave a record
// of 24 or 8 bytes in scratch for each part, which one more launch joins. A part is a piece's share of a tile (the CPU twins
// call a piece's share of a block a run). Its record's number is its tile's plus its piece's. No two parts have the same
// number, since at least one of the two rises from part to part.

#include "../math_feedback.h"
#include "../ops.h"
#include "block_moments.cuh"
#include "block_pieces.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = kTileThreads;

__global__ void __launch_bounds__(kThreads) flatten_tiles(const __grid_constant__ Pieces grads, float* flat) {
  for_each_run(grads, [&](int piece, int64_t entry, int count) {
    store_four(flat + entry, count, read_piece(grads, piece, entry, count));
  });
}

// What a step keeps beside the residual.
enum class Keeps { nothing, velocity, second };

struct Feedback {
  const float* scales;
  const float* loss_scale;
  float* residual;
  float* velocity;
  float* second;
  uint8_t* sent_in;
  Rule rule;
  uint8_t step;
  bool whole;
};

__device__ __forceinline__ float unscale_of(const Feedback& to) {
  return to.loss_scale != nullptr ? 1.0f / to.loss_scale[0] : 1.0f;
}

struct Added {
  Four gradient;  // 0 for a refused entry
  Four residual;  // the new one
  bool refused;
};

template <Keeps kKeeps>
__device__ __forceinline__ Added add_run(const Pieces& grads, const Feedback& to, float unscale, int piece, int64_t entry,
                                         int count) {
  const float scale = (to.scales != nullptr ? to.scales[piece] : 1.0f) * unscale;
  Added run = {read_piece(grads, piece, entry, count), load_four(to.residual + entry, count), false};
  Four velocity = {}, second = {};
  if (kKeeps != Keeps::nothing) velocity = load_four(to.velocity + entry, count);
  if (kKeeps == Keeps::second) second = load_four(to.second + entry, count);
  FourBytes sent_in = {};
  if (kKeeps != Keeps::nothing && to.sent_in != nullptr) sent_in = load_four(to.sent_in + entry, count);
  bool news = false;
  for (int i = 0; i < 4; ++i) {
    const float given = scale * run.gradient.x[i], g = kKeeps == Keeps::second ? within_root(given) : given;
    const float u = kKeeps == Keeps::nothing ? g : to.rule.next_velocity(velocity.x[i], g);
    const float s = kKeeps == Keeps::second ? to.rule.next_second(second.x[i], g) : 0.0f;
    const uint8_t last = to.whole ? last_sent(sent_in.x[i], to.step, run.residual.x[i]) : sent_in.x[i];
    news |= last != sent_in.x[i];
    sent_in.x[i] = last;
    const float ahead = kKeeps == Keeps::nothing ? g
                        : kKeeps == Keeps::velocity
                            ? to.rule.ahead(g, u)
                            : to.rule.ahead(g, u, s, to.sent_in != nullptr && has_waited(last, to.step));
    const bool good = is_finite(given);
    run.refused |= !good;
    run.gradient.x[i] = good ? given : 0.0f;
    velocity.x[i] = good ? u : velocity.x[i];
    second.x[i] = good ? s : second.x[i];
    run.residual.x[i] = to.rule.next_residual(run.residual.x[i], good ? ahead : 0.0f);
  }
  if (kKeeps != Keeps::nothing) store_four(to.velocity + entry, count, velocity);
  if (kKeeps == Keeps::second) store_four(to.second + entry, count, second);
  if (kKeeps != Keeps::nothing && to.sent_in != nullptr && news) store_four(to.sent_in + entry, count, sent_in);
  store_four(to.residual + entry, count, run.residual);
  return run;
}

template <Keeps kKeeps>
__global__ void __launch_bounds__(kThreads) add_tiles(const __grid_constant__ Pieces grads, Feedback to, int32_t* flag) {
  const float unscale = unscale_of(to);
  bool refused = false;
  for_each_run(grads, [&](int piece, int64_t entry, int count) {
    refused |= add_run<kKeeps>(grads, to, unscale, piece, entry, count).refused;
  });
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
}

template <Keeps kKeeps>
__global__ void __launch_bounds__(kThreads)
    add_and_measure_tiles(const __grid_constant__ Pieces grads, Feedback to, bool raw, int32_t* flag, MomentsRecord* records) {
  const float unscale = unscale_of(to);
  bool refused = false;
  for_each_part(grads, [&](int piece, int64_t begin, int64_t end) {
    Shifted<float> mine = {};
    for_each_run_of(begin, end, [&](int64_t entry, int count) {
      const Added run = add_run<kKeeps>(grads, to, unscale, piece, entry, count);
      refused |= run.refused;
      Four of = run.residual;
      for (int i = 0; i < 4; ++i) of.x[i] = raw ? run.gradient.x[i] : of.x[i];
      include(mine, of, run.residual, count);
    });
    const Shifted<float> all = join_block<kThreads>(mine, Merge{});
    if (threadIdx.x == 0) records[blockIdx.x + piece] = record_of(all);
  });
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
}

__global__ void __launch_bounds__(kThreads) square_tiles(const __grid_constant__ Pieces grads, SumRecord* records) {
  for_each_part(grads, [&](int piece, int64_t begin, int64_t end) {
    double mine = 0;
    for_each_run_of(begin, end, [&](int64_t entry, int count) {
      const Four g = read_piece(grads, piece, entry, count);
      for (const double x : g.x) mine += x * x;
    });
    const double all = join_block<kThreads>(mine, Add{});
    if (threadIdx.x == 0) records[blockIdx.x + piece] = record_of(all);
  });
}

// Join the records of the parts of the block's piece, for thread 0.
template <class Record, class Join>
__device__ __forceinline__ auto join_parts(const Pieces& grads, const Record* records, Join join) {
  const int64_t begin = grads.begin[blockIdx.x], end = grads.begin[blockIdx.x + 1];
  decltype(read_record(*records, 0.0)) mine = {};
  const int64_t tiles = begin < end ? (end + kTile - 1) / kTile : 0;
  for (int64_t tile = begin / kTile + threadIdx.x; tile < tiles; tile += kThreads) {
    const int64_t from = tile * kTile > begin ? tile * kTile : begin;
    const int64_t to = (tile + 1) * kTile < end ? (tile + 1) * kTile : end;
    mine = join(mine, read_record(records[tile + blockIdx.x], static_cast<double>(to - from)));
  }
  return join_block<kThreads>(mine, join);
}

__global__ void __launch_bounds__(kThreads)
    join_moments(const __grid_constant__ Pieces grads, const MomentsRecord* records, double* moments) {
  Shifted<double> all = join_parts(grads, records, Merge{});
  if (threadIdx.x != 0) return;
  all.moments.mean += all.pivot;
  store_moments(all.moments, moments + kMoments * blockIdx.x);
}

__global__ void __launch_bounds__(kThreads)
    join_squares(const __grid_constant__ Pieces grads, const SumRecord* records, double* squares) {
  const double all = join_parts(grads, records, Add{});
  if (threadIdx.x == 0) squares[blockIdx.x] = all;
}

template <Keeps kKeeps>
void launch_add(unsigned blocks, const Pieces& grads, const Feedback& to, bool raw, int32_t* flag, MomentsRecord* records,
                Queue queue) {
  if (records != nullptr) {
    LAUNCH(add_and_measure_tiles<kKeeps>, blocks, kThreads, 0, queue, grads, to, raw, flag, records);
  } else {
    LAUNCH(add_tiles<kKeeps>, blocks, kThreads, 0, queue, grads, to, flag);
  }
}

}  // namespace

void flatten(const Pieces& grads, Span<float> flat, Queue queue) {
  if (flat.size == 0) return;
  LAUNCH(flatten_tiles, blocks_for(flat.size, kTile), kThreads, 0, queue, grads, flat.data);
}

void sum_squares(const Pieces& grads, Span<double> squares, Span<uint32_t> scratch, Queue queue) {
  auto* const records = reinterpret_cast<SumRecord*>(scratch.data);
  const int64_t n = grads.size();
  if (n > 0) LAUNCH(square_tiles, blocks_for(n, kTile), kThreads, 0, queue, grads, records);
  if (grads.count > 0) LAUNCH(join_squares, grads.count, kThreads, 0, queue, grads, records, squares.data);
}

int64_t accumulate_scratch(int64_t n, int64_t pieces) {
  return (blocks_for(n, kTile) + pieces) * int64_t{sizeof(MomentsRecord) / sizeof(uint32_t)};
}

void accumulate(const Pieces& grads, OptionalSpan<const float> scales, OptionalSpan<const float> loss_scale,
                Span<float> residual, OptionalSpan<float> velocity, OptionalSpan<float> second, OptionalSpan<uint8_t> sent_in,
                Span<int32_t> flag, OptionalSpan<double> moments, OptionalSpan<uint32_t> /* peaks */,
                OptionalSpan<uint32_t> scratch, float of_residual, float momentum, float fresh, float of_gradient,
                float of_velocity, float decay, float fresh_square, float root_scale, float epsilon, float waiting,
                int64_t step, bool whole, bool raw, Queue queue) {
  const bool measured = moments.given() && grads.count > 0;
  auto* const records = measured ? reinterpret_cast<MomentsRecord*>(scratch.data) : nullptr;
  CUDA_TRY(cudaMemsetAsync(flag.data, 0, sizeof(int32_t), static_cast<cudaStream_t>(queue.stream)));
  if (residual.size > 0) {
    const unsigned blocks = blocks_for(residual.size, kTile);
    const Feedback to = {
        scales.data,
        loss_scale.data,
        residual.data,
        velocity.data,
        second.data,
        sent_in.data,
        {of_residual, momentum, fresh, of_gradient, of_velocity, decay, fresh_square, root_scale, epsilon, waiting},
        static_cast<uint8_t>(step),
        whole};
    const auto launch = second.given()     ? launch_add<Keeps::second>
                        : velocity.given() ? launch_add<Keeps::velocity>
                                           : launch_add<Keeps::nothing>;
    launch(blocks, grads, to, raw, flag.data, records, queue);
  }
  if (measured) LAUNCH(join_moments, grads.count, kThreads, 0, queue, grads, records, moments.data);
}

}  // namespace gradcomp::cuda
