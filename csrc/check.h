// Checks that throw with names and numbers. Kernels themselves never throw.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace gradcomp {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

}  // namespace gradcomp

// EXPECTS(k <= n, "take_topk: k = ", k, " is more than the ", n, " entries");
#define EXPECTS(condition, ...)      \
  do {                               \
    if (!(condition)) {              \
      ::gradcomp::fail(__VA_ARGS__); \
    }                                \
  } while (false)

// CUDA_TRY(cudaMemsetAsync(...));
#define CUDA_TRY(call)                                                                             \
  do {                                                                                             \
    const cudaError_t status = (call);                                                             \
    if (status != cudaSuccess) {                                                                   \
      throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status) + " in " #call); \
    }                                                                                              \
  } while (false)
