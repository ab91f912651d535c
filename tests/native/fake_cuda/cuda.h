// Stands in for the driver's header: contexts that threads have or have not, on four devices, and a count of those that were
// made.
#pragma once

#include <cstring>

using CUdevice = int;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_CONTEXT = 201 };
struct Context {
  int device;
  bool made;
};
using CUcontext = Context*;

namespace fake {

inline Context contexts[4] = {{0, false}, {1, false}, {2, false}, {3, false}};
inline thread_local Context* current = nullptr;
inline bool capturing = false;
inline int asked = 0;  // whether a stream is capturing

inline CUresult get_device(CUdevice* device) {
  if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current->device;
  return CUDA_SUCCESS;
}
inline CUresult get_current(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
inline CUresult set_current(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
inline void* function(const char* name) {
  if (std::strcmp(name, "cuCtxGetDevice") == 0) return reinterpret_cast<void*>(get_device);
  if (std::strcmp(name, "cuCtxGetCurrent") == 0) return reinterpret_cast<void*>(get_current);
  if (std::strcmp(name, "cuCtxSetCurrent") == 0) return reinterpret_cast<void*>(set_current);
  return nullptr;
}

}  // namespace fake
