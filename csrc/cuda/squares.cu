// Sums of squares of a bucket's gradients, on a GPU. Bytes: 4 an entry (f32 pieces), and a record of 8 for each part, which the
// second of two launches joins.

#include "../ops.h"
#include "block_records.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = kTileThreads;

__global__ void __launch_bounds__(kThreads) square_tiles(const __grid_constant__ Pieces grads, SumRecord* records) {
  for_each_part<kMeasured>(grads, [&](int piece, int64_t begin, int64_t end) {
    double mine = 0;
    for_each_tile_of(
        grads, piece, begin, end, true,
        [&](int64_t tile) {
          Four share[kRows];
          read_share(grads, piece, tile + threadIdx.x * 4, share);
          for (const Four& four : share) {
            for (const double x : four.x) mine += x * x;
          }
        },
        [&](int64_t entry, int count) {
          const Four four = read_piece(grads, piece, entry, count);
          for (const double x : four.x) mine += x * x;
        });
    const double all = join_block<kThreads>(mine, Add{});
    if (threadIdx.x == 0) records[blockIdx.x + piece] = record_of(all);
  });
}

__global__ void __launch_bounds__(kThreads)
    join_squares(const __grid_constant__ Pieces grads, const SumRecord* records, double* squares) {
  double mine = 0;
  for_each_record(grads, records, [&](const SumRecord& record, double) { mine += sum_of(record); });
  const double all = join_block<kThreads>(mine, Add{});
  if (threadIdx.x == 0) squares[blockIdx.x] = all;
}

}  // namespace

void sum_squares(const Pieces& grads, Span<double> squares, Span<uint32_t> scratch, Queue queue) {
  auto* const records = reinterpret_cast<SumRecord*>(scratch.data);
  const int64_t n = grads.size();
  if (n > 0) LAUNCH(square_tiles, blocks_for(n, kMeasured), kThreads, 0, queue, grads, records);
  if (grads.count > 0) LAUNCH(join_squares, grads.count, kThreads, 0, queue, grads, records, squares.data);
}

}  // namespace gradcomp::cuda
