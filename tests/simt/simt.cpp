// Runs a launch: block after block, the threads of each as fibers that take turns until all have ended.

#include "simt.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cuda_runtime.h"
#include "fiber.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Where the linker put all static shared variables (see __shared__).
extern char shared_begin[] __asm__("__start_simt_shared") __attribute__((weak, visibility("hidden")));
extern char shared_end[] __asm__("__stop_simt_shared") __attribute__((weak, visibility("hidden")));

namespace simt {
namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned char kGarbage = 0xCD;

enum class State { ready, at_block_barrier, at_warp_meeting, ended };

struct Thread {
  Fiber fiber;
  uint3 index{};
  State state = State::ended;
  // Where it waits, with what, and what it gets.
  const char* what = nullptr;
  Site site{};
  unsigned mask = 0;
  uint64_t mine = 0;
  unsigned source = 0;
  Exchange exchange{};
};

bool same_place(const Thread& a, const Thread& b) {
  return a.state == b.state && a.what == b.what && a.site.file == b.site.file && a.site.line == b.site.line && a.mask == b.mask;
}

std::vector<std::unique_ptr<Thread>> threads;  // kept from launch to launch: stacks are dear
unsigned count = 0;                            // of the block's threads, and of those that have not ended, or are at a barrier
unsigned alive = 0;
unsigned at_barrier = 0;
unsigned current = 0;
Tally tally{};
uint64_t launches = 0;  // that a device would have taken, since the process began
const Shape* shape = nullptr;
void (*body)(void*) = nullptr;
void* argument = nullptr;
std::exception_ptr thrown;
unsigned char* dynamic = nullptr;
Order order = [] {
  const char* const wish = std::getenv("GRADCOMP_SIMT_ORDER");
  return wish != nullptr && std::strcmp(wish, "plain") == 0 ? Order::plain : Order::shuffled;
}();

std::ostream& operator<<(std::ostream& out, const uint3& at) {
  return out << '(' << at.x << ", " << at.y << ", " << at.z << ')';
}

std::ostream& operator<<(std::ostream& out, const Thread& thread) {
  const char* const slash = std::strrchr(thread.site.file, '/');
  out << "thread " << thread.index << " waits at " << thread.what << " in " << (slash ? slash + 1 : thread.site.file) << ':'
      << thread.site.line;
  if (thread.state == State::at_warp_meeting) out << " with mask " << std::hex << "0x" << thread.mask << std::dec;
  return out;
}

// One line for each place where threads wait for what will not come.
[[noreturn]] void fail_stuck() {
  std::ostringstream text;
  text << shape->name << ": block " << blockIdx << " is stuck: ";
  std::vector<std::pair<const Thread*, unsigned>> places;
  for (unsigned t = 0; t < count; ++t) {
    const Thread& thread = *threads[t];
    if (thread.state == State::ended) continue;
    const auto known =
        std::find_if(places.begin(), places.end(), [&](auto& place) { return same_place(*place.first, thread); });
    if (known == places.end()) {
      places.emplace_back(&thread, 1);
    } else {
      ++known->second;
    }
  }
  for (const auto& [thread, number] : places) text << *thread << " (" << number << " of " << count << " threads); ";
  text << count - alive << " threads have ended";
  throw std::runtime_error(text.str());
}

// All that have not ended are at one barrier: they go on.
void leave_barrier_if_complete() {
  if (at_barrier == 0 || at_barrier < alive) return;
  const Thread* first = nullptr;
  Tally sum{alive, 0};
  for (unsigned t = 0; t < count; ++t) {
    const Thread& thread = *threads[t];
    if (thread.state == State::ended) continue;
    if (first == nullptr) first = &thread;
    if (!same_place(thread, *first)) return;
    sum.yes += thread.mine != 0;
  }
  for (unsigned t = 0; t < count; ++t) {
    if (threads[t]->state != State::ended) threads[t]->state = State::ready;
  }
  at_barrier = 0;
  tally = sum;
}

// All lanes that this thread's mask names are where it is: each gets its answer and goes on.
void leave_meeting_if_complete(const Thread& self) {
  const unsigned base = current - current % kLanes;
  unsigned nonzero = 0;
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((self.mask >> i & 1) == 0) continue;
    if (base + i >= count || !same_place(*threads[base + i], self)) return;
    nonzero |= static_cast<unsigned>(threads[base + i]->mine != 0) << i;
  }
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((self.mask >> i & 1) == 0) continue;
    Thread& thread = *threads[base + i];
    thread.exchange = {threads[base + thread.source]->mine, nonzero};
    thread.state = State::ready;
  }
}

void body_of_thread(void*) {
  try {
    body(argument);
  } catch (...) {
    thrown = std::current_exception();
  }
  threads[current]->state = State::ended;
  --alive;
  leave_barrier_if_complete();
}

bool run_thread(unsigned t) {
  Thread& thread = *threads[t];
  if (thread.state != State::ready) return false;
  current = t;
  threadIdx = thread.index;
  thread.fiber.run(body_of_thread, nullptr);
  if (thrown) std::rethrow_exception(thrown);
  return true;
}

// Until every lane has ended or waits for other warps: lanes meet often, and their stacks are then still in the cache.
bool run_warp(unsigned warp) {
  const unsigned base = warp * kLanes, lanes = std::min(kLanes, count - base);
  bool any = false;
  for (bool advanced = true; advanced; any |= advanced) {
    advanced = false;
    for (unsigned i = 0; i < lanes; ++i) advanced |= run_thread(base + (order == Order::plain ? i : lanes - 1 - i));
  }
  return any;
}

// A byte at a time and unseen by AddressSanitizer, whose red zones lie between the variables.
__attribute__((no_sanitize_address)) void fill_static_shared() {
  for (volatile char* byte = shared_begin; byte < shared_end; ++byte) *byte = static_cast<char>(kGarbage);
}

void run_block() {
  fill_static_shared();
  std::memset(dynamic, kGarbage, shape->shared);
  for (unsigned t = 0; t < count; ++t) threads[t]->state = State::ready;
  alive = count;
  at_barrier = 0;
  const unsigned warps = (count + kLanes - 1) / kLanes;
  while (alive > 0) {
    bool advanced = false;
    for (unsigned w = 0; w < warps; ++w) advanced |= run_warp(order == Order::plain ? w : warps - 1 - w);
    if (!advanced) fail_stuck();
  }
}

void make_threads() {
  count = blockDim.x * blockDim.y * blockDim.z;
  while (threads.size() < count) threads.push_back(std::make_unique<Thread>());
  for (unsigned t = 0; t < count; ++t) {
    threads[t]->index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
  }
}

}  // namespace

Tally meet_block(const char* what, bool vote, Site site) {
  Thread& self = *threads[current];
  self.what = what;
  self.site = site;
  self.mask = 0;
  self.mine = vote;
  self.state = State::at_block_barrier;
  ++at_barrier;
  leave_barrier_if_complete();
  if (self.state != State::ready) Fiber::pause();
  return tally;
}

Exchange meet_warp(const char* what, unsigned mask, uint64_t mine, unsigned source, Site site) {
  Thread& self = *threads[current];
  self.what = what;
  self.site = site;
  self.mask = mask;
  self.mine = mine;
  self.source = source;
  self.state = State::at_warp_meeting;
  if ((mask >> lane() & 1) == 0 || (mask >> source & 1) == 0) {
    std::ostringstream text;
    text << shape->name << ": block " << blockIdx << ": " << self << ", which does not name lane "
         << ((mask >> lane() & 1) == 0 ? lane() : source);
    throw std::runtime_error(text.str());
  }
  leave_meeting_if_complete(self);
  if (self.state != State::ready) Fiber::pause();
  return self.exchange;
}

unsigned lane() { return current % kLanes; }
void* dynamic_shared() { return dynamic; }
void set_order(Order wish) { order = wish; }

void run(const Shape& wish, void (*thread_body)(void*), void* thread_argument) {
  static std::mutex one_device;
  const std::lock_guard<std::mutex> lock(one_device);
  if (!accept(wish)) return;
  ++launches;
  shape = &wish;
  body = thread_body;
  argument = thread_argument;
  thrown = nullptr;
  gridDim = wish.grid;
  blockDim = wish.block;
  make_threads();
  // Of exactly this size, so that AddressSanitizer sees the first byte too many.
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
    threads.clear();  // some are in the middle of their body
    throw;
  }
}

}  // namespace simt

extern "C" __attribute__((visibility("default"))) uint64_t simt_launches() { return simt::launches; }
