// The arguments of kernels: borrowed arrays, a bucket's scattered gradients, and the place to run.
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

// An array that a caller may leave out; None in Python. An array without entries is given all the same.
template <class T>
struct OptionalSpan : Span<T> {
  bool is_given = false;

  bool given() const { return is_given; }
};

// Arrays of one size, one from each rank. Three of them fit into the arguments of a launch.
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

// The number of entries in a line. A line of a sparse update has one mark.
constexpr int64_t kLine = 64;

// The number of zeros in which a kernel's blocks count on a GPU: their ticket.
constexpr int64_t kCounters = 1;

enum class Dtype : uint8_t { f32, f16, bf16 };

// The gradients of a bucket, each where autograd left it. Piece i is entries [begin[i], begin[i + 1]) of the bucket.
// It takes 4 KB, which fits into the arguments of a launch: it needs no device memory and no copy.
struct Pieces {
  static constexpr int kMost = 224;

  int count = 0;
  int64_t begin[kMost + 1] = {};
  void* data[kMost] = {};
  Dtype dtype[kMost] = {};

  int64_t size() const { return begin[count]; }
};

// The place where a kernel runs: a CUDA stream, or a number of the caller's cores.
struct Queue {
  void* stream = nullptr;
  int threads = 1;
};

}  // namespace gradcomp
