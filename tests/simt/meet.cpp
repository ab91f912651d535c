// The places where the threads of a block or warp meet.

#include <algorithm>
#include <utility>

#include "shadow.h"
#include "threads.h"

namespace simt {

static std::ostream& operator<<(std::ostream& out, const Site& site) {
  const char* const slash = std::strrchr(site.file, '/');
  return out << (slash ? slash + 1 : site.file) << ':' << site.line;
}

static std::string wait_of(unsigned index) {
  const Thread& thread = *block().threads[index];
  std::ostringstream out;
  out << "thread " << index << " waits at " << thread.what << " in " << thread.site;
  if (thread.state == State::at_warp_meeting) out << " with mask " << std::hex << "0x" << thread.mask;
  return out.str();
}

namespace {

bool same_place(const Thread& a, const Thread& b) {
  return a.state == b.state && a.what == b.what && a.site.file == b.site.file && a.site.line == b.site.line && a.mask == b.mask;
}

// Let the lanes in this thread's mask go on, each with its answer, if all of them are where it is.
void leave_meeting_if_complete(const Thread& self) {
  Block& block = simt::block();
  const unsigned base = block.current - block.current % kLanes;
  unsigned nonzero = 0;
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((self.mask >> i & 1) == 0) continue;
    if (base + i >= block.count || !same_place(*block.threads[base + i], self)) return;
    nonzero |= static_cast<unsigned>(block.threads[base + i]->mine != 0) << i;
  }
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((self.mask >> i & 1) == 0) continue;
    Thread& thread = *block.threads[base + i];
    thread.exchange = {block.threads[base + thread.source]->mine, nonzero};
    thread.state = State::ready;
  }
  if (self.orders_memory) order_lanes(block, self.mask);
}

}  // namespace

void fail_stuck() {
  const Block& block = simt::block();
  std::ostringstream text;
  std::vector<std::pair<unsigned, unsigned>> places;  // the first thread there, and how many
  for (unsigned t = 0; t < block.count; ++t) {
    const Thread& thread = *block.threads[t];
    if (thread.state == State::ended) continue;
    const auto known = std::find_if(places.begin(), places.end(),
                                    [&](auto& place) { return same_place(*block.threads[place.first], thread); });
    if (known == places.end()) {
      places.emplace_back(t, 1);
    } else {
      ++known->second;
    }
  }
  for (const auto& [thread, number] : places)
    text << wait_of(thread) << " (" << number << " of " << block.count << " threads); ";
  text << block.count - block.alive << " threads have ended";
  fail(" is stuck: ", text.str());
}

void leave_barrier_if_complete() {
  Block& block = simt::block();
  if (block.at_barrier == 0 || block.at_barrier < block.alive) return;
  const Thread* first = nullptr;
  bool any = false;
  for (unsigned t = 0; t < block.count; ++t) {
    const Thread& thread = *block.threads[t];
    if (thread.state == State::ended) continue;
    if (first == nullptr) first = &thread;
    if (!same_place(thread, *first)) return;
    any |= thread.mine != 0;
  }
  for (unsigned t = 0; t < block.count; ++t) {
    Thread& thread = *block.threads[t];
    if (thread.state != State::ended) thread.state = State::ready;
  }
  block.at_barrier = 0;
  block.any = any;
  order_barrier(block);
}

bool meet_block(const char* what, bool vote, Site site) {
  settle_writes();
  Block& block = simt::block();
  Thread& self = block.self();
  self.what = what;
  self.site = site;
  self.mask = 0;
  self.mine = vote;
  self.state = State::at_block_barrier;
  ++block.at_barrier;
  leave_barrier_if_complete();
  if (self.state != State::ready) Fiber::pause();
  return block.any;
}

Exchange meet_warp(const char* what, unsigned mask, uint64_t mine, unsigned source, bool orders_memory, Site site) {
  settle_writes();
  Block& block = simt::block();
  Thread& self = block.self();
  self.orders_memory = orders_memory;
  self.what = what;
  self.site = site;
  self.mask = mask;
  self.mine = mine;
  self.source = source;
  self.state = State::at_warp_meeting;
  if ((mask >> lane() & 1) == 0 || (mask >> source & 1) == 0) {
    fail(": ", wait_of(block.current), ", which does not name lane ", (mask >> lane() & 1) == 0 ? lane() : source);
  }
  leave_meeting_if_complete(self);
  if (self.state != State::ready) Fiber::pause();
  return self.exchange;
}

void fence() {
  step_aside();
  order_fence();
}

unsigned lane() { return block().current % kLanes; }

}  // namespace simt
