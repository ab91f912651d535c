// The k largest entries, exactly, on a GPU: the part that take_topk, take_above and heaviest share. A radix selection finds the
// k-th largest key, 11, 10 and 10 bits at a time, with all its state on the device. The chosen entries are then handed over in
// index order.
//
// The entries to choose from, the sources, are candidates in a list, which keeps their values. If they are too many for it,
// every pass reads all entries instead; the device decides. A list has its tiles in any order, and each tile's candidates in
// index order, so a warp takes a tile. The last block of a launch picks and scans for all, so that no block waits.
//
// Two digits leave few candidates undecided. The last block of count_last_digits decides on them, and count_taken has nothing
// to do.
//
//   Reader  the entries. read(entry, count) gives four from entry on, a multiple of four, with zeros beyond count; at(index)
//           gives one. over(tile), called by whole blocks, gives a reader for a tile, with read() and, if is_aligned() holds,
//           read_whole(entry) for four that are there, kShare of them at once.
//   Key     the comparison. key.over(first, last), called by whole blocks, gives a key for entries first to last. Its
//           key(x, index) is below 2^31, and 0 for an entry that cannot be chosen.
//   Hand    the destination. announce(found), by one thread, tells it the number of entries that passed or were asked for;
//           take(place, index, x) hands one over.
#pragma once

#include "../math.h"
#include "block.cuh"
#include "device_plan.cuh"
#include "launch.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {

// A magnitude's key: any entry may be chosen.
struct Magnitude {
  __device__ __forceinline__ Magnitude over(uint32_t, uint32_t) const { return *this; }
  __device__ __forceinline__ uint32_t operator()(float x, uint32_t) const { return magnitude_key(x); }
};

// This thread's four entries in a row of a small tile. All threads of the block must construct theirs together.
template <class Reader, class Key>
struct SmallTile {
  uint32_t first;
  Four entry;
  uint32_t key[4];
  int count;  // the number of entries, at most four

  __device__ __forceinline__ SmallTile(const Reader& reader, uint32_t n, uint32_t tile, const Key& keys) {
    const uint32_t last = (n - tile < kSmallTile ? n : tile + kSmallTile) - 1;
    const Key its = keys.over(tile, last);
    first = tile + threadIdx.x * 4;
    count = first > last ? 0 : last - first < 4 ? static_cast<int>(last - first + 1) : 4;
    entry = reader.read(first, count);
    for (uint32_t i = 0; i < 4; ++i) key[i] = static_cast<int>(i) < count ? its(entry.x[i], first + i) : 0;
  }

  // Compare an entry with the k-th key: 1 in the lower half of the word if above, 1 in the upper half if equal.
  __device__ __forceinline__ uint32_t standing(int i, uint32_t kth) const {
    if (i >= count || key[i] < kth) return 0;
    return key[i] > kth ? 1u : 1u << 16;
  }
};

// Call use(tile, small tile) for the small tiles of this block, one of `blocks`, if all n entries are the sources.
template <class Reader, class Key, class Use>
static __device__ __forceinline__ void for_each_small_tile(const Reader& reader, const Key& keys, uint32_t n, uint32_t blocks,
                                                           Use use) {
  for (uint32_t tile = blockIdx.x * kSmallTile; tile < n; tile += blocks * kSmallTile) {
    use(tile / kSmallTile, SmallTile<Reader, Key>(reader, n, tile, keys));
  }
}

// Count the blocks with work. The grid is large enough for all entries; a list needs few of its blocks. The others read nothing
// that the last block writes.
static __device__ __forceinline__ uint32_t blocks_with_work(const Plan& plan) {
  const uint32_t sources = plan.choice->sources, listed = plan.choice->listed;
  if (sources == 0) return 0;
  const uint32_t most = gridDim.x < kMostSourceBlocks ? gridDim.x : kMostSourceBlocks;
  const uint32_t blocks =
      listed != 0 ? (plan.tiles + kTilesAtOnce - 1) / kTilesAtOnce : (sources + kSmallTile - 1) / kSmallTile;
  return blocks < most ? blocks : most;
}

// Count a key's digit behind those that are known, if it has these.
template <uint32_t kDigits>
static __device__ __forceinline__ void count_next(uint32_t* counts, uint32_t key, uint32_t digits, int shift) {
  const uint32_t difference = (key ^ digits) >> shift;
  if (difference < kDigits) count_digit<kDigits>(counts, difference);
}

// The same for all entries, as one of `blocks` blocks.
template <uint32_t kDigits, class Reader, class Key>
static __device__ __forceinline__ void count_all(const Reader& reader, const Key& keys, const Choice& choice, int shift,
                                                 uint32_t blocks, uint32_t* counts) {
  for_each_small_tile(reader, keys, choice.sources, blocks, [&](uint32_t, const auto& its) {
    for (int i = 0; i < 4; ++i) {
      if (i < its.count) count_next<kDigits>(counts, its.key[i], choice.digits, shift);
    }
  });
}

// Add up the blocks' histograms, and pick the next digit in the last block. Returns true there. picked is in shared memory.
template <uint32_t kDigits>
static __device__ __forceinline__ bool pick_next(const uint32_t* counts, uint32_t* all, uint32_t* ticket, uint32_t blocks,
                                                 const Choice& choice, int shift, const Plan& plan, Digit* picked) {
  add_up_digits<kThreads, kDigits>(counts, all);
  if (!is_last_block(ticket, blocks)) return false;
  pick_digit<kThreads, kDigits>(all, choice.wanted, picked);
  if (threadIdx.x == 0) {
    plan.choice->digits = choice.digits | picked->digit << shift;
    plan.choice->wanted = choice.wanted - picked->above;
  }
  return true;
}

// Count the second digit, of take_above.
template <class Reader, class Key>
static __global__ void __launch_bounds__(kThreads) count_digits(const __grid_constant__ Reader reader, Key keys, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kNextDigits>];
  __shared__ Digit picked;
  const uint32_t blocks = blocks_with_work(plan);
  if (blockIdx.x >= blocks) return;
  const Choice choice = *plan.choice;
  clear_digits<kThreads, kNextDigits>(counts);
  if (choice.listed != 0) {
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < choice.sources; i += blocks * kThreads) {
      count_next<kNextDigits>(counts, magnitude_key(plan.values[i]), choice.digits, kNextBits);
    }
  } else {
    count_all<kNextDigits>(reader, keys, choice, kNextBits, blocks, counts);
  }
  pick_next<kNextDigits>(counts, plan.next_counts, plan.tickets + 2, blocks, choice, kNextBits, plan, &picked);
}

// Note an undecided candidate of each lane that has one, while there is room.
static __device__ __forceinline__ void note_undecided(const Plan& plan, bool mine, uint32_t tile, uint32_t digit) {
  const unsigned lane = threadIdx.x % kWarp, all = __ballot_sync(kWholeWarp, mine);
  if (all == 0) return;
  const uint32_t first = lane == 0 ? atomicAdd(plan.counters + 1, static_cast<uint32_t>(__popc(all))) : 0;
  const uint32_t place = __shfl_sync(kWholeWarp, first, 0) + __popc(all & ((1u << lane) - 1));
  if (mine && place < kMostUndecided) plan.undecided[place] = tile << kNextBits | digit;
}

// Add each undecided candidate to its tile's numbers, and sum these over the tiles. The last block calls this.
static __device__ __forceinline__ void decide(const Plan& plan, uint32_t undecided, uint32_t digit) {
  for (uint32_t i = threadIdx.x; i < undecided; i += kThreads) {
    const uint32_t its = __ldcg(plan.undecided + i), last = its % kNextDigits;
    if (last >= digit) atomicAdd((last > digit ? plan.tile_above : plan.tile_equal) + (its >> kNextBits), 1u);
  }
  __syncthreads();
  scan_in_place<kThreads>(plan.tile_above, plan.tiles);
  scan_in_place<kThreads>(plan.tile_equal, plan.tiles);
}

// Count the last digit. From a list, also count each tile's candidates above the digits before it, and note those that have
// these digits.
template <class Reader, class Key>
static __global__ void __launch_bounds__(kThreads, 4)
    count_last_digits(const __grid_constant__ Reader reader, Key keys, Plan plan) {
  alignas(16) __shared__ uint32_t counts[kPlaces<kNextDigits>];
  __shared__ Digit picked;
  const uint32_t blocks = blocks_with_work(plan);
  if (blockIdx.x >= blocks) return;
  const Choice choice = *plan.choice;
  clear_digits<kThreads, kNextDigits>(counts);
  if (choice.listed != 0) {
    for_each_tile_of_warp(plan, blocks, [&](uint32_t tile) {
      uint32_t above = 0;
      for_each_candidate(plan, tile, [&](const Candidate& its) {
        const uint32_t key = magnitude_key(its.x), digit = key % kNextDigits;
        const bool mine = its.there && key - digit == choice.digits;
        above += __popc(__ballot_sync(kWholeWarp, its.there && key - digit > choice.digits));
        if (mine) count_digit<kNextDigits>(counts, digit);
        note_undecided(plan, mine, tile, digit);
      });
      if (threadIdx.x % kWarp == 0) {
        plan.tile_above[tile] = above;
        plan.tile_equal[tile] = 0;
      }
    });
  } else {
    count_all<kNextDigits>(reader, keys, choice, 0, blocks, counts);
  }
  uint32_t* const all = plan.next_counts + kNextDigits;
  if (!pick_next<kNextDigits>(counts, all, plan.tickets + 3, blocks, choice, 0, plan, &picked)) return;
  const uint32_t undecided = __ldcg(plan.counters + 1);
  if (choice.listed == 0 || undecided > kMostUndecided) return;
  decide(plan, undecided, picked.digit);
  if (threadIdx.x == 0) plan.choice->counted = 1;
}

template <class Reader, class Key>
static __global__ void __launch_bounds__(kThreads) count_taken(const __grid_constant__ Reader reader, Key keys, Plan plan) {
  const Choice choice = *plan.choice;
  const uint32_t blocks = choice.counted != 0 ? 0 : blocks_with_work(plan);
  if (blockIdx.x >= blocks) return;
  if (choice.listed != 0) {
    for_each_tile_of_warp(plan, blocks, [&](uint32_t tile) {
      uint32_t above = 0, equal = 0;
      for_each_candidate(plan, tile, [&](const Candidate& its) {
        const uint32_t key = magnitude_key(its.x);
        above += __popc(__ballot_sync(kWholeWarp, its.there && key > choice.digits));
        equal += __popc(__ballot_sync(kWholeWarp, its.there && key == choice.digits));
      });
      if (threadIdx.x % kWarp == 0) {
        plan.tile_above[tile] = above;
        plan.tile_equal[tile] = equal;
      }
    });
  } else {
    for_each_small_tile(reader, keys, choice.sources, blocks, [&](uint32_t tile, const auto& its) {
      uint32_t mine = 0;
      for (int i = 0; i < 4; ++i) mine += its.standing(i, choice.digits);
      uint32_t total;
      block_exclusive_sum<kThreads>(mine, total);
      if (threadIdx.x == 0) {
        plan.tile_above[tile] = total & 0xffffu;
        plan.tile_equal[tile] = total >> 16;
      }
    });
  }
  if (!is_last_block(plan.tickets + 4, blocks)) return;
  const uint32_t tiles = choice.listed != 0 ? plan.tiles : (choice.sources + kSmallTile - 1) / kSmallTile;
  scan_in_place<kThreads>(plan.tile_above, tiles);
  scan_in_place<kThreads>(plan.tile_equal, tiles);
}

template <class Reader, class Hand, class Key>
static __global__ void __launch_bounds__(kThreads)
    take_chosen(const __grid_constant__ Reader reader, Hand hand, Key keys, Plan plan) {
  const Choice choice = *plan.choice;
  const uint32_t blocks = blocks_with_work(plan), kth = choice.digits, quota = choice.wanted;
  if (blockIdx.x >= blocks) return;
  // Those before it decide on the place of an entry, and on whether one that is equal to the k-th is taken.
  const auto take = [&](bool is_above, bool is_equal, uint32_t above, uint32_t equal, uint32_t index, float x) {
    if (is_above || (is_equal && equal < quota)) hand.take(above + (equal < quota ? equal : quota), index, x);
  };
  if (choice.listed != 0) {
    for_each_tile_of_warp(plan, blocks, [&](uint32_t tile) {
      uint32_t above = plan.tile_above[tile], equal = plan.tile_equal[tile];
      const unsigned before = (1u << threadIdx.x % kWarp) - 1;
      for_each_candidate(plan, tile, [&](const Candidate& its) {
        const uint32_t key = magnitude_key(its.x);
        const bool is_above = its.there && key > kth, is_equal = its.there && key == kth;
        const unsigned all_above = __ballot_sync(kWholeWarp, is_above), all_equal = __ballot_sync(kWholeWarp, is_equal);
        take(is_above, is_equal, above + __popc(all_above & before), equal + __popc(all_equal & before), its.index, its.x);
        above += __popc(all_above);
        equal += __popc(all_equal);
      });
    });
    return;
  }
  for_each_small_tile(reader, keys, choice.sources, blocks, [&](uint32_t tile, const auto& its) {
    uint32_t mine = 0;
    for (int i = 0; i < 4; ++i) mine += its.standing(i, kth);
    uint32_t total;
    const uint32_t before = block_exclusive_sum<kThreads>(mine, total);
    uint32_t above = plan.tile_above[tile] + (before & 0xffffu);
    uint32_t equal = plan.tile_equal[tile] + (before >> 16);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t standing = its.standing(static_cast<int>(i), kth);
      take(standing == 1, standing > 1, above, equal, its.first + i, its.entry.x[i]);
      above += standing & 0xffffu;
      equal += standing >> 16;
    }
  });
}

inline unsigned source_blocks(int64_t n) { return blocks_for(n, kSmallTile, kMostSourceBlocks); }

// Launch the last three kernels: the last digit, then the counts and the handover of the chosen entries.
template <class Reader, class Hand, class Key>
static void choose_and_take(const Reader& reader, Hand hand, int64_t n, Key keys, const Plan& plan, Queue queue) {
  const unsigned blocks = source_blocks(n);
  const auto count_last = count_last_digits<Reader, Key>;
  const auto count = count_taken<Reader, Key>;
  const auto take = take_chosen<Reader, Hand, Key>;
  LAUNCH(count_last, blocks, kThreads, 0, queue, reader, keys, plan);
  LAUNCH(count, blocks, kThreads, 0, queue, reader, keys, plan);
  LAUNCH(take, blocks, kThreads, 0, queue, reader, hand, keys, plan);
}

}  // namespace gradcomp::cuda
