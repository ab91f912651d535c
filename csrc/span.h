// What kernels are handed: borrowed arrays, a bucket's scattered gradients, and the place to run.
#pragma once

#include <cstdint>

namespace gradcomp {

// A borrowed, contiguous, one-dimensional array. Nothing here owns memory.
template <class T>
struct Span {
  T* data = nullptr;
  int64_t size = 0;

  bool given() const { return data != nullptr || size > 0; }
};

// Arrays of one size, one of each rank's. Small enough for three of them to travel as kernel arguments.
template <class T>
struct Spans {
  static constexpr int kMost = 64;

  T* data[kMost] = {};
  int64_t size = 0;
  int count = 0;

  Spans() = default;
  explicit Spans(Span<T> only) : data{only.data}, size(only.size), count(1) {}
  Span<T> operator[](int rank) const { return {data[rank], size}; }
};

// What has been written to in a sparse update is remembered by lines of so many entries.
constexpr int64_t kLine = 64;

enum class Dtype : uint8_t { f32, f16, bf16 };

// The gradients of a bucket, each where autograd left it. Piece i is entries [begin[i], begin[i + 1]) of the bucket.
// Small enough to travel as a kernel argument (4 KB), so that no device memory and no copy is needed for it.
struct Pieces {
  static constexpr int kMost = 224;

  int count = 0;
  int64_t begin[kMost + 1] = {};
  void* data[kMost] = {};
  Dtype dtype[kMost] = {};
};

// Where a kernel runs: on a CUDA stream, or on this many of the caller's cores.
struct Queue {
  void* stream = nullptr;
  int threads = 1;
};

}  // namespace gradcomp
