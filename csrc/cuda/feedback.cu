// Gradients in, on a GPU. A bucket's scattered pieces are read where they lie.
//
// Bytes an entry (f32 pieces): flatten 8, accumulate 20 (12 without velocity, 28 with second, 1 more with sent_in, 0.06 with
// peaks). One launch each, for the whole bucket; accumulate resets its flag by a memset. Moments leave a record of 24 bytes in
// scratch for each part, which one more launch joins.

#include "../math_feedback.h"
#include "../ops.h"
#include "block_peaks.cuh"
#include "block_records.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = kTileThreads;

__global__ void __launch_bounds__(kThreads) flatten_tiles(const __grid_constant__ Pieces grads, float* flat) {
  const int piece = is_aligned(flat) ? only_piece(grads) : -1;
  if (piece >= 0) {
    const int64_t entry = blockIdx.x * kTile + threadIdx.x * 4;
    Four share[kRows];
    read_share(grads, piece, entry, share);
    UNROLLED for (int i = 0; i < kRows; ++i) store_whole(flat + entry + i * kRow, share[i]);
  } else {
    for_each_run(grads, [&](int its, int64_t entry, int count) {
      store_four(flat + entry, count, read_piece(grads, its, entry, count));
    });
  }
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
  uint32_t* peaks;
  Rule rule;
  uint8_t step;
  bool whole;
};

__device__ __forceinline__ bool is_aligned(const Feedback& to) {
  return cuda::is_aligned(to.residual) && cuda::is_aligned(to.velocity) && cuda::is_aligned(to.second) &&
         cuda::is_aligned(to.sent_in);
}

__device__ __forceinline__ float scale_of(const Feedback& to, int piece) {
  return (to.scales != nullptr ? to.scales[piece] : 1.0f) * (to.loss_scale != nullptr ? 1.0f / to.loss_scale[0] : 1.0f);
}

// What a step keeps of a run, then its new residual. kWhole: all four are there and aligned.
template <Keeps kKeeps, bool kWhole>
struct Run {
  Four residual, velocity = {}, second = {};
  FourBytes sent_in = {};

  __device__ __forceinline__ void read(const Feedback& to, int64_t entry, int count) {
    residual = load<kWhole>(to.residual + entry, count);
    if (kKeeps != Keeps::nothing) velocity = load<kWhole>(to.velocity + entry, count);
    if (kKeeps == Keeps::second) second = load<kWhole>(to.second + entry, count);
  }

  // After all other loads: its bytes are taken apart where they are read.
  __device__ __forceinline__ void read_sent_in(const Feedback& to, int64_t entry, int count) {
    if (kKeeps != Keeps::nothing && to.sent_in != nullptr) sent_in = load<kWhole>(to.sent_in + entry, count);
  }

  // Add a gradient, whose refused entries become 0, and write. Returns true if there are any.
  __device__ __forceinline__ bool add(const Feedback& to, float scale, int64_t entry, int count, Four& gradient) {
    bool news = false, refused = false;
    for (int i = 0; i < 4; ++i) {
      const float given = scale * gradient.x[i], g = kKeeps == Keeps::second ? within_root(given) : given;
      const float u = kKeeps == Keeps::nothing ? g : to.rule.next_velocity(velocity.x[i], g);
      const float s = kKeeps == Keeps::second ? to.rule.next_second(second.x[i], g) : 0.0f;
      const uint8_t last = to.whole ? last_sent(sent_in.x[i], to.step, residual.x[i]) : sent_in.x[i];
      news |= last != sent_in.x[i];
      sent_in.x[i] = last;
      const float ahead = kKeeps == Keeps::nothing ? g
                          : kKeeps == Keeps::velocity
                              ? to.rule.ahead(g, u)
                              : to.rule.ahead(g, u, s, to.sent_in != nullptr && has_waited(last, to.step));
      const bool good = is_finite(given);
      refused |= !good;
      gradient.x[i] = good ? given : 0.0f;
      velocity.x[i] = good ? u : velocity.x[i];
      second.x[i] = good ? s : second.x[i];
      residual.x[i] = to.rule.next_residual(residual.x[i], good ? ahead : 0.0f);
    }
    if (kKeeps != Keeps::nothing) store<kWhole>(to.velocity + entry, count, velocity);
    if (kKeeps == Keeps::second) store<kWhole>(to.second + entry, count, second);
    if (kKeeps != Keeps::nothing && to.sent_in != nullptr && news) store<kWhole>(to.sent_in + entry, count, sent_in);
    store<kWhole>(to.residual + entry, count, residual);
    return refused;
  }
};

// Add a whole tile, whose runs of some rows are read before the first of them is used. Then call use(gradients, residuals) with
// them. Returns true if an entry was refused.
template <Keeps kKeeps, class Use>
__device__ __forceinline__ bool add_whole(const Pieces& grads, const Feedback& to, int piece, int64_t tile, Use use) {
  // As many as fit into the registers of half a multiprocessor's threads.
  constexpr int kRuns = kKeeps == Keeps::nothing ? kRows : kKeeps == Keeps::velocity ? kRows / 2 : 1;
  bool refused = false;
  for (int row = 0; row < kRows; row += kRuns) {
    const int64_t entry = tile + row * kRow + threadIdx.x * 4;
    Run<kKeeps, true> runs[kRuns];
    Four gradients[kRuns], residuals[kRuns];
    UNROLLED for (int i = 0; i < kRuns; ++i) runs[i].read(to, entry + i * kRow, 4);
    read_share(grads, piece, entry, gradients);
    UNROLLED for (int i = 0; i < kRuns; ++i) runs[i].read_sent_in(to, entry + i * kRow, 4);
    const float scale = scale_of(to, piece);  // no load above waits for this one
    UNROLLED for (int i = 0; i < kRuns; ++i) refused |= runs[i].add(to, scale, entry + i * kRow, 4, gradients[i]);
    UNROLLED for (int i = 0; i < kRuns; ++i) residuals[i] = runs[i].residual;
    use(entry, gradients, residuals);
  }
  return refused;
}

template <Keeps kKeeps>
__global__ void __launch_bounds__(kThreads) add_tiles(const __grid_constant__ Pieces grads, Feedback to, int32_t* flag) {
  __shared__ uint32_t of_lines[kTile / kLine];
  const BlockPeaks<kTile> peaks = {of_lines, to.peaks};
  bool refused = false;
  const int piece = is_aligned(to) ? only_piece(grads) : -1;
  if (piece >= 0) {
    refused = add_whole<kKeeps>(grads, to, piece, blockIdx.x * kTile,
                                [&](int64_t entry, const auto&, const auto& residuals) { peaks.note(entry, residuals); });
  } else {
    peaks.clear();
    for_each_run(grads, [&](int its, int64_t entry, int count) {
      Run<kKeeps, false> run;
      run.read(to, entry, count);
      run.read_sent_in(to, entry, count);
      Four gradient = read_piece(grads, its, entry, count);
      refused |= run.add(to, scale_of(to, its), entry, count, gradient);
    });
  }
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
  peaks.store(to.residual, grads.begin[grads.count]);
}

template <Keeps kKeeps>
__global__ void __launch_bounds__(kThreads)
    add_and_measure_tiles(const __grid_constant__ Pieces grads, Feedback to, bool raw, int32_t* flag, MomentsRecord* records) {
  __shared__ uint32_t of_lines[kMeasured / kLine];
  const BlockPeaks<kMeasured> peaks = {of_lines, to.peaks};
  const bool aligned = is_aligned(to);
  bool refused = false;
  peaks.clear();
  for_each_part<kMeasured>(grads, [&](int piece, int64_t begin, int64_t end) {
    Shifted<float> mine = {};
    for_each_tile_of(
        grads, piece, begin, end, aligned,
        [&](int64_t tile) {
          refused |= add_whole<kKeeps>(grads, to, piece, tile, [&](int64_t entry, auto& gradients, const auto& residuals) {
            for (auto& four : gradients) {
              for (int i = 0; i < 4; ++i) four.x[i] = raw ? four.x[i] : residuals[&four - gradients].x[i];
            }
            include(mine, gradients, residuals);
            peaks.note(entry, residuals);
          });
        },
        [&](int64_t entry, int count) {
          Run<kKeeps, false> run;
          run.read(to, entry, count);
          run.read_sent_in(to, entry, count);
          Four of = read_piece(grads, piece, entry, count);
          refused |= run.add(to, scale_of(to, piece), entry, count, of);
          for (int i = 0; i < 4; ++i) of.x[i] = raw ? of.x[i] : run.residual.x[i];
          include(mine, of, run.residual, count);
        });
    const Shifted<float> all = join_block<kThreads>(mine, Merge{});
    if (threadIdx.x == 0) records[blockIdx.x + piece] = record_of(all);
  });
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
  peaks.store(to.residual, grads.begin[grads.count]);
}

__global__ void __launch_bounds__(kThreads)
    join_moments(const __grid_constant__ Pieces grads, const MomentsRecord* records, double* moments) {
  const Moments<double> all = join_records(grads, records);
  if (threadIdx.x == 0) store_moments(all, moments + kMoments * blockIdx.x);
}

template <Keeps kKeeps>
void launch_add(const Pieces& grads, const Feedback& to, bool raw, int32_t* flag, MomentsRecord* records, Queue queue) {
  if (records != nullptr) {
    LAUNCH(add_and_measure_tiles<kKeeps>, blocks_for(grads.size(), kMeasured), kThreads, 0, queue, grads, to, raw, flag,
           records);
  } else {
    LAUNCH(add_tiles<kKeeps>, blocks_for(grads.size(), kTile), kThreads, 0, queue, grads, to, flag);
  }
}

}  // namespace

void flatten(const Pieces& grads, Span<float> flat, Queue queue) {
  if (flat.size == 0) return;
  LAUNCH(flatten_tiles, blocks_for(flat.size, kTile), kThreads, 0, queue, grads, flat.data);
}

int64_t accumulate_scratch(int64_t n, int64_t pieces) {
  return records_of(n, pieces) * int64_t{sizeof(MomentsRecord) / sizeof(uint32_t)};
}

void accumulate(const Pieces& grads, OptionalSpan<const float> scales, OptionalSpan<const float> loss_scale,
                Span<float> residual, OptionalSpan<float> velocity, OptionalSpan<float> second, OptionalSpan<uint8_t> sent_in,
                Span<int32_t> flag, OptionalSpan<double> moments, OptionalSpan<uint32_t> peaks, OptionalSpan<uint32_t> scratch,
                float of_residual, float momentum, float fresh, float of_gradient, float of_velocity, float decay,
                float fresh_square, float root_scale, float epsilon, float waiting, int64_t step, bool whole, bool raw,
                Queue queue) {
  const bool measured = moments.given() && grads.count > 0;
  auto* const records = measured ? reinterpret_cast<MomentsRecord*>(scratch.data) : nullptr;
  CUDA_TRY(cudaMemsetAsync(flag.data, 0, sizeof(int32_t), static_cast<cudaStream_t>(queue.stream)));
  if (residual.size > 0) {
    const Feedback to = {
        scales.data,
        loss_scale.data,
        residual.data,
        velocity.data,
        second.data,
        sent_in.data,
        peaks.data,
        {of_residual, momentum, fresh, of_gradient, of_velocity, decay, fresh_square, root_scale, epsilon, waiting},
        static_cast<uint8_t>(step),
        whole};
    const auto launch = second.given()     ? launch_add<Keeps::second>
                        : velocity.given() ? launch_add<Keeps::velocity>
                                           : launch_add<Keeps::nothing>;
    launch(grads, to, raw, flag.data, records, queue);
  }
  if (measured) LAUNCH(join_moments, grads.count, kThreads, 0, queue, grads, records, moments.data);
}

}  // namespace gradcomp::cuda
