// The k largest entries, exactly, on a GPU: the part that take_topk, take_above and heaviest share. A radix selection finds the
// k-th largest key, 11, 10 and 10 bits at a time, with all its state on the device. The chosen entries are then handed over in
// index order.
//
// The entries to choose from, the sources, are listed from a bit for each entry. If they are too many for the list, every pass
// reads all entries instead; the device decides. The last block of a launch picks and scans for all, so that no block waits.
//
//   Reader  the entries. read(entry, count) gives four from entry on, a multiple of four, with zeros beyond count; at(index)
//           gives one. over(tile), called by whole blocks, gives a reader for a tile, with read() and, if is_aligned() holds,
//           read_whole(entry) for four that are there, kShare of them at once.
//   Key     the comparison. key.over(first, last), called by whole blocks, gives a key for entries first to last. Its
//           key(x, index) is below 2^31, and 0 for an entry that cannot be chosen.
//   Hand    the destination. announce(found), by one thread, tells it the number of entries that passed or were asked for;
//           take(place, index, x) hands one over.
#pragma once

#include "block.cuh"
#include "device_plan.cuh"
#include "launch.cuh"
#include "thread_four.cuh"

namespace gradcomp::cuda {

// This thread's four sources in a row of a small tile. All threads of the block must construct theirs together.
template <class Reader, class Key>
struct SourceTile {
  uint32_t index[4];
  Four entry = {};
  uint32_t key[4];
  int count;  // the number of sources, at most four

  __device__ __forceinline__ SourceTile(const Reader& reader, const Plan& plan, uint32_t sources, bool listed, uint32_t tile,
                                        const Key& keys) {
    const uint32_t last = (sources - tile < kSmallTile ? sources : tile + kSmallTile) - 1;
    const Key its = listed ? keys.over(plan.list[tile], plan.list[last]) : keys.over(tile, last);
    const uint32_t first = tile + threadIdx.x * 4;
    count = first > last ? 0 : last - first < 4 ? static_cast<int>(last - first + 1) : 4;
    for (uint32_t i = 0; i < 4; ++i) index[i] = first + i;
    if (listed) {
      for (int i = 0; i < 4; ++i) {
        if (i < count) index[i] = plan.list[first + i];
      }
      UNROLLED for (int i = 0; i < 4; ++i) {
        if (i < count) entry.x[i] = reader.at(index[i]);
      }
    } else {
      entry = reader.read(first, count);
    }
    for (int i = 0; i < 4; ++i) key[i] = i < count ? its(entry.x[i], index[i]) : 0;
  }

  // Compare an entry with the k-th key: 1 in the lower half of the word if above, 1 in the upper half if equal.
  __device__ __forceinline__ uint32_t standing(int i, uint32_t kth) const {
    if (i >= count || key[i] < kth) return 0;
    return key[i] > kth ? 1u : 1u << 16;
  }
};

// Count the blocks with work. The grid is large enough for all entries; a list needs few of its blocks.
static __device__ __forceinline__ uint32_t blocks_with_work(uint32_t sources) {
  const uint32_t tiles = (sources + kSmallTile - 1) / kSmallTile;
  return tiles < gridDim.x ? tiles : gridDim.x;
}

template <class Reader, class Key, uint32_t kDigits>
static __global__ void __launch_bounds__(kThreads)
    count_digits(const __grid_constant__ Reader reader, Key keys, int shift, uint32_t* all, uint32_t* ticket, Plan plan) {
  __shared__ uint32_t counts[kPlaces<kDigits>];
  __shared__ Digit picked;
  const uint32_t sources = plan.choice->sources;
  const uint32_t blocks = blocks_with_work(sources);
  if (blockIdx.x >= blocks) return;
  const bool listed = plan.choice->listed != 0;
  const uint32_t digits = plan.choice->digits;
  const uint32_t wanted = plan.choice->wanted;
  clear_digits<kThreads, kDigits>(counts);
  for (uint32_t tile = blockIdx.x * kSmallTile; tile < sources; tile += blocks * kSmallTile) {
    const SourceTile<Reader, Key> four(reader, plan, sources, listed, tile, keys);
    for (int i = 0; i < 4; ++i) {
      const uint32_t difference = (four.key[i] ^ digits) >> shift;
      if (i < four.count && difference < kDigits) count_digit<kDigits>(counts, difference);
    }
  }
  add_up_digits<kThreads, kDigits>(counts, all);
  if (!is_last_block(ticket, blocks)) return;
  pick_digit<kThreads, kDigits>(all, wanted, &picked);
  if (threadIdx.x != 0) return;
  plan.choice->digits = digits | picked.digit << shift;
  plan.choice->wanted = wanted - picked.above;
}

template <class Reader, class Key>
static __global__ void __launch_bounds__(kThreads) count_taken(const __grid_constant__ Reader reader, Key keys, Plan plan) {
  const uint32_t sources = plan.choice->sources;
  const uint32_t blocks = blocks_with_work(sources);
  if (blockIdx.x >= blocks) return;
  const bool listed = plan.choice->listed != 0;
  const uint32_t kth = plan.choice->digits;
  for (uint32_t tile = blockIdx.x * kSmallTile; tile < sources; tile += blocks * kSmallTile) {
    const SourceTile<Reader, Key> four(reader, plan, sources, listed, tile, keys);
    uint32_t mine = 0;
    for (int i = 0; i < 4; ++i) mine += four.standing(i, kth);
    uint32_t total;
    block_exclusive_sum<kThreads>(mine, total);
    if (threadIdx.x == 0) {
      plan.tile_above[tile / kSmallTile] = total & 0xffffu;
      plan.tile_equal[tile / kSmallTile] = total >> 16;
    }
  }
  if (!is_last_block(plan.tickets + 4, blocks)) return;
  const uint32_t tiles = (sources + kSmallTile - 1) / kSmallTile;
  scan_in_place<kThreads>(plan.tile_above, tiles);
  scan_in_place<kThreads>(plan.tile_equal, tiles);
}

template <class Reader, class Hand, class Key>
static __global__ void __launch_bounds__(kThreads)
    take_chosen(const __grid_constant__ Reader reader, Hand hand, Key keys, Plan plan) {
  const uint32_t sources = plan.choice->sources;
  const uint32_t blocks = blocks_with_work(sources);
  if (blockIdx.x >= blocks) return;
  const bool listed = plan.choice->listed != 0;
  const uint32_t kth = plan.choice->digits;
  const uint32_t quota = plan.choice->wanted;
  for (uint32_t tile = blockIdx.x * kSmallTile; tile < sources; tile += blocks * kSmallTile) {
    const SourceTile<Reader, Key> four(reader, plan, sources, listed, tile, keys);
    uint32_t mine = 0;
    for (int i = 0; i < 4; ++i) mine += four.standing(i, kth);
    uint32_t total;
    const uint32_t before = block_exclusive_sum<kThreads>(mine, total);
    uint32_t above = plan.tile_above[tile / kSmallTile] + (before & 0xffffu);
    uint32_t equal = plan.tile_equal[tile / kSmallTile] + (before >> 16);
    for (int i = 0; i < 4; ++i) {
      const uint32_t its = four.standing(i, kth);
      if (its == 1 || (its != 0 && equal < quota)) {
        hand.take(above + (equal < quota ? equal : quota), four.index[i], four.entry.x[i]);
      }
      above += its & 0xffffu;
      equal += its >> 16;
    }
  }
}

inline unsigned source_blocks(int64_t n) {
  const unsigned tiles = blocks_for(n, kSmallTile);
  return tiles < kMostBlocks ? tiles : kMostBlocks;
}

// Launch the last four kernels: the next two digits, then the counts and the handover of the chosen entries.
template <class Reader, class Hand, class Key>
static void choose_and_take(const Reader& reader, Hand hand, int64_t n, Key keys, const Plan& plan, Queue queue) {
  const unsigned blocks = source_blocks(n);
  const auto count_next = count_digits<Reader, Key, kNextDigits>;
  const auto count = count_taken<Reader, Key>;
  const auto take = take_chosen<Reader, Hand, Key>;
  for (int pass = 0; pass < 2; ++pass) {
    LAUNCH(count_next, blocks, kThreads, 0, queue, reader, keys, pass == 0 ? kNextBits : 0,
           plan.next_counts + pass * kNextDigits, plan.tickets + 2 + pass, plan);
  }
  LAUNCH(count, blocks, kThreads, 0, queue, reader, keys, plan);
  LAUNCH(take, blocks, kThreads, 0, queue, reader, hand, keys, plan);
}

}  // namespace gradcomp::cuda
