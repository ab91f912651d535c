// The GPU of a call: current while the call lasts, and known to have loaded the kernel before a graph is captured.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "expects.h"

namespace gradcomp {

// A function of the driver. The module is not linked with the driver, so that it loads where there is none.
template <class Function>
Function* driver_function(const char* name) {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  cudaDriverEntryPointQueryResult result{};
  CUDA_TRY(cudaGetDriverEntryPointByVersion(name, &found, 11000, cudaEnableDefault, &result));
#else
  CUDA_TRY(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault));
#endif
  if (found == nullptr) throw std::runtime_error(std::string("CUDA: the driver has no ") + name);
  return reinterpret_cast<Function*>(found);
}

// Makes a device current. At the end the thread has the context again that it had, or none.
//
// The device's number would not do: this module has a runtime of its own beside torch's, and the two need not agree on it. And
// to set it again makes a context on a device that has none: every rank would take hundreds of megabytes of the first GPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    CUdevice current = 0;
    if (driver().device_of_context(&current) == CUDA_SUCCESS && current == device) return;
    changed_ = driver().get_context(&before_) == CUDA_SUCCESS;
    CUDA_TRY(cudaSetDevice(device));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (changed_) driver().set_context(before_);
  }

 private:
  struct Driver {
    CUresult (*device_of_context)(CUdevice*) = driver_function<CUresult(CUdevice*)>("cuCtxGetDevice");
    CUresult (*get_context)(CUcontext*) = driver_function<CUresult(CUcontext*)>("cuCtxGetCurrent");
    CUresult (*set_context)(CUcontext) = driver_function<CUresult(CUcontext)>("cuCtxSetCurrent");
  };
  static const Driver& driver() {
    static const Driver found;
    return found;
  }

  CUcontext before_ = nullptr;
  bool changed_ = false;
};

// The devices that a kernel has been called on. Its first call on one loads machine code, which a capture may not bear: the
// call is refused there, before the capture is spoilt. Whoever uses this holds Python's lock.
class DevicesSeen {
 public:
  void see(const char* kernel, int device, cudaStream_t stream) {
    const uint64_t bit = uint64_t{1} << (device % 64);
    if ((seen_ & bit) != 0) return;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
    EXPECTS(capture == cudaStreamCaptureStatusNone, kernel, ": its first call on cuda:", device,
            " falls into the capture of a graph, where its machine code cannot be loaded: run a step before the capture");
    seen_ |= bit;
  }

 private:
  uint64_t seen_ = 0;
};

}  // namespace gradcomp
