// The emulator as kernels see it through cuda_runtime.h: launches, and the places where the threads of a block or warp meet.
//
// Each thread of a block is a fiber. One runs at a time, until it reaches a barrier, a shuffle or its end. A few blocks take
// turns: one may step aside at a barrier, a fence, an atomic or a read that others' writes may change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

struct Place {
  unsigned x;  // kernels here have one dimension
};

// They do not change while a thread runs. Of constants that need no constructor, the shadow hears nothing.
extern const Place threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

// The line of a kernel that calls a function with this as its default argument.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// Wait for all threads of the block that have not ended. Return whether any of them brought true.
bool meet_block(const char* what, bool vote, Site site);

// Wait for the lanes in the mask. The exchange has the value of lane `source`, and the lanes that brought a value other than 0.
struct Exchange {
  uint64_t value;
  unsigned nonzero;
};
Exchange meet_warp(const char* what, unsigned mask, uint64_t mine, unsigned source, bool orders_memory, Site site);

// Fence; change a word by an atomic; read one past the first-level cache. `site` is the place in the kernel.
void fence();
void touch_atomic(void* word, size_t size, const void* site);
void touch_second_level(const void* word, size_t size, const void* site);

unsigned lane();
void* dynamic_shared();

struct Shape {
  const char* name;
  unsigned blocks, threads;
  size_t shared;
  size_t arguments;  // the bytes that hold the kernel's arguments
};
void run(const Shape& shape, void (*body)(void*), void* argument);
// Blocks that are resident together, at most, and may wait for one another.
unsigned most_together();

// Run kernel<<<blocks, threads, shared, stream>>>(args...) to its end. cudaGetLastError reports a launch that no device would
// take.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), unsigned blocks, unsigned threads, size_t shared, cudaStream_t,
            Args&&... args) {
  using Call = std::pair<void (*)(Params...), std::tuple<Params...>>;
  Call call(kernel, std::tuple<Params...>(std::forward<Args>(args)...));
  const auto body = [](void* argument) {
    const auto& [function, values] = *static_cast<Call*>(argument);
    std::apply(function, values);
  };
  run({name, blocks, threads, shared, sizeof call}, body, &call);
}

}  // namespace simt
