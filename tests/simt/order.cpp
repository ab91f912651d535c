// The order of a launch's accesses to memory, by clocks.

#include "order.h"

#include <algorithm>
#include <deque>
#include <unordered_map>

#include "threads.h"

namespace simt {

namespace {

unsigned blocks_of_launch = 0;
// All that was published or heard in this launch. Nothing in it changes once it has been handed out.
std::deque<Published> published;
std::deque<Known> heard;
std::unordered_map<const void*, Known> words;  // that atomics have published by

const Published* later(const Published* a, const Published* b) {
  return a == nullptr || (b != nullptr && b->number > a->number) ? b : a;
}

const Known* join(const Known* a, const Known* b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  Known both(*a);
  for (size_t i = 0; i < both.size(); ++i) both[i] = later(both[i], (*b)[i]);
  if (both == *a) return a;
  if (both == *b) return b;
  return &heard.emplace_back(std::move(both));
}

void raise(uint32_t& clock, uint32_t to) { clock = std::max(clock, to); }

// Add the accesses of its warp and block that a thread's fence has published to the block's clocks.
void add_lanes(std::vector<uint32_t>& fenced, const ThreadOrder& of, unsigned thread) {
  const unsigned base = thread - thread % kLanes;
  for (unsigned i = 0; i < kLanes && base + i < fenced.size(); ++i) raise(fenced[base + i], of.fenced[i]);
}
void add_block(std::vector<uint32_t>& fenced, uint32_t barrier) {
  for (uint32_t& clock : fenced) raise(clock, barrier);
}

const Published* publish(Block& block) {
  ThreadOrder& self = block.self().order;
  if (self.published == nullptr) {
    std::vector<uint32_t> before = block.order.fenced;
    add_lanes(before, self, block.current);
    add_block(before, self.fenced_block);
    const uint32_t least = *std::min_element(before.begin(), before.end());
    self.published = &published.emplace_back(Published{std::move(before), least, published.size() + 1});
  }
  return self.published;
}

}  // namespace

void begin_order(unsigned blocks) {
  blocks_of_launch = blocks;
  words.clear();
  heard.clear();
  published.clear();
}

void begin_order(Block& block) {
  block.order.barrier = 1;
  block.order.fenced.assign(block.count, 0);
  block.order.any_fence = block.order.new_fence = block.order.any_heard = false;
  for (unsigned t = 0; t < block.count; ++t) block.threads[t]->order = {};
}

void order_barrier(Block& block) {
  uint32_t latest = 0;
  for (unsigned t = 0; t < block.count; ++t) latest = std::max(latest, block.threads[t]->order.clock);
  block.order.barrier = latest + 1;
  uint32_t fenced_block = 0;
  const Known *all_heard = nullptr, *all_acquired = nullptr;
  for (unsigned t = 0; t < block.count; ++t) {
    ThreadOrder& order = block.threads[t]->order;
    order.clock = block.order.barrier;
    order.published = nullptr;
    raise(fenced_block, order.fenced_block);
    if (block.order.new_fence) add_lanes(block.order.fenced, order, t);
    if (block.order.any_heard) {
      all_heard = join(all_heard, order.heard);
      all_acquired = join(all_acquired, order.acquired);
    }
  }
  if (block.order.new_fence) add_block(block.order.fenced, fenced_block);
  block.order.new_fence = false;
  if (!block.order.any_heard) return;
  for (unsigned t = 0; t < block.count; ++t) {
    block.threads[t]->order.heard = all_heard;
    block.threads[t]->order.acquired = all_acquired;
  }
}

void order_lanes(Block& block, unsigned mask) {
  const unsigned base = block.current - block.current % kLanes;
  std::array<uint32_t, kLanes> met{}, fenced{};
  uint32_t fenced_block = 0;
  const Known *all_heard = nullptr, *all_acquired = nullptr;
  const auto for_lanes = [&](auto use) {
    for (unsigned i = 0; i < kLanes; ++i) {
      if (mask >> i & 1) use(i, block.threads[base + i]->order);
    }
  };
  for_lanes([&](unsigned lane, ThreadOrder& order) {
    raise(met[lane], ++order.clock);
    raise(fenced_block, order.fenced_block);
    for (unsigned i = 0; i < kLanes; ++i) {
      raise(met[i], order.met[i]);
      raise(fenced[i], order.fenced[i]);
    }
    all_heard = join(all_heard, order.heard);
    all_acquired = join(all_acquired, order.acquired);
  });
  for_lanes([&](unsigned, ThreadOrder& order) {
    order.met = met;
    order.fenced = fenced;
    order.fenced_block = fenced_block;
    order.heard = all_heard;
    order.acquired = all_acquired;
    order.published = nullptr;
  });
}

void order_fence() {
  Block& block = simt::block();
  ThreadOrder& self = block.self().order;
  self.met[lane()] = ++self.clock;
  self.fenced = self.met;
  self.fenced_block = block.order.barrier;
  self.acquired = self.heard;
  self.published = nullptr;
  block.order.any_fence = block.order.new_fence = true;
}

void order_atomic(const void* word) {
  Block& block = simt::block();
  ThreadOrder& self = block.self().order;
  const auto found = words.find(word);
  if (found != words.end()) {
    self.heard = join(self.heard, &heard.emplace_back(found->second));
    block.order.any_heard = true;
  }
  if (!block.order.any_fence) return;
  Known& known = words.try_emplace(word, blocks_of_launch + 1).first->second;
  if (self.acquired != nullptr) {
    for (size_t i = 0; i < known.size(); ++i) known[i] = later(known[i], (*self.acquired)[i]);
  }
  known[block.number] = publish(block);
}

bool precedes(const Moment& moment) {
  return precedes(moment.block, moment.thread / kLanes, 1u << moment.thread % kLanes, moment.clock);
}

bool precedes(uint32_t number, unsigned warp, uint32_t lanes, uint32_t clock) {
  const Block& block = simt::block();
  const ThreadOrder& self = block.self().order;
  if (number == block.number) {
    if (clock < block.order.barrier) return true;
    if (lanes == 0 || warp != block.current / kLanes) return false;
    for (unsigned i = 0; i < kLanes; ++i) {
      if ((lanes >> i & 1) && i != lane() && clock >= self.met[i]) return false;
    }
    return true;
  }
  const Published* const word = self.acquired == nullptr ? nullptr : (*self.acquired)[number];
  if (word == nullptr) return false;
  if (lanes == 0 || clock < word->least) return clock < word->least;
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((lanes >> i & 1) && clock >= word->before[warp * kLanes + i]) return false;
  }
  return true;
}

}  // namespace simt
