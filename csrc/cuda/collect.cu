// Gradients in, on a GPU. A bucket's scattered pieces are read where they lie.
//
// Bytes an entry (f32 pieces): flatten 8, collect 8. One launch each, for the whole bucket; collect resets its flag by a
// memset. Moments leave a record of 24 bytes in scratch for each part, which one more launch joins.

#include "../math.h"
#include "../ops.h"
#include "block_pieces.cuh"
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

// Write a run of gradients, with 0 for an entry that is not finite. Returns true if there was one. kWhole: all four are there
// and aligned.
template <bool kWhole>
__device__ __forceinline__ bool put(float* flat, int64_t entry, int count, Four& run) {
  bool refused = false;
  for (float& x : run.x) {
    const bool good = is_finite(x);
    refused |= !good;
    x = good ? within_largest(x) : 0.0f;
  }
  store<kWhole>(flat + entry, count, run);
  return refused;
}

// Write a whole tile, whose runs are all read before the first is used. Returns true if an entry was refused.
__device__ __forceinline__ bool put_whole(const Pieces& grads, float* flat, int piece, int64_t tile, Four (&runs)[kRows]) {
  const int64_t entry = tile + threadIdx.x * 4;
  read_share(grads, piece, entry, runs);
  bool refused = false;
  UNROLLED for (int i = 0; i < kRows; ++i) { refused |= put<true>(flat, entry + i * kRow, 4, runs[i]); }
  return refused;
}

// Write a run of any piece. Returns true if an entry was refused.
__device__ __forceinline__ bool put_run(const Pieces& grads, float* flat, int piece, int64_t entry, int count, Four& run) {
  run = read_piece(grads, piece, entry, count);
  return put<false>(flat, entry, count, run);
}

__global__ void __launch_bounds__(kThreads) collect_tiles(const __grid_constant__ Pieces grads, float* flat, int32_t* flag) {
  bool refused = false;
  const int piece = is_aligned(flat) ? only_piece(grads) : -1;
  if (piece >= 0) {
    Four runs[kRows];
    refused = put_whole(grads, flat, piece, blockIdx.x * kTile, runs);
  } else {
    for_each_run(grads, [&](int its, int64_t entry, int count) {
      Four run;
      refused |= put_run(grads, flat, its, entry, count, run);
    });
  }
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
}

__global__ void __launch_bounds__(kThreads)
    collect_and_measure_tiles(const __grid_constant__ Pieces grads, float* flat, int32_t* flag, MomentsRecord* records) {
  const bool aligned = is_aligned(flat);
  bool refused = false;
  for_each_part<kMeasured>(grads, [&](int piece, int64_t begin, int64_t end) {
    Shifted<float> mine = {};
    for_each_tile_of(
        grads, piece, begin, end, aligned,
        [&](int64_t tile) {
          Four runs[kRows];
          refused |= put_whole(grads, flat, piece, tile, runs);
          include(mine, runs);
        },
        [&](int64_t entry, int count) {
          Four run;
          refused |= put_run(grads, flat, piece, entry, count, run);
          include(mine, run, count);
        });
    const Shifted<float> all = join_block<kThreads>(mine, Merge{});
    if (threadIdx.x == 0) records[blockIdx.x + piece] = record_of(all);
  });
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
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

int64_t collect_scratch(int64_t n, int64_t pieces) {
  return records_of(n, pieces) * int64_t{sizeof(MomentsRecord) / sizeof(uint32_t)};
}

void collect(const Pieces& grads, Span<float> flat, Span<int32_t> flag, OptionalSpan<double> moments,
             OptionalSpan<uint32_t> scratch, Queue queue) {
  CUDA_TRY(cudaMemsetAsync(flag.data, 0, sizeof(int32_t), static_cast<cudaStream_t>(queue.stream)));
  const int64_t n = flat.size;
  if (!moments.given() || grads.count == 0) {
    if (n > 0) LAUNCH(collect_tiles, blocks_for(n, kTile), kThreads, 0, queue, grads, flat.data, flag.data);
    return;
  }
  auto* const records = reinterpret_cast<MomentsRecord*>(scratch.data);
  if (n > 0) {
    LAUNCH(collect_and_measure_tiles, blocks_for(n, kMeasured), kThreads, 0, queue, grads, flat.data, flag.data, records);
  }
  LAUNCH(join_moments, grads.count, kThreads, 0, queue, grads, records, moments.data);
}

}  // namespace gradcomp::cuda
