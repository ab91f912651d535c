// Four entries in one access of a thread, if their address allows it, otherwise one by one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace gradcomp::cuda {

struct Four {
  float x[4];
};

// Read p[0 .. count), and zeros up to four.
static __device__ __forceinline__ Four load_four(const float* p, int64_t count) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(float4) == 0) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    return {{v.x, v.y, v.z, v.w}};
  }
  Four four = {};
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.x[i] = p[i];
  }
  return four;
}

static __device__ __forceinline__ void store_four(float* p, int64_t count, const Four& four) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(float4) == 0) {
    *reinterpret_cast<float4*>(p) = make_float4(four.x[0], four.x[1], four.x[2], four.x[3]);
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) p[i] = four.x[i];
  }
}

// Four 16-bit patterns.
struct FourHalves {
  uint16_t x[4];
};

static __device__ __forceinline__ FourHalves load_four(const uint16_t* p, int count) {
  FourHalves four = {};
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(uint2) == 0) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    memcpy(four.x, &v, sizeof v);
    return four;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.x[i] = p[i];
  }
  return four;
}

static __device__ __forceinline__ void store_four(uint16_t* p, int count, const FourHalves& four) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(uint2) == 0) {
    uint2 v;
    memcpy(&v, four.x, sizeof v);
    *reinterpret_cast<uint2*>(p) = v;
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) p[i] = four.x[i];
  }
}

// Four bytes.
struct FourBytes {
  uint8_t x[4];
};

static __device__ __forceinline__ FourBytes load_four(const uint8_t* p, int count) {
  FourBytes four = {};
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(uint32_t) == 0) {
    const uint32_t v = *reinterpret_cast<const uint32_t*>(p);
    memcpy(four.x, &v, sizeof v);
    return four;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) four.x[i] = p[i];
  }
  return four;
}

static __device__ __forceinline__ void store_four(uint8_t* p, int count, const FourBytes& four) {
  if (count >= 4 && reinterpret_cast<uintptr_t>(p) % sizeof(uint32_t) == 0) {
    uint32_t v;
    memcpy(&v, four.x, sizeof v);
    *reinterpret_cast<uint32_t*>(p) = v;
    return;
  }
  for (int i = 0; i < 4; ++i) {
    if (i < count) p[i] = four.x[i];
  }
}

}  // namespace gradcomp::cuda
