// A launch: a few blocks at a time. Their threads are fibers that take turns until all have ended.

#include <algorithm>
#include <cstdlib>
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
uint3 thread, block, size, grid;
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
Order order = [] {
  const char* const wish = std::getenv("GRADCOMP_SIMT_ORDER");
  return wish != nullptr && std::strcmp(wish, "plain") == 0 ? Order::plain : Order::shuffled;
}();

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
  places::thread = thread.index;
  enter_kernel(thread.fiber.stack());
  thread.fiber.run(body_of_thread, nullptr);
  leave_kernel();
  if (thrown) std::rethrow_exception(thrown);
  return true;
}

// Run a warp until every lane has ended or waits for other warps, or the block steps aside. Lanes meet often, while their
// stacks are in the cache.
bool run_warp(unsigned warp) {
  const unsigned base = warp * kLanes, lanes = std::min(kLanes, block().count - base);
  bool any = false;
  for (bool advanced = true; advanced; any |= advanced) {
    advanced = false;
    for (unsigned i = 0; i < lanes; ++i) {
      advanced |= run_thread(base + (order == Order::plain ? i : lanes - 1 - i));
      if (block().steps_aside) return true;
    }
  }
  return any;
}

// Give every thread of the running block a turn, up to the next barrier at most.
void run_turn() {
  const unsigned warps = (block().count + kLanes - 1) / kLanes;
  block().steps_aside = false;
  bool advanced = false;
  for (unsigned w = 0; w < warps; ++w) {
    advanced |= run_warp(order == Order::plain ? w : warps - 1 - w);
    if (block().steps_aside) return;
  }
  if (!advanced) fail_stuck();
}

void start_block(Block& next, const Shape& shape, unsigned index) {
  next.shape = &shape;
  next.index = {index % shape.grid.x, index / shape.grid.x % shape.grid.y, index / shape.grid.x / shape.grid.y};
  started.push_back(index);
  next.number = static_cast<unsigned>(started.size());
  next.count = shape.block.x * shape.block.y * shape.block.z;
  while (next.threads.size() < next.count) next.threads.push_back(std::make_unique<Thread>());
  for (unsigned t = 0; t < next.count; ++t) {
    Thread& thread = *next.threads[t];
    thread.index = index_of_thread(t);
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
  const size_t most = order == Order::plain ? 1 : kResident;
  for (size_t next = 0; next < blocks.size() || !resident.empty();) {
    while (resident.size() < most && next < blocks.size()) {
      const auto free = std::find_if(slots, slots + most, [](const Block& slot) { return slot.alive == 0; });
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

void set_order(Order wish) { order = wish; }

uint3 block_index(unsigned number) {
  const uint3& grid = places::grid;
  const unsigned index = started[number - 1];
  return {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
}

uint3 index_of_thread(unsigned t) {
  const uint3& size = places::size;
  return {t % size.x, t / size.x % size.y, t / size.x / size.y};
}

void step_aside() {
  settle_writes();
  if (++block().self().looks > 1'000'000) {
    abandon(about_block(": thread ", block().self().index, " looks for a change that never comes"));
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
  places::grid = {wish.grid.x, wish.grid.y, wish.grid.z};
  places::size = {wish.block.x, wish.block.y, wish.block.z};
  started.clear();
  chance.seed(12345);

  std::vector<unsigned> blocks(size_t{wish.grid.x} * wish.grid.y * wish.grid.z);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (order == Order::shuffled) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(12345));
  begin_order(static_cast<unsigned>(blocks.size()));
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
