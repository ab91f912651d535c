// Stands in for the runtime's header, as far as csrc/bind_device.h uses it. To set a device makes its context, as CUDA 12 does.
#pragma once

#include "cuda.h"

#define CUDART_VERSION 13000

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDevice = 101 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
constexpr unsigned long long cudaEnableDefault = 0;
using cudaStream_t = void*;

inline const char* cudaGetErrorString(cudaError_t) { return "invalid device ordinal"; }

inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= 4) return cudaErrorInvalidDevice;
  fake::contexts[device].made = true;
  fake::current = &fake::contexts[device];
  return cudaSuccess;
}

inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  ++fake::asked;
  *status = fake::capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult*) {
  *found = fake::function(name);
  return cudaSuccess;
}
