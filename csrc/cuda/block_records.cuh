// Statistics of a bucket's pieces on a GPU, over blocks: a record in scratch for each part, and the records of a piece.
//
// A part is a piece's share of a block's entries (the CPU twins call a piece's share of a block a run). Its record's number is
// its block's plus its piece's. No two parts have the same number, since at least one of the two rises from part to part.
#pragma once

#include <cstdint>
#include <cstring>

#include "block_moments.cuh"
#include "block_pieces.cuh"

namespace gradcomp::cuda {

// Entries of a block that measures. Threads join what they found once a part, which costs as much as reading a thousand
// entries.
constexpr int64_t kMeasured = 4 * kTile;

inline int64_t records_of(int64_t n, int64_t pieces) { return blocks_for(n, kMeasured) + pieces; }

// The moments of a part, as 32-bit words in scratch.
struct MomentsRecord {
  float pivot;
  float five[kMoments];
};

// The same for a sum. Scratch may not be aligned for a double.
struct SumRecord {
  uint32_t words[2];
};

static __device__ __forceinline__ MomentsRecord record_of(const Shifted<float>& found) {
  MomentsRecord record;
  record.pivot = found.pivot;
  store_moments(found.moments, record.five);
  return record;
}

static __device__ __forceinline__ SumRecord record_of(double found) {
  SumRecord record;
  memcpy(record.words, &found, sizeof found);
  return record;
}

static __device__ __forceinline__ double sum_of(const SumRecord& record) {
  double found;
  memcpy(&found, record.words, sizeof found);
  return found;
}

// Call use(record, count) for this thread's records of piece blockIdx.x, each with the number of its entries. A few are read
// before the first is used.
template <class Record, class Use>
static __device__ __forceinline__ void for_each_record(const Pieces& grads, const Record* records, Use use) {
  constexpr int kEach = 4;
  const int64_t begin = grads.begin[blockIdx.x], end = grads.begin[blockIdx.x + 1];
  const int64_t blocks = begin < end ? (end + kMeasured - 1) / kMeasured : 0;
  for (int64_t first = begin / kMeasured + threadIdx.x; first < blocks; first += kEach * kTileThreads) {
    Record some[kEach];
    UNROLLED for (int i = 0; i < kEach; ++i) {
      const int64_t block = first + i * kTileThreads;
      some[i] = records[(block < blocks ? block : first) + blockIdx.x];
    }
    UNROLLED for (int i = 0; i < kEach; ++i) {
      const int64_t block = first + i * kTileThreads;
      if (block >= blocks) continue;
      const int64_t from = block * kMeasured > begin ? block * kMeasured : begin;
      const int64_t to = (block + 1) * kMeasured < end ? (block + 1) * kMeasured : end;
      use(some[i], static_cast<double>(to - from));
    }
  }
}

// A join for join_block of moments that share their mean.
struct Gather {
  __device__ __forceinline__ Moments<double> operator()(const Moments<double>& a, const Moments<double>& b) const {
    if (b.count == 0) return a;
    if (a.count == 0) return b;
    return {
        a.count + b.count,    a.mean, a.squares + b.squares, a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high,
        a.nonzero + b.nonzero};
  }
};

// Join the records of piece blockIdx.x, for thread 0. The mean comes first, and then the deviations from it: no record waits
// for the one before it.
static __device__ __forceinline__ Moments<double> join_records(const Pieces& grads, const MomentsRecord* records) {
  __shared__ double mean;
  const int64_t begin = grads.begin[blockIdx.x], end = grads.begin[blockIdx.x + 1];
  if (begin >= end) return {};
  const double pivot = records[begin / kMeasured + blockIdx.x].pivot;
  const auto apart = [&](const MomentsRecord& record) { return record.pivot - pivot + record.five[0]; };
  double sum = 0;
  for_each_record(grads, records, [&](const MomentsRecord& record, double count) { sum += count * apart(record); });
  sum = join_block<kTileThreads>(sum, Add{});
  if (threadIdx.x == 0) mean = sum / static_cast<double>(end - begin);
  __syncthreads();
  Moments<double> all = {};
  for_each_record(grads, records, [&](const MomentsRecord& record, double count) {
    Moments<double> its = load_moments(record.five, count);
    const double further = apart(record) - mean;
    its.squares += count * further * further;
    all = Gather{}(all, its);
  });
  all = join_block<kTileThreads>(all, Gather{});
  all.mean = pivot + mean;
  return all;
}

}  // namespace gradcomp::cuda
