// Statistics of a bucket's layers on CPUs. A run is measured twice while it lies in the cache: its mean, then the deviations
// from it. Runs are merged in order, so that the result does not depend on the number of threads.
#pragma once

#include <cstring>

#include "../math.h"
#include "../span.h"
#include "lane_hot.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

// Lanes of a sum, which vector units add up side by side. The order of additions is the same on every machine.
constexpr int64_t kLanes = 16;

template <class T>
inline T add_lanes(const T* lanes) {
  T sum = 0;
  for (int64_t j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

// The moments of a run's entries, minus one of them, the pivot. A float holds a mean well this way, also far from zero.
struct Measured {
  Moments<float> moments;
  float pivot;
};

HOT Measured measure(const float* __restrict x, int64_t n) {
  const float pivot = x[0];
  float sums[kLanes] = {}, lows[kLanes], highs[kLanes], squares[kLanes] = {};
  int32_t zeros[kLanes] = {};
  for (int64_t j = 0; j < kLanes; ++j) lows[j] = highs[j] = pivot;
  const int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const float y = x[i + j];
      sums[j] += y - pivot;
      lows[j] = y < lows[j] ? y : lows[j];
      highs[j] = y > highs[j] ? y : highs[j];
      zeros[j] += y == 0.0f ? 1 : 0;
    }
  }
  for (int64_t i = whole; i < n; ++i) {
    sums[i - whole] += x[i] - pivot;
    lows[0] = std::min(lows[0], x[i]);
    highs[0] = std::max(highs[0], x[i]);
    zeros[0] += x[i] == 0.0f ? 1 : 0;
  }
  const float sum = add_lanes(sums);
  const float mean = is_finite(sum) ? sum / static_cast<float>(n) : 0.0f;  // entries near the largest float
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const float apart = (x[i + j] - pivot) - mean;
      squares[j] += apart * apart;
    }
  }
  for (int64_t i = whole; i < n; ++i) squares[i - whole] += ((x[i] - pivot) - mean) * ((x[i] - pivot) - mean);
  Moments<float> found{static_cast<float>(n), mean, add_lanes(squares), lows[0], highs[0], 0};
  int32_t zeros_found = 0;
  for (int64_t j = 0; j < kLanes; ++j) {
    found.low = std::min(found.low, lows[j]);
    found.high = std::max(found.high, highs[j]);
    zeros_found += zeros[j];
  }
  found.nonzero = static_cast<float>(n - zeros_found);
  return {found, pivot};
}

// The results of all runs, in scratch. A run is a piece's share of a block (the CUDA twins say part, and call a thread's one to
// four entries a run). Its number is its block's plus its piece's. No two runs have the same number, since at least one of the
// two rises from run to run.
class Runs {
 public:
  static int64_t words(int64_t n, int64_t pieces) { return kWords * (n / kBlock + 1 + pieces); }

  Runs(const Pieces& grads, Span<uint32_t> scratch) : grads_(grads), words_(scratch.data) {}

  float* of(int piece, int64_t entry) const { return reinterpret_cast<float*>(words_ + kWords * (entry / kBlock + piece)); }

  void store(int piece, int64_t entry, const Measured& found) const {
    float* const run = of(piece, entry);
    store_moments(found.moments, run);
    run[kMoments] = found.pivot;
  }

  void merge_into(double* moments) const {
    for (int piece = 0; piece < grads_.count; ++piece) {
      Moments<double> all{};
      each(piece, [&](const float* run, int64_t count) {
        Moments<double> own = load_moments(run, static_cast<double>(count));
        own.mean += run[kMoments];
        all = merge(all, own);
      });
      store_moments(all, moments + kMoments * piece);
    }
  }

  void sum_into(double* sums) const {
    for (int piece = 0; piece < grads_.count; ++piece) {
      sums[piece] = 0;
      each(piece, [&](const float* run, int64_t) {
        double sum;
        memcpy(&sum, run, sizeof sum);
        sums[piece] += sum;
      });
    }
  }

 private:
  static constexpr int64_t kWords = kMoments + 1;

  template <class Work>
  void each(int piece, Work work) const {
    for (int64_t at = grads_.begin[piece], end = grads_.begin[piece + 1]; at < end;) {
      const int64_t count = std::min(kBlock - at % kBlock, end - at);
      work(of(piece, at), count);
      at += count;
    }
  }

  const Pieces& grads_;
  uint32_t* words_;
};

}  // namespace
}  // namespace gradcomp::cpu
