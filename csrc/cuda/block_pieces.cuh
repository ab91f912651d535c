// A block's share of a bucket's pieces: a tile of the bucket, in runs of up to four entries for each thread.
#pragma once

#include <cstdint>

#include "../math.h"
#include "../span.h"
#include "thread_four.cuh"

namespace gradcomp::cuda {

constexpr unsigned kTileThreads = 256;
// Entries of a block: four times four for each thread.
constexpr int64_t kTile = 4096;

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

// Read `count` entries of the bucket, at most four, all of one piece.
static __device__ __forceinline__ Four read_piece(const Pieces& grads, int piece, int64_t entry, int count) {
  const Dtype dtype = grads.dtype[piece];
  if (dtype == Dtype::f32) return load_four(place<const float>(grads, piece, entry), count);
  const FourHalves halves = load_four(place<const uint16_t>(grads, piece, entry), count);
  Four four;
  for (int i = 0; i < 4; ++i) four.x[i] = dtype == Dtype::f16 ? f16_to_float(halves.x[i]) : bf16_to_float(halves.x[i]);
  return four;
}

// Write `count` entries into their piece, and return them as they then stand there.
static __device__ __forceinline__ Four write_piece(const Pieces& grads, int piece, int64_t entry, int count, const Four& four) {
  const Dtype dtype = grads.dtype[piece];
  if (dtype == Dtype::f32) {
    store_four(place<float>(grads, piece, entry), count, four);
    return four;
  }
  FourHalves halves;
  Four written;
  for (int i = 0; i < 4; ++i) {
    halves.x[i] = dtype == Dtype::f16 ? float_to_f16(four.x[i]) : float_to_bf16(four.x[i]);
    written.x[i] = dtype == Dtype::f16 ? f16_to_float(halves.x[i]) : bf16_to_float(halves.x[i]);
  }
  store_four(place<uint16_t>(grads, piece, entry), count, halves);
  return written;
}

// Call work(piece, entry, count) for this thread's runs of the block's tile. A run is one to four entries of one piece. It
// begins at a multiple of four, or where a piece begins.
template <class Work>
static __device__ __forceinline__ void for_each_run(const Pieces& grads, Work work) {
  const int64_t n = grads.begin[grads.count];
  const int64_t tile = blockIdx.x * kTile;
  const int64_t tile_end = tile + kTile < n ? tile + kTile : n;
  const int low = piece_of(grads, tile, 0, grads.count - 1);
  const int high = piece_of(grads, tile_end - 1, low, grads.count - 1);
  for (int64_t entry = tile + threadIdx.x * 4; entry < tile_end; entry += kTileThreads * 4) {
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

// Call work(piece, begin, end) for every part of the block's tile, in all threads alike. A part is a piece's share of a tile.
template <class Work>
static __device__ __forceinline__ void for_each_part(const Pieces& grads, Work work) {
  const int64_t n = grads.begin[grads.count];
  const int64_t tile = blockIdx.x * kTile;
  const int64_t tile_end = tile + kTile < n ? tile + kTile : n;
  int64_t begin = tile;
  for (int piece = piece_of(grads, tile, 0, grads.count - 1); begin < tile_end; ++piece) {
    const int64_t stop = grads.begin[piece + 1] < tile_end ? grads.begin[piece + 1] : tile_end;
    if (begin < stop) work(piece, begin, stop);
    begin = stop;
  }
}

// Call work(entry, count) for this thread's runs of a part.
template <class Work>
static __device__ __forceinline__ void for_each_run_of(int64_t begin, int64_t end, Work work) {
  for (int64_t at = blockIdx.x * kTile + threadIdx.x * 4; at < end; at += kTileThreads * 4) {
    const int64_t entry = at > begin ? at : begin;
    const int64_t stop = at + 4 < end ? at + 4 : end;
    if (entry < stop) work(entry, static_cast<int>(stop - entry));
  }
}

}  // namespace gradcomp::cuda
