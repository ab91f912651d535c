// The places where the threads of a block or warp meet, and the order of memory between blocks.

#include <algorithm>
#include <utility>

#include "threads.h"

namespace simt {

static std::ostream& operator<<(std::ostream& out, const Site& site) {
  const char* const slash = std::strrchr(site.file, '/');
  return out << (slash ? slash + 1 : site.file) << ':' << site.line;
}

static std::ostream& operator<<(std::ostream& out, const Thread& thread) {
  out << "thread " << thread.index << " waits at " << thread.what << " in " << thread.site;
  if (thread.state == State::at_warp_meeting) out << " with mask " << std::hex << "0x" << thread.mask << std::dec;
  return out;
}

namespace {

Tally tally{};  // of the last complete barrier

bool same_place(const Thread& a, const Thread& b) {
  return a.state == b.state && a.what == b.what && a.site.file == b.site.file && a.site.line == b.site.line && a.mask == b.mask;
}

// Let the lanes in this thread's mask go on, each with its answer, if all of them are where it is.
void leave_meeting_if_complete(const Thread& self) {
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
}

}  // namespace

void fail_stuck() {
  std::ostringstream text;
  std::vector<std::pair<const Thread*, unsigned>> places;
  for (unsigned t = 0; t < block.count; ++t) {
    const Thread& thread = *block.threads[t];
    if (thread.state == State::ended) continue;
    const auto known =
        std::find_if(places.begin(), places.end(), [&](auto& place) { return same_place(*place.first, thread); });
    if (known == places.end()) {
      places.emplace_back(&thread, 1);
    } else {
      ++known->second;
    }
  }
  for (const auto& [thread, number] : places) text << *thread << " (" << number << " of " << block.count << " threads); ";
  text << block.count - block.alive << " threads have ended";
  fail(" is stuck: ", text.str());
}

void leave_barrier_if_complete() {
  if (block.at_barrier == 0 || block.at_barrier < block.alive) return;
  const Thread* first = nullptr;
  Tally sum{block.alive, 0};
  for (unsigned t = 0; t < block.count; ++t) {
    const Thread& thread = *block.threads[t];
    if (thread.state == State::ended) continue;
    if (first == nullptr) first = &thread;
    if (!same_place(thread, *first)) return;
    sum.yes += thread.mine != 0;
  }
  for (unsigned t = 0; t < block.count; ++t) {
    Thread& thread = *block.threads[t];
    if (thread.state != State::ended) thread.state = State::ready;
    if (thread.way == Way::fenced) thread.way = Way::published;
    if (block.ticket_taken && thread.way == Way::published) thread.way = Way::told;
  }
  block.at_barrier = 0;
  tally = sum;
}

Tally meet_block(const char* what, bool vote, Site site) {
  Thread& self = block.self();
  self.what = what;
  self.site = site;
  self.mask = 0;
  self.mine = vote;
  self.state = State::at_block_barrier;
  ++block.at_barrier;
  leave_barrier_if_complete();
  if (self.state != State::ready) Fiber::pause();
  return tally;
}

Exchange meet_warp(const char* what, unsigned mask, uint64_t mine, unsigned source, Site site) {
  Thread& self = block.self();
  self.what = what;
  self.site = site;
  self.mask = mask;
  self.mine = mine;
  self.source = source;
  self.state = State::at_warp_meeting;
  if ((mask >> lane() & 1) == 0 || (mask >> source & 1) == 0) {
    fail(": ", self, ", which does not name lane ", (mask >> lane() & 1) == 0 ? lane() : source);
  }
  leave_meeting_if_complete(self);
  if (self.state != State::ready) Fiber::pause();
  return self.exchange;
}

void fence() {
  Way& way = block.self().way;
  if (way == Way::begun) way = Way::fenced;
  if (way == Way::told) way = Way::acquired;
}

unsigned take_ticket(unsigned* ticket, Site site) {
  for (unsigned t = 0; t < block.count; ++t) {
    const Thread& thread = *block.threads[t];
    if (thread.way == Way::published) continue;
    fail(" takes a ticket in ", site, ", but thread ", thread.index,
         thread.way == Way::begun    ? " has no __threadfence() between its results and the ticket"
         : thread.way == Way::fenced ? " has no __syncthreads() between its __threadfence() and the ticket"
                                     : " has taken one before");
  }
  block.ticket_taken = true;
  block.self().way = Way::told;
  return (*ticket)++;
}

void expect_acquired(const char* what, Site site) {
  const Thread& self = block.self();
  if (self.way == Way::acquired) return;
  fail(": thread ", self.index, " reads by ", what, " in ", site, " without a __threadfence() since its block's last ticket");
}

unsigned lane() { return block.current % kLanes; }

}  // namespace simt
