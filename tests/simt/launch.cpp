// A launch: a few blocks at a time. Their threads are fibers that take turns until all have ended.

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>
#include <random>

#include "cuda_runtime.h"
#include "hooks.h"
#include "shadow.h"
#include "threads.h"

namespace simt {

namespace places {
Place thread, block, size, grid;
}  // namespace places

Block* running = nullptr;

namespace {

// One in so many places at which a block may step aside makes it do so.
constexpr unsigned kSeldom = 8;

uint64_t launches = 0;  // launches that a device would have taken, since the process began
void (*body)(void*) = nullptr;
void* argument = nullptr;
std::exception_ptr thrown;
Block slots[kResident];
std::vector<Block*> resident;
std::vector<unsigned> started;  // the blocks of this launch that have started, in their order
std::minstd_rand chance;

void body_of_thread(void*) {
  try {
    body(argument);
    settle_writes();
  } catch (...) {
    thrown = std::current_exception();
  }
  block().self().state = State::ended;
  --block().alive;
  leave_barrier_if_complete();
}

bool run_thread(unsigned t) {
  Thread& thread = *block().threads[t];
  if (thread.state != State::ready) return false;
  block().current = t;
  places::thread = {t};
  enter_kernel(thread.fiber.stack());
  thread.fiber.run(body_of_thread, nullptr);
  leave_kernel();
  if (thrown) std::rethrow_exception(thrown);
  return true;
}

// Run a warp, its lanes from last to first, until every lane has ended or waits for other warps, or the block steps aside.
// Lanes meet often, while their stacks are in the cache.
bool run_warp(unsigned warp) {
  const unsigned base = warp * kLanes, lanes = std::min(kLanes, block().count - base);
  bool any = false;
  for (bool advanced = true; advanced; any |= advanced) {
    advanced = false;
    for (unsigned i = lanes; i-- > 0;) {
      advanced |= run_thread(base + i);
      if (block().steps_aside) return true;
    }
  }
  return any;
}

// Give every thread of the running block a turn, up to the next barrier at most.
void run_turn() {
  block().steps_aside = false;
  bool advanced = false;
  for (unsigned w = (block().count + kLanes - 1) / kLanes; w-- > 0;) {
    advanced |= run_warp(w);
    if (block().steps_aside) return;
  }
  if (!advanced) fail_stuck();
}

void start_block(Block& next, const Shape& shape, unsigned index) {
  next.shape = &shape;
  next.index = index;
  started.push_back(index);
  next.number = static_cast<unsigned>(started.size());
  next.count = shape.threads;
  while (next.threads.size() < next.count) next.threads.push_back(std::make_unique<Thread>());
  for (unsigned t = 0; t < next.count; ++t) {
    Thread& thread = *next.threads[t];
    thread.state = State::ready;
    thread.looks = 0;
  }
  begin_order(next);
  next.alive = next.count;
  next.at_barrier = 0;
  switch_to(next);
  begin_shared(next);
  next.era = begin_shadow();
  resident.push_back(&next);
}

void run_blocks(const Shape& shape, const std::vector<unsigned>& blocks) {
  for (size_t next = 0; next < blocks.size() || !resident.empty();) {
    while (resident.size() < kResident && next < blocks.size()) {
      const auto free = std::find_if(slots, slots + kResident, [](const Block& slot) { return slot.alive == 0; });
      free->slot = static_cast<unsigned>(free - slots);
      start_block(*free, shape, blocks[next++]);
    }
    const size_t turn = chance() % resident.size();
    switch_to(*resident[turn]);
    run_turn();
    if (block().alive > 0) continue;
    resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(turn));
  }
}

}  // namespace

unsigned most_together() { return kResident; }

unsigned block_index(unsigned number) { return started[number - 1]; }

void step_aside() {
  settle_writes();
  if (++block().self().looks > 1'000'000) {
    abandon(about_block(": thread ", block().current, " looks for a change that never comes"));
  }
  if (resident.size() < 2 || chance() % kSeldom != 0) return;
  block().steps_aside = true;
  Fiber::pause();
}

void abandon(const std::string& text) {
  thrown = std::make_exception_ptr(std::runtime_error(text));
  for (;;) Fiber::pause();
}

void run(const Shape& wish, void (*thread_body)(void*), void* thread_argument) {
  static std::mutex one_device;
  const std::lock_guard<std::mutex> lock(one_device);
  if (!accept(wish)) return;
  ++launches;
  body = thread_body;
  argument = thread_argument;
  thrown = nullptr;
  places::grid = {wish.blocks};
  places::size = {wish.threads};
  started.clear();
  chance.seed(12345);

  std::vector<unsigned> blocks(wish.blocks);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(12345));
  begin_order(wish.blocks);
  begin_shadow_of_launch();
  ignore_arguments(thread_argument, wish.arguments);
  try {
    run_blocks(wish, blocks);
  } catch (...) {
    for (Block& slot : slots) slot = Block();  // some threads are in the middle of their body
    resident.clear();
    running = nullptr;
    leave_kernel();
    throw;
  }
  running = nullptr;
}

}  // namespace simt

extern "C" __attribute__((visibility("default"))) uint64_t simt_launches() { return simt::launches; }
