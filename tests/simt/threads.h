// The blocks that are resident, their threads, and their state: what a launch (launch.cpp), its meetings (meet.cpp) and its
// shadow (shadow.cpp) share.
#pragma once

#include <cstring>
#include <memory>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"
#include "order.h"
#include "simt.h"

namespace simt {

// Blocks that take turns, in shuffled order. AddressSanitizer's red zones lie between shared variables, so that these
// cannot be put aside.
#ifdef __SANITIZE_ADDRESS__
constexpr unsigned kResident = 1;
#else
constexpr unsigned kResident = 3;
#endif

enum class State { ready, at_block_barrier, at_warp_meeting, ended };

struct Thread {
  Fiber fiber;
  State state = State::ended;
  ThreadOrder order;
  unsigned looks = 0;  // volatile reads and atomics
  // The place where it waits, its contribution, and the answer.
  const char* what = nullptr;
  Site site{};
  unsigned mask = 0;
  uint64_t mine = 0;
  unsigned source = 0;
  bool orders_memory = false;
  Exchange exchange{};
};

struct Range {
  uintptr_t begin = UINTPTR_MAX, end = 0;
};

struct Block {
  const Shape* shape = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;  // kept from launch to launch, since stacks are expensive
  unsigned index = 0;
  unsigned slot = 0;        // its place among the resident ones
  unsigned number = 0;      // in the order in which blocks start, from 1
  uint32_t era = 0;         // of its shared memory
  unsigned count = 0;       // its threads
  unsigned alive = 0;       // threads that have not ended
  unsigned at_barrier = 0;  // threads at a barrier
  unsigned current = 0;     // the thread that runs
  bool steps_aside = false;
  bool any = false;  // whether a thread brought true to the last complete barrier
  BlockOrder order;
  std::unique_ptr<unsigned char[]> dynamic;
  Range touched;            // of its static shared variables
  std::vector<char> aside;  // these, while another block runs

  Thread& self() const { return *threads[current]; }
};
// threadIdx and the others, as they are changed between threads.
namespace places {
extern Place thread __asm__("threadIdx"), block __asm__("blockIdx"), size __asm__("blockDim"), grid __asm__("gridDim");
}  // namespace places

// The block that runs.
extern Block* running;
inline Block& block() { return *running; }

// Let the threads go on if all that have not ended are at one barrier.
void leave_barrier_if_complete();

// Fail with each place where threads wait in vain.
[[noreturn]] void fail_stuck();

// Let another block run, by chance. The running thread is at a place where others may see its writes.
void step_aside();

// The place in the code that an address belongs to, as file:line; the same for a small number, which a cell has room for.
uint32_t offset_of(const void* site);
std::string line_of(const void* site);
std::string line_of(uint32_t offset);

// Make this the running block: put the shared variables that the last one has touched aside, and bring its own.
void switch_to(Block& next);
// Fill the running block's shared memory with garbage.
void begin_shared(Block& next);
bool is_shared(const void* at);
void touch_shared(const void* at, size_t size);

std::string name_of(uintptr_t at);
unsigned block_index(unsigned number);

template <class... Parts>
std::string about_block(const Parts&... parts) {
  std::ostringstream text;
  text << block().shape->name << ": block " << block().index;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(about_block(parts...));
}

// Fail from a place that no exception can leave: the thread stops there for ever.
[[noreturn]] void abandon(const std::string& text);

}  // namespace simt
