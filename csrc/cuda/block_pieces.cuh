// A block's share of a bucket's pieces: a tile of the bucket, in runs of up to four entries for each thread.
#pragma once

#include <cstdint>

#include "../math.h"
#include "../span.h"
#include "launch.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {

constexpr unsigned kTileThreads = 256;
// Entries of a block: four times four for each thread.
constexpr int64_t kTile = 4096;
// Entries of a row: a four for each thread. A tile has four.
constexpr int64_t kRow = 4 * kTileThreads;
constexpr int kRows = kTile / kRow;

// Find the last of pieces low .. high that begins at or before entry. It is never an empty one.
static __device__ __forceinline__ int piece_of(const Pieces& grads, int64_t entry, int low, int high) {
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

// Find an entry of the bucket in its piece.
template <class T>
static __device__ __forceinline__ T* place(const Pieces& grads, int piece, int64_t entry) {
  return static_cast<T*>(grads.data[piece]) + (entry - grads.begin[piece]);
}

// An entry of a piece of this type as a float.
static __device__ __forceinline__ float widened(Dtype, float entry) { return entry; }
static __device__ __forceinline__ float widened(Dtype dtype, uint16_t half) {
  return dtype == Dtype::f16 ? f16_to_float(half) : bf16_to_float(half);
}

// Read `count` entries of the bucket, at most four, all of one piece.
static __device__ __forceinline__ Four read_piece(const Pieces& grads, int piece, int64_t entry, int count) {
  const Dtype dtype = grads.dtype[piece];
  if (dtype == Dtype::f32) return load_four(place<const float>(grads, piece, entry), count);
  const FourHalves halves = load_four(place<const uint16_t>(grads, piece, entry), count);
  Four four;
  for (int i = 0; i < 4; ++i) four.x[i] = widened(dtype, halves.x[i]);
  return four;
}

// Read fours of a whole tile, from entry on, which is this thread's. The first is used after the last is asked for.
template <int kFours>
static __device__ __forceinline__ void read_share(const Pieces& grads, int piece, int64_t entry, Four (&share)[kFours]) {
  const Dtype dtype = grads.dtype[piece];
  if (dtype == Dtype::f32) {
    const float* const from = place<const float>(grads, piece, entry);
    UNROLLED for (int i = 0; i < kFours; ++i) share[i] = load_whole(from + i * kRow);
  } else {
    const uint16_t* const from = place<const uint16_t>(grads, piece, entry);
    FourHalves halves[kFours];
    UNROLLED for (int i = 0; i < kFours; ++i) halves[i] = load_whole(from + i * kRow);
    UNROLLED for (int i = 0; i < kFours; ++i) {
      UNROLLED for (int j = 0; j < 4; ++j) share[i].x[j] = widened(dtype, halves[i].x[j]);
    }
  }
}

// Write `count` entries into their piece.
template <bool kWhole>
static __device__ __forceinline__ void write_piece(const Pieces& grads, int piece, int64_t entry, int count, const Four& four) {
  const Dtype dtype = grads.dtype[piece];
  if (dtype == Dtype::f32) {
    store<kWhole>(place<float>(grads, piece, entry), count, four);
    return;
  }
  FourHalves halves;
  for (int i = 0; i < 4; ++i) halves.x[i] = dtype == Dtype::f16 ? float_to_f16(four.x[i]) : float_to_bf16(four.x[i]);
  store<kWhole>(place<uint16_t>(grads, piece, entry), count, halves);
}

// Whether the tile lies in entries begin to end of a piece, whose fours are aligned there.
static __device__ __forceinline__ bool is_whole(const Pieces& grads, int piece, int64_t tile, int64_t begin, int64_t end) {
  if (tile < begin || tile + kTile > end) return false;
  return grads.dtype[piece] == Dtype::f32 ? is_aligned(place<const float>(grads, piece, tile))
                                          : is_aligned(place<const uint16_t>(grads, piece, tile));
}

// Find the piece in which the block's tile is whole; -1 if there is none.
static __device__ __forceinline__ int only_piece(const Pieces& grads) {
  const int64_t tile = blockIdx.x * kTile;
  const int piece = piece_of(grads, tile, 0, grads.count - 1);
  return is_whole(grads, piece, tile, grads.begin[piece], grads.begin[piece + 1]) ? piece : -1;
}

// Call work(piece, entry, count) for this thread's runs of the block's tile. A run is one to four entries of one piece. It
// begins at a multiple of four, or where a piece begins.
template <unsigned kThreads = kTileThreads, class Work>
static __device__ __forceinline__ void for_each_run(const Pieces& grads, Work work) {
  const int64_t n = grads.begin[grads.count];
  const int64_t tile = blockIdx.x * kTile;
  const int64_t tile_end = tile + kTile < n ? tile + kTile : n;
  const int low = piece_of(grads, tile, 0, grads.count - 1);
  const int high = piece_of(grads, tile_end - 1, low, grads.count - 1);
  for (int64_t entry = tile + threadIdx.x * 4; entry < tile_end; entry += 4 * kThreads) {
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

// Set the marks of this block's kSize entries to 0, once all threads have read theirs.
template <int64_t kSize>
static __device__ __forceinline__ void wipe_marks(uint8_t* marks, int64_t n) {
  __syncthreads();
  const int64_t line = blockIdx.x * (kSize / kLine) + threadIdx.x;
  if (threadIdx.x < kSize / kLine && line * kLine < n) marks[line] = 0;
}

// Call work(piece, begin, end) for every part of the block's kSize entries, in all threads alike. A part is a piece's share of
// them.
template <int64_t kSize, class Work>
static __device__ __forceinline__ void for_each_part(const Pieces& grads, Work work) {
  const int64_t n = grads.begin[grads.count], first = blockIdx.x * kSize;
  const int64_t block_end = first + kSize < n ? first + kSize : n;
  int64_t begin = first;
  for (int piece = piece_of(grads, first, 0, grads.count - 1); begin < block_end; ++piece) {
    const int64_t stop = grads.begin[piece + 1] < block_end ? grads.begin[piece + 1] : block_end;
    if (begin < stop) work(piece, begin, stop);
    begin = stop;
  }
}

// Call whole(tile) for the whole tiles of a part, where fours of the other arrays are `aligned`, and run(entry, count) for this
// thread's runs of the others.
template <class Whole, class Run>
static __device__ __forceinline__ void for_each_tile_of(const Pieces& grads, int piece, int64_t begin, int64_t end,
                                                        bool aligned, Whole whole, Run run) {
  for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
    if (aligned && is_whole(grads, piece, tile, begin, end)) {
      whole(tile);
      continue;
    }
    for (int64_t at = tile + threadIdx.x * 4; at < tile + kTile && at < end; at += kRow) {
      const int64_t entry = at > begin ? at : begin;
      const int64_t stop = at + 4 < end ? at + 4 : end;
      if (entry < stop) run(entry, static_cast<int>(stop - entry));
    }
  }
}

}  // namespace gradcomp::cuda
