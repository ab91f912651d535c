// How a selection reads a bucket, and how what it chooses moves out: for take_topk and take_above.
#pragma once

#include "launch.cuh"

namespace gradcomp::cuda {

struct BucketReader {
  const float* value;

  __device__ __forceinline__ Four read(int64_t entry, int64_t count) const { return load_four(value + entry, count); }
  __device__ __forceinline__ float at(uint32_t index) const { return value[index]; }
};

struct MovingHand {
  float* value;
  float* velocity;
  float* values;
  int32_t* indices;
  const int32_t* flag;
  int32_t* header;

  __device__ __forceinline__ void announce(uint32_t found) const {
    header[0] = static_cast<int32_t>(found);
    header[1] = flag != nullptr ? *flag : 0;
  }

  __device__ __forceinline__ void take(uint32_t place, uint32_t index, float x) const {
    values[place] = x;
    indices[place] = static_cast<int32_t>(index);
    value[index] = 0.0f;
    if (velocity != nullptr) velocity[index] = 0.0f;
  }
};

}  // namespace gradcomp::cuda
