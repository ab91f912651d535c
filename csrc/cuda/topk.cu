// Exact top-k on a GPU: the launches of largest.cuh, over a bucket. Bytes an entry of the bucket: 8.3, and 32 or so a
// candidate; 20 where the candidates are too many for a list.

#include "../ops.h"
#include "bucket.cuh"
#include "largest.cuh"

namespace gradcomp::cuda {

int64_t take_topk_scratch(int64_t n, int64_t k) { return Plan(n, k, nullptr).words; }

void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> /* peaks */, int64_t k,
               Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const MovingHand hand = {value.data, velocity.data, values.data, indices.data, flag.data, header.data};
  take_largest("take_topk", BucketReader{value.data}, hand, value.size, k, scratch, queue);
}

}  // namespace gradcomp::cuda
