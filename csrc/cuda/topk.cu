// Exact top-k on a GPU, over a residual: one launch, in which all blocks count the leading digits of all keys, list the entries
// that may be chosen, search on among them (device_select.cuh), and may pack what they took.
//
// Bytes an entry: 8; about 30 a candidate, which the second cache holds; 20 more if the candidates are too many for a list.
// Predicted for 6 M entries of which 1 % are taken: 12 us to count, 12 us to list, 6 meetings of 1.5 us, and 6 us for 90,000
// candidates: 39 us. Of 25 M entries: 119 us.

#include "../math.h"
#include "../ops.h"
#include "device_pack.cuh"
#include "device_select.cuh"

namespace gradcomp::cuda {
namespace {

__global__ void __launch_bounds__(kSelecting)
    select_largest(const __grid_constant__ ResidualReader reader, MovingHand hand, uint32_t n, uint32_t k,
                   const __grid_constant__ Plan plan, const __grid_constant__ Packing packing, uint32_t* ticket) {
  const Counted own = shared_digits();
  Meeting meeting = {ticket};
  plan.clear();
  clear_digits<kSelecting, kFirstDigits>(own.counts);
  for_each_own_tile(plan, [&](uint32_t tile) {
    Four rows[kSelectRows];
    read_rows(reader, n, tile, rows);
    const uint32_t first = tile * kSelectTile + 4 * (threadIdx.x % kWarp);
    UNROLLED for (int row = 0; row < kSelectRows; ++row) {
      for (uint32_t i = 0; i < 4; ++i) {
        if (first + row * kSelectRow + i >= n) break;
        count_digit<kFirstDigits>(own.counts, magnitude_key(rows[row].x[i]) >> kFirstShift);
      }
    }
  });
  meeting.wait();
  Choice choice = {0, k, 0};
  const Digit first = pick_next(own, plan, choice, meeting);
  const uint32_t reach = first.digit == 0 ? n : first.reach;
  const bool listed = reach <= plan.longest_list;
  if (listed) {  // no meeting: a tile's candidates are its own warp's
    for_each_own_tile(plan, [&](uint32_t tile) {
      list_tile(reader, n, tile, plan, [&](float x, uint32_t) { return magnitude_key(x) >= choice.digits; });
    });
  }
  if (blockIdx.x + threadIdx.x == 0) hand.announce(k);
  choose_and_take(Sources<ResidualReader, Magnitude>{reader, Magnitude{}, plan, n, listed}, hand, choice, own, meeting);
  pack_taken<kSelecting>(packing, k, meeting);
  meeting.end();
}

void select(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, int64_t k, Span<float> values,
            Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, const Packing& packing, uint32_t* ticket,
            Queue queue) {
  const MovingHand hand = {residual.data, ages.data, values.data, indices.data, flag.data, header.data};
  const Plan plan(residual.size, k, scratch.data);
  LAUNCH_TOGETHER(select_largest, plan.blocks(), kSelecting, queue, ResidualReader{residual.data}, hand,
                  static_cast<uint32_t>(residual.size), static_cast<uint32_t>(k), plan, packing, ticket);
}

}  // namespace

// Behind the plan lies the ticket of a call that has no counters.
int64_t take_topk_scratch(int64_t n, int64_t k) { return Plan(n, k, nullptr).words + 1; }

void take_topk(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, int64_t k,
               Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  uint32_t* const ticket = zeroed_ticket(scratch, take_topk_scratch(residual.size, k), queue);
  select(residual, ages, flag, k, values, indices, header, scratch, {}, ticket, queue);
}

void take_and_pack(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, int64_t k,
                   const Taken& taken, Span<uint32_t> scratch, uint32_t* ticket, Queue queue) {
  select(residual, ages, flag, k, taken.values, taken.indices, taken.header, scratch, packing_of(residual, taken), ticket,
         queue);
}

}  // namespace gradcomp::cuda
