// Thresholds of a bucket's layers from their moments, on a GPU, and the steering of lam.
//
// Bytes: set_thresholds 48 a layer, steer 20. One launch each.

#include "../math.h"
#include "../ops.h"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 256;

struct Layers {
  const double* moments;
  const int32_t* ends;
  int64_t count;
};

__device__ __forceinline__ Moments<double> moments_of(const Layers& layers, int64_t layer) {
  const int64_t begin = layer == 0 ? 0 : layers.ends[layer - 1];
  return load_moments(layers.moments + kMoments * layer, static_cast<double>(layers.ends[layer] - begin));
}

__global__ void __launch_bounds__(kThreads) set_each(Layers layers, const float* lam, float* thresholds) {
  const int64_t layer = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (layer >= layers.count) return;
  thresholds[layer] = threshold_of(moments_of(layers, layer), *lam);
}

// One thread merges the moments in the order of the layers; the others fetch them.
__global__ void __launch_bounds__(kThreads) set_pooled(Layers layers, const float* lam, float* thresholds) {
  __shared__ Moments<double> fetched[kThreads];
  __shared__ float found;
  Moments<double> all = {};
  for (int64_t first = 0; first < layers.count; first += kThreads) {
    const int64_t layer = first + threadIdx.x;
    if (layer < layers.count) fetched[threadIdx.x] = moments_of(layers, layer);
    __syncthreads();
    for (int64_t i = 0; threadIdx.x == 0 && i < kThreads && first + i < layers.count; ++i) all = merge(all, fetched[i]);
    __syncthreads();
  }
  if (threadIdx.x == 0) found = threshold_of(all, *lam);
  __syncthreads();
  for (int64_t layer = threadIdx.x; layer < layers.count; layer += kThreads) thresholds[layer] = found;
}

__global__ void steer_lam(float* lam, const int32_t* header, double target) {
  const Steered next = steered({lam[0], lam[1]}, static_cast<double>(header[0]), target);
  lam[0] = next.lam;
  lam[1] = next.gain;
}

}  // namespace

void set_thresholds(Span<const double> moments, Span<const int32_t> ends, Span<const float> lam, bool pooled,
                    Span<float> thresholds, Queue queue) {
  if (ends.size == 0) return;
  const Layers layers = {moments.data, ends.data, ends.size};
  if (pooled) {
    LAUNCH(set_pooled, 1, kThreads, 0, queue, layers, lam.data, thresholds.data);
  } else {
    LAUNCH(set_each, blocks_for(ends.size, kThreads), kThreads, 0, queue, layers, lam.data, thresholds.data);
  }
}

void steer(Span<float> lam, Span<const int32_t> header, int64_t target, Queue queue) {
  LAUNCH(steer_lam, 1, 1, 0, queue, lam.data, header.data, static_cast<double>(target));
}

}  // namespace gradcomp::cuda
