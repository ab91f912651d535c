// Gradients in, on a GPU. A bucket's scattered pieces are read where they lie.
//
// Bytes an entry (f32 pieces): flatten 8, accumulate 12 (0.06 more with peaks). One launch each, for the whole bucket;
// accumulate resets its flag by a memset. Moments leave a record of 24 bytes in scratch for each part, which one more launch
// joins.

#include "../math.h"
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

struct Feedback {
  const float* scales;
  float* residual;
  uint32_t* peaks;
  float of_residual;
};

__device__ __forceinline__ float scale_of(const Feedback& to, int piece) {
  return to.scales != nullptr ? to.scales[piece] : 1.0f;
}

// Add a run of gradients to its residual, and write it. Returns true if an entry was refused. kWhole: all four are there and
// aligned.
template <bool kWhole>
__device__ __forceinline__ bool add(const Feedback& to, float scale, int64_t entry, int count, const Four& gradient,
                                    Four& residual) {
  bool refused = false;
  for (int i = 0; i < 4; ++i) {
    const float g = scale * gradient.x[i];
    const bool good = is_finite(g);
    refused |= !good;
    residual.x[i] = next_residual(residual.x[i], good ? g : 0.0f, to.of_residual);
  }
  store<kWhole>(to.residual + entry, count, residual);
  return refused;
}

// Add a whole tile, whose runs are all read before the first is used. Then call use(residuals). Returns true if an entry was
// refused.
template <class Use>
__device__ __forceinline__ bool add_whole(const Pieces& grads, const Feedback& to, int piece, int64_t tile, Use use) {
  const int64_t entry = tile + threadIdx.x * 4;
  Four residuals[kRows], gradients[kRows];
  UNROLLED for (int i = 0; i < kRows; ++i) residuals[i] = load_whole(to.residual + entry + i * kRow);
  read_share(grads, piece, entry, gradients);
  const float scale = scale_of(to, piece);  // no load above waits for this one
  bool refused = false;
  UNROLLED for (int i = 0; i < kRows; ++i) { refused |= add<true>(to, scale, entry + i * kRow, 4, gradients[i], residuals[i]); }
  use(entry, residuals);
  return refused;
}

// Add a run of any piece. Returns true if an entry was refused.
__device__ __forceinline__ bool add_run(const Pieces& grads, const Feedback& to, int piece, int64_t entry, int count,
                                        Four& residual) {
  residual = load_four(to.residual + entry, count);
  return add<false>(to, scale_of(to, piece), entry, count, read_piece(grads, piece, entry, count), residual);
}

__global__ void __launch_bounds__(kThreads) add_tiles(const __grid_constant__ Pieces grads, Feedback to, int32_t* flag) {
  __shared__ uint32_t of_lines[kTile / kLine];
  const BlockPeaks<kTile> peaks = {of_lines, to.peaks};
  bool refused = false;
  const int piece = is_aligned(to.residual) ? only_piece(grads) : -1;
  if (piece >= 0) {
    refused = add_whole(grads, to, piece, blockIdx.x * kTile,
                        [&](int64_t entry, const auto& residuals) { peaks.note(entry, residuals); });
  } else {
    peaks.clear();
    for_each_run(grads, [&](int its, int64_t entry, int count) {
      Four residual;
      refused |= add_run(grads, to, its, entry, count, residual);
    });
  }
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
  peaks.store(to.residual, grads.begin[grads.count]);
}

__global__ void __launch_bounds__(kThreads)
    add_and_measure_tiles(const __grid_constant__ Pieces grads, Feedback to, int32_t* flag, MomentsRecord* records) {
  __shared__ uint32_t of_lines[kMeasured / kLine];
  const BlockPeaks<kMeasured> peaks = {of_lines, to.peaks};
  const bool aligned = is_aligned(to.residual);
  bool refused = false;
  peaks.clear();
  for_each_part<kMeasured>(grads, [&](int piece, int64_t begin, int64_t end) {
    Shifted<float> mine = {};
    for_each_tile_of(
        grads, piece, begin, end, aligned,
        [&](int64_t tile) {
          refused |= add_whole(grads, to, piece, tile, [&](int64_t entry, const auto& residuals) {
            include(mine, residuals);
            peaks.note(entry, residuals);
          });
        },
        [&](int64_t entry, int count) {
          Four residual;
          refused |= add_run(grads, to, piece, entry, count, residual);
          include(mine, residual, count);
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

}  // namespace

void flatten(const Pieces& grads, Span<float> flat, Queue queue) {
  if (flat.size == 0) return;
  LAUNCH(flatten_tiles, blocks_for(flat.size, kTile), kThreads, 0, queue, grads, flat.data);
}

int64_t accumulate_scratch(int64_t n, int64_t pieces) {
  return records_of(n, pieces) * int64_t{sizeof(MomentsRecord) / sizeof(uint32_t)};
}

void accumulate(const Pieces& grads, OptionalSpan<const float> scales, Span<float> residual, Span<int32_t> flag,
                OptionalSpan<double> moments, OptionalSpan<uint32_t> peaks, OptionalSpan<uint32_t> scratch, float of_residual,
                Queue queue) {
  CUDA_TRY(cudaMemsetAsync(flag.data, 0, sizeof(int32_t), static_cast<cudaStream_t>(queue.stream)));
  const Feedback to = {scales.data, residual.data, peaks.data, of_residual};
  const int64_t n = residual.size;
  if (!moments.given() || grads.count == 0) {
    if (n > 0) LAUNCH(add_tiles, blocks_for(n, kTile), kThreads, 0, queue, grads, to, flag.data);
    return;
  }
  auto* const records = reinterpret_cast<MomentsRecord*>(scratch.data);
  if (n > 0) LAUNCH(add_and_measure_tiles, blocks_for(n, kMeasured), kThreads, 0, queue, grads, to, flag.data, records);
  LAUNCH(join_moments, grads.count, kThreads, 0, queue, grads, records, moments.data);
}

}  // namespace gradcomp::cuda
