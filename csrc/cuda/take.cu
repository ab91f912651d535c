// The plain takes and adds, on a GPU: of a whole bucket, and of sparse entries.
//
// Bytes: offer_all 8 an entry of the bucket, settle_all 8 (4 if nothing is kept); add_sparse and settle_sparse 8 an entry of
// the payload, and a scattered read and write of 4. One launch each.

#include "../math.h"
#include "../ops.h"
#include "launch.cuh"
#include "thread_add.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    offer(const float* residual, int64_t n, const int32_t* flag, float* taken, float scale) {
  const int64_t entry = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (entry >= n) return;
  Four four = load_four(residual + entry, n - entry);
  for (float& x : four.x) x *= scale;
  if (entry == 0 && flag != nullptr && *flag != 0) four.x[0] = not_a_number();
  store_four(taken + entry, n - entry, four);
}

__global__ void __launch_bounds__(kThreads) settle(float* residual, int64_t n, const float* update, float keep) {
  const int64_t entry = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (entry >= n || !is_finite(update[0])) return;
  Four four = {};
  if (keep != 0) {
    four = load_four(residual + entry, n - entry);
    for (float& x : four.x) x *= keep;
  }
  store_four(residual + entry, n - entry, four);
}

// Add this thread's entry of the payload. Returns false if the payload is malformed.
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
    settle_entries(Span<float> residual, Span<const float> values, Span<const int32_t> indices, const int32_t* header,
                   const float* update, float keep) {
  const float share = share_to_keep(update, keep);
  if (share != 0) add_entry(residual, {}, values, indices, header[0], share);
}

// Count the blocks for a payload: at least one, since an empty payload can carry a flag.
unsigned payload_blocks(Span<const float> values) { return blocks_for(values.size > 0 ? values.size : 1, kThreads); }

}  // namespace

void offer_all(Span<const float> residual, OptionalSpan<const int32_t> flag, Span<float> taken, float scale, Queue queue) {
  if (residual.size == 0) return;
  LAUNCH(offer, blocks_for(residual.size, 4 * kThreads), kThreads, 0, queue, residual.data, residual.size, flag.data,
         taken.data, scale);
}

void settle_all(Span<float> residual, Span<const float> update, float keep, Queue queue) {
  if (residual.size == 0) return;
  LAUNCH(settle, blocks_for(residual.size, 4 * kThreads), kThreads, 0, queue, residual.data, residual.size, update.data, keep);
}

void add_sparse(Span<float> target, OptionalSpan<uint8_t> marks, Span<const float> values, Span<const int32_t> indices,
                Span<const int32_t> header, float scale, Queue queue) {
  LAUNCH(add_entries, payload_blocks(values), kThreads, 0, queue, target, marks, values, indices, header.data, scale);
}

void settle_sparse(Span<float> residual, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                   Span<const float> update, float keep, Queue queue) {
  LAUNCH(settle_entries, payload_blocks(values), kThreads, 0, queue, residual, values, indices, header.data, update.data, keep);
}

}  // namespace gradcomp::cuda
