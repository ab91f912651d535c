// Refusals: exceptions whose messages hold the names and numbers involved. Only the host throws, never a device.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace gradcomp {

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::invalid_argument(join(parts...));
}

}  // namespace gradcomp

// EXPECTS(size == 2, "header has ", size, " entries, but needs 2");
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
