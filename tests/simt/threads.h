// The threads of the block that runs, and their state: what a launch (launch.cpp) and its meetings (meet.cpp) share.
#pragma once

#include <cstring>
#include <memory>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "fiber.h"
#include "simt.h"

namespace simt {

constexpr unsigned kLanes = 32;

enum class State { ready, at_block_barrier, at_warp_meeting, ended };

// A thread's way to the results of other blocks. It fences its own, and meets the threads of its block, one of which takes the
// ticket. It meets them again, and fences before it reads.
enum class Way { begun, fenced, published, told, acquired };

struct Thread {
  Fiber fiber;
  uint3 index{};
  State state = State::ended;
  Way way = Way::begun;
  // The place where it waits, its contribution, and the answer.
  const char* what = nullptr;
  Site site{};
  unsigned mask = 0;
  uint64_t mine = 0;
  unsigned source = 0;
  Exchange exchange{};
};

// The block that runs, one at a time.
struct Block {
  const Shape* shape = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;  // kept from launch to launch, since stacks are expensive
  unsigned count = 0;                            // its threads
  unsigned alive = 0;                            // threads that have not ended
  unsigned at_barrier = 0;                       // threads at a barrier
  unsigned current = 0;                          // the thread that runs
  bool ticket_taken = false;

  Thread& self() const { return *threads[current]; }
};
extern Block block;

// Let the threads go on if all that have not ended are at one barrier.
void leave_barrier_if_complete();

// Fail with each place where threads wait in vain.
[[noreturn]] void fail_stuck();

inline std::ostream& operator<<(std::ostream& out, const uint3& at) {
  return out << '(' << at.x << ", " << at.y << ", " << at.z << ')';
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text << block.shape->name << ": block " << blockIdx;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace simt
