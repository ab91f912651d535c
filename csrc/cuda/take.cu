// The plain takes and adds, on a GPU: the whole of a bucket, and sparse entries in and out of it.
//
// Bytes: offer_all 8 an entry of the bucket, settle_all 8 (4 where nothing is kept); add_sparse and settle_sparse 8 an entry of
// the payload, and a scattered read and write of 4. One launch each.

#include "../math.h"
#include "../ops.h"
#include "launch.cuh"
#include "spoil.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads) offer(const float* value, int64_t n, const int32_t* flag, float* taken) {
  const int64_t entry = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (entry >= n) return;
  Four four = load_four(value + entry, n - entry);
  if (entry == 0 && flag != nullptr && *flag != 0) four.x[0] = not_a_number();
  store_four(taken + entry, n - entry, four);
}

__global__ void __launch_bounds__(kThreads) settle(float* value, int64_t n, const float* update, float keep) {
  const int64_t entry = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (entry >= n || !is_finite(update[0])) return;
  Four four = {};
  if (keep != 0) {
    four = load_four(value + entry, n - entry);
    for (float& x : four.x) x *= keep;
  }
  store_four(value + entry, n - entry, four);
}

// Adds this thread's entry of the payload; false where the payload is malformed.
__device__ bool add_entry(Span<float> target, Span<uint8_t> marks, Span<const float> values, Span<const int32_t> indices,
                          int32_t count, float scale) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (count < 0) return i != 0;  // one thread is enough to say so
  return i >= entries_there(count, values.size) || add_at(target, marks, indices.data[i], scale * values.data[i]);
}

__global__ void __launch_bounds__(kThreads) add_entries(Span<float> target, Span<uint8_t> marks, Span<const float> values,
                                                        Span<const int32_t> indices, const int32_t* header, float scale) {
  const bool flagged = header[1] != 0;
  const bool well_formed =
      flagged ? blockIdx.x + threadIdx.x != 0 : add_entry(target, marks, values, indices, header[0], scale);
  if (!well_formed) spoil(target, marks);
}

__global__ void __launch_bounds__(kThreads)
    settle_entries(Span<float> value, Span<const float> values, Span<const int32_t> indices, const int32_t* header,
                   const float* update, float keep) {
  const float share = share_to_keep(update, keep);
  if (share != 0) add_entry(value, {}, values, indices, header[0], share);
}

// At least one: an empty payload can carry a flag.
unsigned payload_blocks(Span<const float> values) { return blocks_for(values.size > 0 ? values.size : 1, kThreads); }

}  // namespace

void offer_all(Span<const float> value, Span<const int32_t> flag, Span<float> taken, Queue queue) {
  if (value.size == 0) return;
  LAUNCH(offer, blocks_for(value.size, 4 * kThreads), kThreads, 0, queue, value.data, value.size, flag.data, taken.data);
}

void settle_all(Span<float> value, Span<const float> update, float keep, Queue queue) {
  if (value.size == 0) return;
  LAUNCH(settle, blocks_for(value.size, 4 * kThreads), kThreads, 0, queue, value.data, value.size, update.data, keep);
}

void add_sparse(Span<float> target, Span<uint8_t> marks, Span<const float> values, Span<const int32_t> indices,
                Span<const int32_t> header, float scale, Queue queue) {
  LAUNCH(add_entries, payload_blocks(values), kThreads, 0, queue, target, marks, values, indices, header.data, scale);
}

void settle_sparse(Span<float> value, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                   Span<const float> update, float keep, Queue queue) {
  LAUNCH(settle_entries, payload_blocks(values), kThreads, 0, queue, value, values, indices, header.data, update.data, keep);
}

}  // namespace gradcomp::cuda
