// Exact top-k on a GPU: the launches of device_largest.cuh, over a residual. Bytes an entry: 4.1, 4 for those of a line with
// candidates, and about 20 a candidate, which the second cache holds; 20 if the candidates are too many for a list.

#include "../ops.h"
#include "device_largest.cuh"
#include "thread_residual.cuh"

namespace gradcomp::cuda {

int64_t take_topk_scratch(int64_t n, int64_t k) { return Plan(n, k, false, nullptr).words; }

void take_topk(Span<float> residual, OptionalSpan<float> velocity, OptionalSpan<uint8_t> sent_in, int64_t step,
               OptionalSpan<const int32_t> flag, OptionalSpan<const uint32_t> /* peaks */, int64_t k, Span<float> values,
               Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const MovingHand hand = {residual.data, {velocity.data, sent_in.data, static_cast<uint8_t>(step)},
                           values.data,   indices.data,
                           flag.data,     header.data};
  take_largest(ResidualReader{residual.data}, hand, residual.size, k, scratch, queue);
}

}  // namespace gradcomp::cuda
