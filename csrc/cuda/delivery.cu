// Updates out, on a GPU: written into the gradients where they lie, and wiped.
//
// Bytes an entry of spread (f32 pieces): 8. One launch for the whole bucket.

#include <type_traits>

#include "../math.h"
#include "../ops.h"
#include "block_pieces.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = kTileThreads;

__global__ void __launch_bounds__(kThreads) spread_tiles(const float* flat, const float* first, const uint8_t* marks,
                                                         const __grid_constant__ Pieces grads, float scale) {
  const bool failed = !is_finite(first[0]);
  // kWhole: all four are there and aligned. A run lies in one line, since both begin at multiples of four.
  const auto is_empty = [&](int64_t entry) { return marks != nullptr && marks[entry / kLine] == 0; };
  const auto deliver = [&](auto whole, int piece, int64_t entry, int count, const Four& from, bool empty) {
    constexpr bool kWhole = decltype(whole)::value;
    Four to;
    for (int i = 0; i < 4; ++i) to.x[i] = empty ? 0.0f : scale * from.x[i];  // 0 where scale is infinite too, as on a CPU
    if (failed && entry == grads.begin[piece]) to.x[0] = not_a_number();
    write_piece<kWhole>(grads, piece, entry, count, to);
  };
  const int piece = is_aligned(flat) ? only_piece(grads) : -1;
  if (piece >= 0) {
    const int64_t entry = blockIdx.x * kTile + threadIdx.x * 4;
    bool empty[kRows];
    Four share[kRows] = {};
    UNROLLED for (int i = 0; i < kRows; ++i) empty[i] = is_empty(entry + i * kRow);
    UNROLLED for (int i = 0; i < kRows; ++i) {
      if (!empty[i]) share[i] = load_whole(flat + entry + i * kRow);
    }
    UNROLLED for (int i = 0; i < kRows; ++i) deliver(std::true_type{}, piece, entry + i * kRow, 4, share[i], empty[i]);
  } else {
    for_each_run(grads, [&](int its, int64_t entry, int count) {
      const bool empty = is_empty(entry);
      deliver(std::false_type{}, its, entry, count, empty ? Four{} : load_four(flat + entry, count), empty);
    });
  }
}

__global__ void __launch_bounds__(kThreads) wipe_lines(float* flat, int64_t n, const uint8_t* marks) {
  const int64_t entry = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (entry < n && marks[entry / kLine] != 0) store_four(flat + entry, n - entry, Four{});
}

}  // namespace

void spread(Span<const float> flat, Span<const float> first, OptionalSpan<const uint8_t> marks, const Pieces& grads,
            float scale, Queue queue) {
  if (flat.size == 0) return;
  LAUNCH(spread_tiles, blocks_for(flat.size, kTile), kThreads, 0, queue, flat.data, first.data, marks.data, grads, scale);
}

void wipe(Span<float> flat, Span<uint8_t> marks, Queue queue) {
  if (flat.size == 0 || marks.size == 0) return;
  LAUNCH(wipe_lines, blocks_for(flat.size, 4 * kThreads), kThreads, 0, queue, flat.data, flat.size, marks.data);
  CUDA_TRY(cudaMemsetAsync(marks.data, 0, static_cast<size_t>(marks.size), static_cast<cudaStream_t>(queue.stream)));
}

}  // namespace gradcomp::cuda
