// A launch: block after block, whose threads are fibers that take turns until all have ended.

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <numeric>
#include <random>

#include "cuda_runtime.h"
#include "threads.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// The begin and the end of all static shared variables (__shared__ in cuda_runtime.h), which the linker knows.
extern char shared_begin[] __asm__("__start_simt_shared") __attribute__((weak, visibility("hidden")));
extern char shared_end[] __asm__("__stop_simt_shared") __attribute__((weak, visibility("hidden")));

namespace simt {

Block block;

namespace {

constexpr unsigned char kGarbage = 0xCD;

uint64_t launches = 0;  // launches that a device would have taken, since the process began
void (*body)(void*) = nullptr;
void* argument = nullptr;
std::exception_ptr thrown;
unsigned char* dynamic = nullptr;
Order order = [] {
  const char* const wish = std::getenv("GRADCOMP_SIMT_ORDER");
  return wish != nullptr && std::strcmp(wish, "plain") == 0 ? Order::plain : Order::shuffled;
}();

void body_of_thread(void*) {
  try {
    body(argument);
  } catch (...) {
    thrown = std::current_exception();
  }
  block.self().state = State::ended;
  --block.alive;
  leave_barrier_if_complete();
}

bool run_thread(unsigned t) {
  Thread& thread = *block.threads[t];
  if (thread.state != State::ready) return false;
  block.current = t;
  threadIdx = thread.index;
  thread.fiber.run(body_of_thread, nullptr);
  if (thrown) std::rethrow_exception(thrown);
  return true;
}

// Run a warp until every lane has ended or waits for other warps. Lanes meet often, while their stacks are in the cache.
bool run_warp(unsigned warp) {
  const unsigned base = warp * kLanes, lanes = std::min(kLanes, block.count - base);
  bool any = false;
  for (bool advanced = true; advanced; any |= advanced) {
    advanced = false;
    for (unsigned i = 0; i < lanes; ++i) advanced |= run_thread(base + (order == Order::plain ? i : lanes - 1 - i));
  }
  return any;
}

// Fill a byte at a time, unseen by AddressSanitizer, whose red zones lie between the variables.
__attribute__((no_sanitize_address)) void fill_static_shared() {
  for (volatile char* byte = shared_begin; byte < shared_end; ++byte) *byte = static_cast<char>(kGarbage);
}

void run_block() {
  fill_static_shared();
  std::memset(dynamic, kGarbage, block.shape->shared);
  for (unsigned t = 0; t < block.count; ++t) {
    block.threads[t]->state = State::ready;
    block.threads[t]->way = Way::begun;
  }
  block.alive = block.count;
  block.at_barrier = 0;
  block.ticket_taken = false;
  const unsigned warps = (block.count + kLanes - 1) / kLanes;
  while (block.alive > 0) {
    bool advanced = false;
    for (unsigned w = 0; w < warps; ++w) advanced |= run_warp(order == Order::plain ? w : warps - 1 - w);
    if (!advanced) fail_stuck();
  }
}

void make_threads() {
  block.count = blockDim.x * blockDim.y * blockDim.z;
  while (block.threads.size() < block.count) block.threads.push_back(std::make_unique<Thread>());
  for (unsigned t = 0; t < block.count; ++t) {
    block.threads[t]->index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
  }
}

}  // namespace

void* dynamic_shared() { return dynamic; }
void set_order(Order wish) { order = wish; }

void run(const Shape& wish, void (*thread_body)(void*), void* thread_argument) {
  static std::mutex one_device;
  const std::lock_guard<std::mutex> lock(one_device);
  if (!accept(wish)) return;
  ++launches;
  block.shape = &wish;
  body = thread_body;
  argument = thread_argument;
  thrown = nullptr;
  gridDim = wish.grid;
  blockDim = wish.block;
  make_threads();
  // The size is exact, so that AddressSanitizer sees the first byte beyond it.
  const std::unique_ptr<unsigned char[]> memory(new unsigned char[wish.shared]);
  dynamic = memory.get();

  std::vector<unsigned> blocks(size_t{gridDim.x} * gridDim.y * gridDim.z);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (order == Order::shuffled) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(12345));
  try {
    for (const unsigned b : blocks) {
      blockIdx = {b % gridDim.x, b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y};
      run_block();
    }
  } catch (...) {
    block.threads.clear();  // some are in the middle of their body
    throw;
  }
}

}  // namespace simt

extern "C" __attribute__((visibility("default"))) uint64_t simt_launches() { return simt::launches; }
