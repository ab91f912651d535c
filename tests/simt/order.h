// The order of a launch's accesses to memory: the earlier accesses that a thread may rely on.
//
// Every thread has a clock, which goes on at its meetings and fences. A barrier orders all that the threads of a block did
// before it; __syncwarp does so for the lanes in its mask. Shuffles and votes order nothing, as CUDA says. Between blocks it
// takes five steps: a thread writes; it fences, or one does that has met it since; the fencing thread, or one that has met it,
// changes a word by an atomic; a thread of the other block sees that by an atomic; it fences, or one does that has met it, and
// reads.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace simt {

constexpr unsigned kLanes = 32;

struct Block;
struct Thread;

// When a thread did something. Blocks are numbered from 1 as they start; 0 stands for no block.
struct Moment {
  uint64_t block : 24 = 0, thread : 10 = 0, clock : 29 = 0, atomic : 1 = 0;
};

// The accesses that a block had published when one of its threads changed a word by an atomic: all before a clock of each
// thread.
struct Published {
  std::vector<uint32_t> before;
  uint32_t least;  // of them
  uint64_t number;
};
// The last word that a thread has from each other block, by the block's number.
using Known = std::vector<const Published*>;

struct ThreadOrder {
  uint32_t clock = 1;
  // Of each lane of the warp: its clock when it last met this thread; and the same at this thread's last fence.
  std::array<uint32_t, kLanes> met{}, fenced{};
  uint32_t fenced_block = 0;  // the block's last barrier at this thread's last fence
  const Known* heard = nullptr;
  const Known* acquired = nullptr;       // heard before the last fence
  const Published* published = nullptr;  // by the last atomic, if nothing has been fenced since
};

struct BlockOrder {
  uint32_t barrier = 1;          // all clocks begin here after the last barrier
  std::vector<uint32_t> fenced;  // of each thread: fenced before this clock, as all know since the last barrier
  bool any_fence = false, new_fence = false, any_heard = false;  // new: since the last barrier
};

// A launch, a block, its meetings. The lanes are those of the running thread's warp.
void begin_order(unsigned blocks);
void begin_order(Block& block);
void order_barrier(Block& block);
void order_lanes(Block& block, unsigned mask);

// The running thread fences, or changes the word by an atomic.
void order_fence();
void order_atomic(const void* word);

// True if the running thread may rely on it that all before this moment has happened. `lanes` has the bits of the threads that
// the moment stands for, in its thread's warp; 0 stands for all threads of the block.
bool precedes(const Moment& moment);
bool precedes(uint32_t block, unsigned warp, uint32_t lanes, uint32_t clock);

}  // namespace simt
