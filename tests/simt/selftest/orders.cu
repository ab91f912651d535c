// Kernels that rely on the order of accesses to memory, rightly and wrongly: between the threads of a block, and between
// blocks.

#include <cuda_runtime.h>

#include "cuda/block.cuh"
#include "launches.h"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace selftest {
namespace {

// ---- Within a block. Each kernel has a right form and, by `wrong`, a form without its barrier.

// One thread writes a word that all threads have read, and they read it again.
__global__ void told_twice(uint32_t* out, bool wrong) {
  __shared__ uint32_t told;
  uint32_t sum = 0;
  for (uint32_t round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) told = 7 + round;
    __syncthreads();
    sum += told;
    if (!wrong) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

// Neighbours in a warp exchange words through memory. A shuffle orders none.
__global__ void lanes_exchange(uint32_t* out, bool wrong) {
  __shared__ uint32_t words[64];
  words[threadIdx.x] = threadIdx.x;
  if (wrong) {
    __shfl_sync(kWholeWarp, 0, 0);
  } else {
    __syncwarp();
  }
  out[threadIdx.x] = words[threadIdx.x ^ 1];
}

// The lower lanes of a warp meet, and the upper ones read too.
__global__ void half_a_warp(uint32_t* out, bool wrong) {
  __shared__ uint32_t words[32];
  const unsigned lane = threadIdx.x;
  words[lane] = lane;
  if (lane < 16) __syncwarp(0xffffu);
  if (lane < 16) out[lane] = words[lane ^ 15];
  if (wrong && lane == 16) out[lane] = words[3];
}

// Bytes of one word are words of their own.
__global__ void bytes_apart(uint8_t* out, bool wrong) {
  out[threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
  if (wrong) out[threadIdx.x ^ 1] = 0;
}

// All threads write the same value, or each its own.
__global__ void same_value(uint32_t* out, bool wrong) { out[0] = wrong ? 1 + threadIdx.x + blockIdx.x : 1; }

// Atomics meet atomics; a plain access beside them needs a barrier.
__global__ void counts(uint32_t* out, bool wrong) {
  __shared__ uint32_t count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1u);
  if (!wrong) __syncthreads();
  if (threadIdx.x == 5) out[0] = count;
}

// A volatile read meets atomics as well.
__global__ void peeks(uint32_t* out, bool wrong) {
  atomicAdd(out, 1u);
  if (*static_cast<volatile uint32_t*>(out) == 0) out[1] = 1;
  if (wrong && *out == 0) out[1] = 1;
}

// ---- Between blocks, by a ticket. `missing` names the step that is left out.

enum Step { kNothing, kFirstFence, kFirstBarrier, kSecondBarrier, kSecondFence, kSecondLevel };

__global__ void by_ticket(uint32_t* parts, uint32_t* ticket, uint32_t* out, int missing) {
  __shared__ uint32_t place;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  parts[i] = 1;
  if (missing != kFirstFence) __threadfence();
  if (missing != kFirstBarrier) __syncthreads();
  if (threadIdx.x == 0) place = atomicAdd(ticket, 1u);
  if (missing != kSecondBarrier) __syncthreads();
  if (missing != kSecondFence) __threadfence();
  if (place != gridDim.x - 1) return;
  const unsigned next = (i + blockDim.x) % (gridDim.x * blockDim.x);
  out[threadIdx.x] = missing == kSecondLevel ? parts[next] : __ldcg(parts + next);
}

// The same with fences by one thread, before its ticket and behind it, which publish for all that it has met.
__global__ void by_one_fence(uint32_t* parts, uint32_t* ticket, uint32_t* out, int missing) {
  __shared__ uint32_t place;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  parts[i] = 1;
  if (missing != kFirstBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (missing != kFirstFence) __threadfence();
    place = atomicAdd(ticket, 1u);
    if (missing != kSecondFence) __threadfence();
  }
  if (missing != kSecondBarrier) __syncthreads();
  if (place != gridDim.x - 1) return;
  const unsigned next = (i + blockDim.x) % (gridDim.x * blockDim.x);
  out[threadIdx.x] = missing == kSecondLevel ? parts[next] : __ldcg(parts + next);
}

// All blocks meet, and each reads what another wrote. They wait for ever if some are not resident.
__global__ void all_meet(uint32_t* parts, uint32_t* ticket, uint32_t* out, int missing) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  parts[i] = 1;
  if (missing != kFirstBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (missing != kFirstFence) __threadfence();
    atomicAdd(ticket, 1u);
    while (atomicAdd(ticket, 0u) < gridDim.x) continue;
    if (missing != kSecondFence) __threadfence();
  }
  if (missing != kSecondBarrier) __syncthreads();
  const unsigned next = (i + blockDim.x) % (gridDim.x * blockDim.x);
  out[i] = missing == kSecondLevel ? parts[next] : __ldcg(parts + next);
}

// One thread forgets its fence.
__global__ void one_unfenced(uint32_t* parts, uint32_t* ticket, uint32_t* out, bool wrong) {
  parts[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  __shared__ uint32_t place;
  if (!wrong || threadIdx.x != 5) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) place = atomicAdd(ticket, 1u);
  __syncthreads();
  __threadfence();
  if (place != gridDim.x - 1) return;
  for (unsigned b = 0; b < gridDim.x; ++b) out[threadIdx.x] += __ldcg(parts + b * blockDim.x + threadIdx.x);
}

// The last block writes words that the others have read: before their tickets, or behind.
__global__ void overwrites(uint32_t* x, uint32_t* ticket, uint32_t* out, bool wrong) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (!wrong) out[i] = x[threadIdx.x];
  const bool last = is_last_block(ticket, gridDim.x);
  if (wrong) out[i] = x[threadIdx.x];
  if (last) x[threadIdx.x] = 9;
}

// Writes down that a block has come, and that it comes again.
__global__ void two_tickets(uint32_t* log, uint32_t* place) {
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) log[atomicAdd(place, 1u)] = blockIdx.x;
    __syncthreads();
  }
}

// Waits for a word that no thread writes.
__global__ void waits_in_vain(uint32_t* out) {
  while (*static_cast<volatile uint32_t*>(out) == 0) continue;
}

// ---- Operations that a GPU answers otherwise than a CPU.

__global__ void shifts(uint32_t* out, int by) { out[0] = 1u << (by + threadIdx.x); }
__global__ void divides(uint32_t* out, int by) { out[0] = 100 / by; }
__global__ void converts(uint32_t* out, float x) { out[0] = static_cast<uint32_t>(static_cast<int>(x)); }

}  // namespace

void define_orders(py::module_& m) {
  DEFINE(told_twice, (U32 out, bool wrong), 1, 64, 0, queue, out.mutable_data(), wrong);
  DEFINE(lanes_exchange, (U32 out, bool wrong), 1, 64, 0, queue, out.mutable_data(), wrong);
  DEFINE(half_a_warp, (U32 out, bool wrong), 1, 32, 0, queue, out.mutable_data(), wrong);
  DEFINE(bytes_apart, (Array<uint8_t> out, bool wrong), 1, 64, 0, queue, out.mutable_data(), wrong);
  DEFINE(same_value, (U32 out, bool wrong), 2, 64, 0, queue, out.mutable_data(), wrong);
  DEFINE(counts, (U32 out, bool wrong), 2, 64, 0, queue, out.mutable_data(), wrong);
  DEFINE(peeks, (U32 out, bool wrong), 2, 64, 0, queue, out.mutable_data(), wrong);
  DEFINE(by_ticket, (U32 parts, U32 ticket, U32 out, int missing), blocks_of(parts, 64), 64, 0, queue, parts.mutable_data(),
         ticket.mutable_data(), out.mutable_data(), missing);
  DEFINE(by_one_fence, (U32 parts, U32 ticket, U32 out, int missing), blocks_of(parts, 64), 64, 0, queue, parts.mutable_data(),
         ticket.mutable_data(), out.mutable_data(), missing);
  DEFINE(all_meet, (U32 parts, U32 ticket, U32 out, int missing), blocks_of(parts, 64), 64, 0, queue, parts.mutable_data(),
         ticket.mutable_data(), out.mutable_data(), missing);
  DEFINE(one_unfenced, (U32 parts, U32 ticket, U32 out, bool wrong), blocks_of(parts, 64), 64, 0, queue, parts.mutable_data(),
         ticket.mutable_data(), out.mutable_data(), wrong);
  DEFINE(overwrites, (U32 x, U32 ticket, U32 out, bool wrong), blocks_of(out, 64), 64, 0, queue, x.mutable_data(),
         ticket.mutable_data(), out.mutable_data(), wrong);
  DEFINE(two_tickets, (U32 log, U32 place), blocks_of(log, 2), 64, 0, queue, log.mutable_data(), place.mutable_data());
  DEFINE(waits_in_vain, (U32 out), 2, 32, 0, queue, out.mutable_data());
  DEFINE(shifts, (U32 out, int by), 1, 1, 0, queue, out.mutable_data(), by);
  DEFINE(divides, (U32 out, int by), 1, 1, 0, queue, out.mutable_data(), by);
  DEFINE(converts, (U32 out, float x), 1, 1, 0, queue, out.mutable_data(), x);
}

}  // namespace selftest
