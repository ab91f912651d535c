// Chains of kernels on a GPU, and the header of a payload of which every entry is there. No chain waits between its launches.

#include "../math_payload.h"
#include "../ops.h"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

__global__ void write(const int32_t* flag, int32_t* header) {
  header[0] = 0;
  header[1] = flag == nullptr ? 0 : *flag;
}

}  // namespace

void write_header(OptionalSpan<const int32_t> flag, Span<int32_t> header, Queue queue) {
  LAUNCH(write, 1, 1, 0, queue, flag.data, header.data);
}

#include "../chains.inc"

}  // namespace gradcomp::cuda
