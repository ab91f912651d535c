// Gradients in and updates out, on a GPU: a bucket's scattered pieces are read or written where they lie.
//
// Bytes an entry (f32 pieces): flatten 8, accumulate 20 (12 without velocity), spread 8. One launch each, for the whole bucket;
// accumulate resets its flag with one more.

#include "../math.h"
#include "../ops.h"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kTile = 4096;  // entries of a block: four times four for each thread

// The last of pieces low .. high that begins at or before entry. Empty pieces are never found.
__device__ __forceinline__ int piece_of(const Pieces& grads, int64_t entry, int low, int high) {
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (grads.begin[middle] <= entry) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class T>
__device__ __forceinline__ T* place(const Pieces& grads, int piece, int64_t entry) {
  return static_cast<T*>(grads.data[piece]) + (entry - grads.begin[piece]);
}

// Entries entry .. entry + count of the bucket, all of one piece.
__device__ __forceinline__ Four read_piece(const Pieces& grads, int piece, int64_t entry, int count) {
  const Dtype dtype = grads.dtype[piece];
  if (dtype == Dtype::f32) return load_four(place<const float>(grads, piece, entry), count);
  const FourHalves halves = load_four(place<const uint16_t>(grads, piece, entry), count);
  Four four;
  for (int i = 0; i < 4; ++i) four.x[i] = dtype == Dtype::f16 ? f16_to_float(halves.x[i]) : bf16_to_float(halves.x[i]);
  return four;
}

__device__ __forceinline__ void write_piece(const Pieces& grads, int piece, int64_t entry, int count, const Four& four) {
  const Dtype dtype = grads.dtype[piece];
  if (dtype == Dtype::f32) return store_four(place<float>(grads, piece, entry), count, four);
  FourHalves halves;
  for (int i = 0; i < 4; ++i) halves.x[i] = dtype == Dtype::f16 ? float_to_f16(four.x[i]) : float_to_bf16(four.x[i]);
  store_four(place<uint16_t>(grads, piece, entry), count, halves);
}

// work(piece, entry, count) for this thread's share of the block's tile: runs of at most four entries of one piece, which begin
// at multiples of four, except where a piece ends in between.
template <class Work>
__device__ __forceinline__ void for_each_run(const Pieces& grads, Work work) {
  const int64_t n = grads.begin[grads.count];
  const int64_t tile = blockIdx.x * kTile;
  const int64_t tile_end = tile + kTile < n ? tile + kTile : n;
  const int low = piece_of(grads, tile, 0, grads.count - 1);
  const int high = piece_of(grads, tile_end - 1, low, grads.count - 1);
  for (int64_t entry = tile + threadIdx.x * 4; entry < tile_end; entry += kThreads * 4) {
    const int64_t end = entry + 4 < n ? entry + 4 : n;
    int piece = piece_of(grads, entry, low, high);
    for (int64_t at = entry; at < end;) {
      while (grads.begin[piece + 1] <= at) ++piece;
      const int64_t stop = grads.begin[piece + 1] < end ? grads.begin[piece + 1] : end;
      work(piece, at, static_cast<int>(stop - at));
      at = stop;
    }
  }
}

__global__ void __launch_bounds__(kThreads) flatten_tiles(const __grid_constant__ Pieces grads, float* flat) {
  for_each_run(grads, [&](int piece, int64_t entry, int count) {
    store_four(flat + entry, count, read_piece(grads, piece, entry, count));
  });
}

__global__ void __launch_bounds__(kThreads) spread_tiles(const float* flat, const __grid_constant__ Pieces grads, float scale) {
  for_each_run(grads, [&](int piece, int64_t entry, int count) {
    Four four = load_four(flat + entry, count);
    for (float& x : four.x) x = scale * x;
    write_piece(grads, piece, entry, count, four);
  });
}

__global__ void __launch_bounds__(kThreads) add_tiles(const __grid_constant__ Pieces grads, float* value, int32_t* flag) {
  bool refused = false;
  for_each_run(grads, [&](int piece, int64_t entry, int count) {
    const Four g = read_piece(grads, piece, entry, count);
    Four x = load_four(value + entry, count);
    for (int i = 0; i < 4; ++i) {
      const float sum = x.x[i] + g.x[i];
      const bool good = is_finite(sum);
      refused |= !good;
      x.x[i] = good ? sum : x.x[i];
    }
    store_four(value + entry, count, x);
  });
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
}

// What reaches the value is ahead_gradient * g + ahead_velocity * velocity: 0 and 1, or 1 and m for Nesterov's.
__global__ void __launch_bounds__(kThreads)
    add_tiles_with_momentum(const __grid_constant__ Pieces grads, float* value, float* velocity, int32_t* flag, float momentum,
                            float ahead_gradient, float ahead_velocity) {
  bool refused = false;
  for_each_run(grads, [&](int piece, int64_t entry, int count) {
    const Four g = read_piece(grads, piece, entry, count);
    Four x = load_four(value + entry, count);
    Four v = load_four(velocity + entry, count);
    for (int i = 0; i < 4; ++i) {
      const float u = momentum * v.x[i] + g.x[i];
      const float sum = x.x[i] + (ahead_gradient * g.x[i] + ahead_velocity * u);
      const bool good = is_finite(sum) && is_finite(u);
      refused |= !good;
      v.x[i] = good ? u : v.x[i];
      x.x[i] = good ? sum : x.x[i];
    }
    store_four(velocity + entry, count, v);
    store_four(value + entry, count, x);
  });
  if (__syncthreads_or(refused) && threadIdx.x == 0) atomicOr(flag, 1);
}

}  // namespace

void flatten(const Pieces& grads, Span<float> flat, Queue queue) {
  if (flat.size == 0) return;
  LAUNCH(flatten_tiles, blocks_for(flat.size, kTile), kThreads, 0, queue, grads, flat.data);
}

void accumulate(const Pieces& grads, Span<float> value, Span<float> velocity, Span<int32_t> flag, float momentum, bool nesterov,
                Queue queue) {
  CUDA_TRY(cudaMemsetAsync(flag.data, 0, sizeof(int32_t), static_cast<cudaStream_t>(queue.stream)));
  if (value.size == 0) return;
  const unsigned blocks = blocks_for(value.size, kTile);
  if (velocity.given()) {
    LAUNCH(add_tiles_with_momentum, blocks, kThreads, 0, queue, grads, value.data, velocity.data, flag.data, momentum,
           nesterov ? 1.0f : 0.0f, nesterov ? momentum : 1.0f);
  } else {
    LAUNCH(add_tiles, blocks, kThreads, 0, queue, grads, value.data, flag.data);
  }
}

void spread(Span<const float> flat, const Pieces& grads, float scale, Queue queue) {
  if (flat.size == 0) return;
  LAUNCH(spread_tiles, blocks_for(flat.size, kTile), kThreads, 0, queue, flat.data, grads, scale);
}

}  // namespace gradcomp::cuda
