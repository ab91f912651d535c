// The shadow of memory: the rules that accesses must keep.

#include "shadow.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cells.h"
#include "order.h"
#include "threads.h"

namespace simt {

namespace {

// ---- Reports

void tell_thread(std::ostream& out, uint32_t block, unsigned thread) {
  out << "thread " << thread;
  if (block == simt::block().number) {
    out << " of this block";
  } else {
    out << " of block " << block_index(block);
  }
}

[[noreturn]] void report(const char* does, uintptr_t at, const void* site, const std::string& conflict, const char* remedy) {
  std::ostringstream text;
  text << about_block(": thread ") << simt::block().current << ' ' << does << ' ' << name_of(at) << " in " << line_of(site)
       << ", which " << conflict << ": " << remedy;
  abandon(text.str());
}

const char* remedy_for(uint32_t block) {
  return block == simt::block().number ? "no barrier lies between"
                                       : "no fence, ticket and fence lie between that all threads concerned have met at";
}

[[noreturn]] void report_write(const char* does, uintptr_t at, const void* site, const Moment& write, uint32_t write_site) {
  std::ostringstream text;
  tell_thread(text, write.block, write.thread);
  text << (write.atomic ? " changes by an atomic in " : " writes in ") << line_of(write_site);
  report(does, at, site, text.str(), remedy_for(write.block));
}

[[noreturn]] void report_stale(uintptr_t at, const void* site, const Moment& write, uint32_t write_site) {
  std::ostringstream text;
  tell_thread(text, write.block, write.thread);
  text << " wrote in " << line_of(write_site) << " in this launch";
  report("reads", at, site, text.str(), "without __ldcg, the first-level cache may answer with what was there before");
}

[[noreturn]] void report_readers(const char* does, uintptr_t at, const void* site, const Readers& readers) {
  std::ostringstream text;
  if (readers.lanes == 0) {
    text << "threads of " << (readers.block == simt::block().number ? "this block read" : "another block read");
  } else {
    tell_thread(text, readers.block, readers.warp * kLanes + static_cast<unsigned>(__builtin_ctz(readers.lanes)));
    text << " reads";
  }
  text << " in " << line_of(readers.site);
  report(does, at, site, text.str(), remedy_for(readers.block));
}

// ---- Rules

bool is_mine(const Moment& moment) {
  const Block& block = simt::block();
  return moment.block == block.number && moment.thread == block.current;
}

bool precedes(const Readers& readers) { return simt::precedes(readers.block, readers.warp, readers.lanes, readers.clock); }

// A thread's own reads precede its writes, but those of other lanes that are noted with it may not.
bool harmless(const Readers& readers) { return readers.block == 0 || precedes(readers); }

void check_readers(const Cell& cell, const char* does, uintptr_t at, const void* site) {
  if (!harmless(cell.readers)) report_readers(does, at, site, cell.readers);
  if (cell.others == 0) return;
  for (const Readers& readers : crowds[cell.others - 1]) {
    if (!harmless(readers)) report_readers(does, at, site, readers);
  }
}

void add_reader(Cell& cell, const void* site) {
  const Block& block = simt::block();
  Readers& last = cell.readers;
  const auto warp = static_cast<uint16_t>(block.current / kLanes);
  const uint32_t bit = 1u << block.current % kLanes, clock = block.self().order.clock;
  if (last.block != 0 && last.block != block.number) {
    if (cell.others == 0) {
      crowds.emplace_back();
      cell.others = static_cast<uint32_t>(crowds.size());
    }
    auto& crowd = crowds[cell.others - 1];
    // Only resident blocks read again; theirs lie near the end.
    const size_t near = std::min<size_t>(crowd.size(), 2 * kResident);
    bool found = false;
    for (size_t i = crowd.size() - near; i < crowd.size() && !found; ++i) {
      found = crowd[i].block == block.number;
      if (found) std::swap(crowd[i], last);
    }
    if (!found) {
      crowd.push_back(last);
      last = {};
    }
  }
  const uint32_t offset = offset_of(site);
  if (last.block == 0 || last.clock < block.order.barrier) {
    last = {block.number, bit, warp, clock, offset};
  } else {
    last.lanes = last.warp == warp ? last.lanes | bit : 0;
    last.warp = last.warp == warp ? warp : kManyWarps;
    last.clock = std::max(last.clock, clock);
    last.site = offset;
  }
}

Moment now(bool atomic) {
  const Block& block = simt::block();
  Moment moment;
  moment.block = block.number;
  moment.thread = block.current;
  moment.clock = block.self().order.clock;
  moment.atomic = atomic;
  return moment;
}

void set_writer(Cell& cell, bool atomic, const void* site) {
  cell.many_writers |= cell.write.block != 0 && cell.write.block != simt::block().number;
  cell.write = now(atomic);
  cell.site = offset_of(site);
}

// Writes of a value that another thread has written, in no order: they are right if the value is the same.
struct Twice {
  uintptr_t at = 0;
  unsigned char before[16];
  size_t size = 0;
  const void* site;
  Moment first;
  uint32_t first_site;
} twice;

}  // namespace

void note_read(const void* at, size_t size, Level level, const void* site) {
  settle_writes();
  for_cells(at, size, [&](Cell& cell, uintptr_t address) {
    const Moment& write = cell.write;
    if (write.block != 0 && !is_mine(write) && !(level == Level::strong && write.atomic) && !simt::precedes(write)) {
      report_write("reads", address, site, write, cell.site);
    }
    if (level == Level::plain && (cell.many_writers || (write.block != 0 && write.block != simt::block().number))) {
      report_stale(address, site, write, cell.site);
    }
    if (level != Level::strong) add_reader(cell, site);
  });
}

void note_write(const void* at, size_t size, const void* site) {
  settle_writes();
  for_cells(at, size, [&](Cell& cell, uintptr_t address) {
    check_readers(cell, "writes", address, site);
    const Moment& write = cell.write;
    if (write.block != 0 && !is_mine(write) && !simt::precedes(write)) {
      if (write.atomic || size > sizeof twice.before) report_write("writes", address, site, write, cell.site);
      if (twice.size == 0) {
        twice = {reinterpret_cast<uintptr_t>(at), {}, size, site, write, cell.site};
        std::memcpy(twice.before, at, size);
      }
    }
    set_writer(cell, false, site);
  });
}

void settle_writes() {
  if (twice.size == 0) return;
  const size_t size = twice.size;
  twice.size = 0;
  if (std::memcmp(reinterpret_cast<const void*>(twice.at), twice.before, size) == 0) return;
  report_write("writes", twice.at, twice.site, twice.first, twice.first_site);
}

void note_atomic(void* at, size_t size, const void* site) {
  settle_writes();
  for_cells(at, size, [&](Cell& cell, uintptr_t address) {
    check_readers(cell, "changes by an atomic", address, site);
    const Moment& write = cell.write;
    if (write.block != 0 && !write.atomic && !is_mine(write) && !simt::precedes(write)) {
      report_write("changes by an atomic", address, site, write, cell.site);
    }
    set_writer(cell, true, site);
  });
}

uint32_t begin_shadow() { return next_era(); }

void begin_shadow_of_launch() {
  begin_cells();
  twice.size = 0;
}

}  // namespace simt
