// The shadow of memory: the writers and readers of every word in this launch. It reports accesses whose order CUDA leaves
// open, and reads that may be stale.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

// A plain access may be served by the first-level cache of the block's processor. One of `second` level is not (__ldcg), and a
// strong one (volatile) may also meet atomics.
enum class Level { plain, second, strong };

// The running thread is about to touch memory. `site` is the place in the code that does.
void note_read(const void* at, size_t size, Level level, const void* site);
void note_write(const void* at, size_t size, const void* site);
void note_atomic(void* at, size_t size, const void* site);

// Forget the last launch; and the last block's shared memory, for a block whose own has this era.
void begin_shadow_of_launch();
uint32_t begin_shadow();
// Look at the values of the last write. The launch does so before another thread runs.
void settle_writes();

}  // namespace simt
