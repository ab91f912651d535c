// The cells of the shadow: the accesses to each word of memory, or to each byte where smaller accesses have come.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "order.h"
#include "threads.h"

namespace simt {

constexpr uintptr_t kPage = 4096;
constexpr uint16_t kManyWarps = 0xffff;

// The readers of a word in one block, since the last barrier that ordered them.
struct Readers {
  uint32_t block = 0;  // 0: none
  uint32_t lanes = 0;  // 0: those of many warps
  uint16_t warp = 0;
  uint32_t clock = 0;  // of the last one
  uint32_t site = 0;
};

struct Cell {
  uint32_t era = 0;  // a launch, or a block for shared memory; all else is void in another one
  uint32_t site = 0;
  Moment write;
  Readers readers;
  uint32_t others = 0;        // readers in other blocks: a place in `crowds`, counted from 1
  bool many_writers = false;  // blocks
};

// The readers of the words that many blocks have read in this launch.
extern std::vector<std::vector<Readers>> crowds;

// Cells for the words of a page, and for its bytes once a smaller access has come.
struct Page {
  Cell words[kPage / 4];
  std::unique_ptr<Cell[]> bytes;

  void split();
};

// Find the cells of a page of memory.
Page& page_of(uintptr_t key);
// An era that has not been before, for a block's shared memory; that of this launch's global memory; and a new launch.
uint32_t next_era();
uint32_t era_of_global_memory();
void begin_cells();

// Call use(cell, its address, its era) for each cell of an access.
template <class Use>
void for_cells(const void* at, size_t size, Use use) {
  const Block& block = simt::block();
  auto begin = reinterpret_cast<uintptr_t>(at);
  const bool shared = is_shared(at);
  if (shared) touch_shared(at, size);
  const uint32_t its_era = shared ? block.era : era_of_global_memory();
  // Each resident block has a copy of the static shared variables at the same addresses.
  const uintptr_t copy = shared ? uintptr_t{block.slot} << 52 : 0;
  for (const uintptr_t end = begin + size; begin < end;) {
    Page& page = page_of(begin / kPage + copy);
    const uintptr_t stop = std::min(end, (begin / kPage + 1) * kPage);
    if (page.bytes == nullptr && (begin % 4 != 0 || stop % 4 != 0)) page.split();
    const unsigned step = page.bytes == nullptr ? 4 : 1;
    for (; begin < stop; begin += step) {
      Cell& cell = step == 4 ? page.words[begin % kPage / 4] : page.bytes[begin % kPage];
      if (cell.era != its_era) {
        cell = Cell{};
        cell.era = its_era;
      }
      use(cell, begin);
    }
  }
}

}  // namespace simt
