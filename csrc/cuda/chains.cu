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

// One launch each, of blocks that are resident together (topk.cu, above.cu).
void take_and_pack(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, int64_t k,
                   const Taken& taken, Span<uint32_t> scratch, uint32_t* ticket, Queue queue);
void take_and_pack(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, const Bar& bar,
                   const Taken& taken, Span<uint32_t> scratch, uint32_t* ticket, Queue queue);

// One launch each, whose last block settles (packed.cu, round.cu).
void add_and_settle(Span<float> target, OptionalSpan<uint8_t> marks, const Spans<const uint32_t>& blocks,
                    const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, int64_t capacity, float scale,
                    Span<float> residual, const OwnPacked& own, float keep, float* first, uint32_t* ticket, Queue queue);
void add_and_settle(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                    const Spans<const int32_t>& headers, int64_t group, int64_t count, float scale, Span<float> residual,
                    const OwnLevels& own, uint32_t* ticket, Queue queue);

#include "../chains.inc"

}  // namespace gradcomp::cuda
