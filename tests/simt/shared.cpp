// Shared memory: garbage when a block starts, and put aside while another block runs.

#include <algorithm>

#include "threads.h"

// The begin and the end of all static shared variables, which the linker knows (shared.ld).
extern char shared_begin[] __asm__("simt_shared_begin") __attribute__((visibility("hidden")));
extern char shared_end[] __asm__("simt_shared_end") __attribute__((visibility("hidden")));

namespace simt {

namespace {

constexpr unsigned char kGarbage = 0xCD;

// Fill shared variables with garbage.
#ifdef __SANITIZE_ADDRESS__
// A byte at a time, unseen by AddressSanitizer, whose red zones lie between the variables.
__attribute__((no_sanitize_address)) void spoil(Range) {
  for (volatile char* byte = shared_begin; byte < shared_end; ++byte) *byte = static_cast<char>(kGarbage);
}
#else
void spoil(Range range) {
  if (range.begin < range.end) std::memset(reinterpret_cast<void*>(range.begin), kGarbage, range.end - range.begin);
}
#endif

bool is_static_shared(uintptr_t at) {
  return at - reinterpret_cast<uintptr_t>(shared_begin) < static_cast<size_t>(shared_end - shared_begin);
}

}  // namespace

// All that no block has touched is garbage.
void switch_to(Block& next) {
  if (running != &next) {
    if (running != nullptr) {
      const Range range = running->touched;
      if (running->alive > 0 && range.begin < range.end) {
        running->aside.assign(reinterpret_cast<char*>(range.begin), reinterpret_cast<char*>(range.end));
      }
      spoil(range);
    }
    if (!next.aside.empty()) std::memcpy(reinterpret_cast<void*>(next.touched.begin), next.aside.data(), next.aside.size());
    next.aside.clear();
  }
  running = &next;
  places::block = {next.index};
}

void begin_shared(Block& next) {
  // The first block of a launch finds the words of the last launch, another one those of the last block in its slot.
  spoil(next.number == 1 ? Range{reinterpret_cast<uintptr_t>(shared_begin), reinterpret_cast<uintptr_t>(shared_end)}
                         : next.touched);
  next.touched = {};
  // The size is exact, so that AddressSanitizer sees the first byte beyond it.
  next.dynamic.reset(new unsigned char[next.shape->shared]);
  std::memset(next.dynamic.get(), kGarbage, next.shape->shared);
}

void* dynamic_shared() { return block().dynamic.get(); }

bool is_shared(const void* at) {
  const auto byte = reinterpret_cast<uintptr_t>(at);
  return is_static_shared(byte) || byte - reinterpret_cast<uintptr_t>(block().dynamic.get()) < block().shape->shared;
}

void touch_shared(const void* at, size_t size) {
  const auto byte = reinterpret_cast<uintptr_t>(at);
  if (!is_static_shared(byte)) return;
  Range& touched = block().touched;
  touched.begin = std::min(touched.begin, byte);
  touched.end = std::max(touched.end, byte + size);
}

}  // namespace simt
