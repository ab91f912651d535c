// The plain takes and adds, on a GPU: the whole of a bucket, and sparse entries in and out of it.
//
// Bytes: take_all 12 an entry of the bucket; add_sparse and restore_sparse 8 an entry of the payload, and a scattered read and
// write of 4. One launch each.

#include "../math.h"
#include "../ops.h"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads) move_out(float* value, int64_t n, const int32_t* flag, float* taken) {
  const int64_t entry = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (entry >= n) return;
  Four four = load_four(value + entry, n - entry);
  store_four(value + entry, n - entry, Four{});
  if (entry == 0 && flag != nullptr && *flag != 0) four.x[0] = not_a_number();
  store_four(taken + entry, n - entry, four);
}

// target[0] is where a NaN is left for others to see while the payload may add to it, too: whoever comes first, the NaN stays.
__device__ void add_to_first(float* target, float x) {
  auto* const word = reinterpret_cast<unsigned*>(target);
  unsigned seen = *static_cast<volatile unsigned*>(word);
  while (float_of(seen) == float_of(seen)) {
    const unsigned before = atomicCAS(word, seen, bits_of(float_of(seen) + x));
    if (before == seen) return;
    seen = before;
  }
}

__device__ void spoil(float* target) { atomicExch(reinterpret_cast<unsigned*>(target), bits_of(not_a_number())); }

// Adds this thread's entry of the payload; false where the payload is malformed. A wrong index is never written to.
__device__ bool add_entry(Span<float> target, Span<const float> values, Span<const int32_t> indices, int32_t count,
                          float scale) {
  if (count < 0 || count > values.size) return false;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return true;
  const int32_t index = indices.data[i];
  if (index < 0 || index >= target.size) return false;
  const float x = scale * values.data[i];
  if (index == 0) {
    add_to_first(target.data, x);
  } else {
    target.data[index] += x;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads)
    add_entries(Span<float> target, Span<const float> values, Span<const int32_t> indices, const int32_t* header, float scale) {
  if (header[1] != 0 || !add_entry(target, values, indices, header[0], scale)) spoil(target.data);
}

__global__ void __launch_bounds__(kThreads)
    restore_entries(Span<float> value, Span<const float> values, Span<const int32_t> indices, const int32_t* header,
                    const float* update) {
  if (!is_finite(update[0])) add_entry(value, values, indices, header[0], 1.0f);
}

// At least one: an empty payload can carry a flag.
unsigned payload_blocks(Span<const float> values) { return blocks_for(values.size > 0 ? values.size : 1, kThreads); }

}  // namespace

void take_all(Span<float> value, Span<const int32_t> flag, Span<float> taken, Queue queue) {
  if (value.size == 0) return;
  LAUNCH(move_out, blocks_for(value.size, 4 * kThreads), kThreads, 0, queue, value.data, value.size, flag.data, taken.data);
}

void add_sparse(Span<float> target, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                float scale, Queue queue) {
  LAUNCH(add_entries, payload_blocks(values), kThreads, 0, queue, target, values, indices, header.data, scale);
}

void restore_sparse(Span<float> value, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                    Span<const float> update, Queue queue) {
  LAUNCH(restore_entries, payload_blocks(values), kThreads, 0, queue, value, values, indices, header.data, update.data);
}

}  // namespace gradcomp::cuda
