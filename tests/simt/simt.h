// The emulator as kernels see it through cuda_runtime.h: launches, and the places where the threads of a block or warp meet.
//
// Each thread of a block is a fiber; one runs at a time, until it reaches a barrier, a shuffle or its end. Blocks run one after
// the other, so that a block which waits for another never gets on, and says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace simt {

// A line of a kernel, as a default argument of what is called there.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// Waits for all threads of the block that have not ended. Tells how many there were and how many brought true.
struct Tally {
  unsigned present, yes;
};
Tally meet_block(const char* what, bool vote, Site site);

// Waits for the lanes named in mask. Tells what lane `source` brought, and which lanes brought something other than 0.
struct Exchange {
  uint64_t value;
  unsigned nonzero;
};
Exchange meet_warp(const char* what, unsigned mask, uint64_t mine, unsigned source, Site site);

unsigned lane();
void* dynamic_shared();

// Blocks run in index order, or (the default, unless GRADCOMP_SIMT_ORDER=plain) shuffled, with warps and lanes from last to
// first: what differs between the two depends on an order it must not depend on.
enum class Order { plain, shuffled };
void set_order(Order order);

struct Shape {
  const char* name;
  const void* kernel;
  dim3 grid, block;
  size_t shared;
};
void run(const Shape& shape, void (*body)(void*), void* argument);

// kernel<<<grid, block, shared, stream>>>(args...), complete when it returns. A launch that no device would accept is reported
// by cudaGetLastError.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, cudaStream_t, Args&&... args) {
  using Call = std::pair<void (*)(Params...), std::tuple<Params...>>;
  Call call(kernel, std::tuple<Params...>(std::forward<Args>(args)...));
  const auto body = [](void* argument) {
    const auto& [function, values] = *static_cast<Call*>(argument);
    std::apply(function, values);
  };
  run({name, reinterpret_cast<const void*>(kernel), grid, block, shared}, body, &call);
}

}  // namespace simt
