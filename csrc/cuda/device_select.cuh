// The k largest entries, exactly, on a GPU: the part that take_topk, take_above and heaviest share. A radix selection finds the
// k-th largest key, 11, 10 and 10 bits at a time, with all its state on the device. The chosen entries are then handed over in
// index order.
//
// The entries to choose from, the sources, are candidates in a list, which keeps their values. If they are too many for it,
// every pass reads all entries instead; the device decides. A list has its tiles in any order, and each tile's candidates in
// index order, so a warp takes a tile, in every pass the same ones.
//
// One launch of a few blocks, all resident, which meet between the passes: predicted 1.5 us a meeting, of which there are five
// to eight. 32 blocks of 1,024 threads have 4 MB in flight, and read some 2 TB/s.
//
//   Reader  the entries. read(entry, count) gives four from entry on, a multiple of four, with zeros beyond count; read_whole,
//           if is_aligned() holds, gives four that are there; at(index) gives one.
//   Key     the comparison. key.over(first, last), called by whole warps, gives a key for entries first to last. Its
//           key(x, index) is below 2^31, and 0 for an entry that cannot be chosen.
//   Hand    the destination. take(place, index, x) hands one over.
#pragma once

#include "../math.h"
#include "block.cuh"
#include "device_plan.cuh"
#include "launch.cuh"

namespace gradcomp::cuda {

// A magnitude's key: any entry may be chosen.
struct Magnitude {
  __device__ __forceinline__ Magnitude over(uint32_t, uint32_t) const { return *this; }
  __device__ __forceinline__ uint32_t operator()(float x, uint32_t) const { return magnitude_key(x); }
};

template <class Reader, class Key>
struct Sources {
  const Reader& reader;
  const Key& keys;
  const Plan& plan;
  uint32_t n;
  bool listed;

  // Call use(there, key, index, x) for a tile's sources, of which each lane has one at a time, in index order.
  template <class Use>
  __device__ __forceinline__ void each(uint32_t tile, Use use) const {
    constexpr uint32_t kShare = 4;
    const uint32_t base = tile * kSelectTile, all = min(kSelectTile, n - base);
    const uint32_t begin = listed ? plan.tile_begin[tile] : base, count = listed ? plan.tile_count[tile] : all;
    const Key its = listed ? keys : keys.over(base, base + all - 1);
    for (uint32_t first = 0; first < count; first += kShare * kWarp) {
      uint32_t index[kShare];
      float x[kShare];
      UNROLLED for (uint32_t i = 0; i < kShare; ++i) {
        const uint32_t place = first + i * kWarp + threadIdx.x % kWarp, at = begin + place;
        index[i] = place >= count ? 0 : listed ? plan.list[at] : at;
        x[i] = place >= count ? 0 : listed ? plan.values[at] : reader.at(at);
      }
      UNROLLED for (uint32_t i = 0; i < kShare; ++i) {
        const bool there = first + i * kWarp + threadIdx.x % kWarp < count;
        if (first + i * kWarp < count) use(there, listed ? magnitude_key(x[i]) : its(x[i], index[i]), index[i], x[i]);
      }
    }
  }
};

// The state of the search for the k-th largest key: its leading digits, of which so many are known, the other bits being 0; and
// the number of entries with these digits that are taken.
struct Choice {
  uint32_t digits, wanted;
  int known;
};

// The digits that a block counts, and the one that all blocks' counts lead to.
struct Counted {
  uint32_t* counts;  // kPlaces<kFirstDigits>
  Digit* picked;
};
static __device__ __forceinline__ Counted shared_digits() {
  alignas(16) __shared__ uint32_t counts[kPlaces<kFirstDigits>];
  __shared__ Digit picked;
  return {counts, &picked};
}

// Add up the digits that the blocks have counted, and pick the next one of the k-th key.
static __device__ __forceinline__ Digit pick_next(const Counted& own, const Plan& plan, Choice& choice, Meeting& meeting) {
  uint32_t* const all = plan.counts + choice.known * kFirstDigits;
  add_up_digits<kSelecting, kFirstDigits>(own.counts, all);
  meeting.wait();
  pick_digit<kSelecting, kFirstDigits>(all, choice.wanted, own.picked);
  const Digit picked = *own.picked;
  choice.digits |= picked.digit << (kFirstShift - choice.known * kNextBits);
  choice.wanted -= picked.above;
  ++choice.known;
  return picked;
}

// Find the digits that are not known yet, and hand the chosen entries over.
template <class Reader, class Key, class Hand>
static __device__ __forceinline__ void choose_and_take(const Sources<Reader, Key>& from, const Hand& hand, Choice choice,
                                                       const Counted& own, Meeting& meeting) {
  const Plan& plan = from.plan;
  while (choice.known < kAllDigits) {
    const int shift = kFirstShift - choice.known * kNextBits;
    const uint32_t most = choice.known == 0 ? kFirstDigits : kNextDigits;
    clear_digits<kSelecting, kFirstDigits>(own.counts);
    for_each_own_tile(plan, [&](uint32_t tile) {
      from.each(tile, [&](bool there, uint32_t key, uint32_t, float) {
        const uint32_t digit = (key ^ choice.digits) >> shift;
        if (there && digit < most) count_digit<kFirstDigits>(own.counts, digit);
      });
    });
    pick_next(own, plan, choice, meeting);
  }
  const uint32_t kth = choice.digits, quota = choice.wanted, lane = threadIdx.x % kWarp;
  for_each_own_tile(plan, [&](uint32_t tile) {
    uint32_t above = 0, equal = 0;
    from.each(tile, [&](bool there, uint32_t key, uint32_t, float) {
      above += __popc(__ballot_sync(kWholeWarp, there && key > kth));
      equal += __popc(__ballot_sync(kWholeWarp, there && key == kth));
    });
    if (lane == 0) {
      plan.tile_above[tile] = above;
      plan.tile_equal[tile] = equal;
    }
  });
  const uint32_t first = plan.first_tile(blockIdx.x), tiles = plan.first_tile(blockIdx.x + 1) - first;
  __syncthreads();
  const uint32_t block_above = scan_in_place<kSelecting>(plan.tile_above + first, tiles);
  const uint32_t block_equal = scan_in_place<kSelecting>(plan.tile_equal + first, tiles);
  if (threadIdx.x == 0) {
    plan.of_blocks[2 * blockIdx.x] = block_above;
    plan.of_blocks[2 * blockIdx.x + 1] = block_equal;
  }
  meeting.wait();
  uint32_t all_above = 0, all_equal = 0;
  for (uint32_t block = 0; block < blockIdx.x; ++block) {
    all_above += __ldcg(plan.of_blocks + 2 * block);
    all_equal += __ldcg(plan.of_blocks + 2 * block + 1);
  }
  const unsigned before = (1u << lane) - 1;
  for_each_own_tile(plan, [&](uint32_t tile) {
    uint32_t above = all_above + plan.tile_above[tile], equal = all_equal + plan.tile_equal[tile];
    from.each(tile, [&](bool there, uint32_t key, uint32_t index, float x) {
      // Those before it decide on the place of an entry, and on whether one that is equal to the k-th is taken.
      const bool is_above = there && key > kth, is_equal = there && key == kth;
      const unsigned above_there = __ballot_sync(kWholeWarp, is_above), equal_there = __ballot_sync(kWholeWarp, is_equal);
      const uint32_t its_equal = equal + __popc(equal_there & before);
      const uint32_t place = above + __popc(above_there & before) + min(its_equal, quota);
      if (is_above || (is_equal && its_equal < quota)) hand.take(place, index, x);
      above += __popc(above_there);
      equal += __popc(equal_there);
    });
  });
}

}  // namespace gradcomp::cuda
