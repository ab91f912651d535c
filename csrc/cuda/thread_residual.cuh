// A selection's reads of a residual, and its moves out of it, for take_topk and take_above.
#pragma once

#include <cstdint>

#include "thread_four.cuh"

namespace gradcomp::cuda {

struct ResidualReader {
  static constexpr int kShare = 8, kBlocks = 6;

  const float* residual;

  __device__ __forceinline__ const ResidualReader& over(int64_t) const { return *this; }
  __device__ __forceinline__ bool is_aligned() const { return cuda::is_aligned(residual); }
  __device__ __forceinline__ Four read_whole(int64_t entry) const { return load_whole(residual + entry); }
  __device__ __forceinline__ Four read(int64_t entry, int64_t count) const { return load_four(residual + entry, count); }
  __device__ __forceinline__ float at(uint32_t index) const { return residual[index]; }
};

struct MovingHand {
  float* residual;
  uint8_t* ages;
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
    residual[index] = 0.0f;
    if (ages != nullptr) ages[index] = 0;
  }
};

}  // namespace gradcomp::cuda
