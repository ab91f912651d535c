// Updates out, on a GPU: written into the gradients where they lie, and wiped.
//
// Bytes an entry of spread (f32 pieces): 8, and 4 in a marked line that is wiped. One launch for the whole bucket. The wiped
// lines were just read and lie in the second cache: predicted 1 us for 1 % of 25 M entries, where a launch of its own took 14.

#include <type_traits>

#include "../math.h"
#include "../ops.h"
#include "block_pieces.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {
namespace {

constexpr unsigned kThreads = kTileThreads;

__global__ void __launch_bounds__(kThreads) spread_tiles(float* flat, const float* first, uint8_t* marks,
                                                         const __grid_constant__ Pieces grads, float scale, bool wipes) {
  const bool failed = !is_finite(first[0]);
  // kWhole: all four are there and aligned. A run lies in one line, since both begin at multiples of four.
  const auto is_empty = [&](int64_t entry) { return marks != nullptr && marks[entry / kLine] == 0; };
  const auto deliver = [&](auto whole, int piece, int64_t entry, int count, const Four& from, bool empty) {
    constexpr bool kWhole = decltype(whole)::value;
    Four to;
    for (int i = 0; i < 4; ++i) to.x[i] = empty ? 0.0f : scale * from.x[i];  // 0 where scale is infinite too, as on a CPU
    if (failed && entry == grads.begin[piece]) to.x[0] = not_a_number();
    write_piece<kWhole>(grads, piece, entry, count, to);
    if (wipes && !empty) store<kWhole>(flat + entry, count, Four{});
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
  if (wipes) wipe_marks<kTile>(marks, grads.begin[grads.count]);
}

__global__ void __launch_bounds__(kThreads) wipe_lines(float* flat, int64_t n, uint8_t* marks) {
  const int64_t entry = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  if (entry < n && marks[entry / kLine] != 0) store_four(flat + entry, n - entry, Four{});
  wipe_marks<4 * kThreads>(marks, n);
}

}  // namespace

void spread(Span<float> flat, Span<const float> first, OptionalSpan<uint8_t> marks, const Pieces& grads, float scale,
            bool wipes, Queue queue) {
  if (flat.size == 0) return;
  LAUNCH(spread_tiles, blocks_for(flat.size, kTile), kThreads, 0, queue, flat.data, first.data, marks.data, grads, scale,
         wipes);
}

void wipe(Span<float> flat, Span<uint8_t> marks, Queue queue) {
  if (flat.size == 0 || marks.size == 0) return;
  LAUNCH(wipe_lines, blocks_for(flat.size, 4 * kThreads), kThreads, 0, queue, flat.data, flat.size, marks.data);
}

}  // namespace gradcomp::cuda
