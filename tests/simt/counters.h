// Counts of what a warp's requests cost: sectors of memory, conflicts of banks, and atomics that meet in one address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

struct Block;

extern bool counting;

// Note an access of the running thread; and count those of a block that has ended.
void note_request(const void* at, size_t size, bool atomic, const void* site);
void count_requests(const Block& block);

}  // namespace simt
