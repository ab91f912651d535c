// The calls that the compiler puts before every access to memory of a kernel, and where it finds an operation whose result
// differs between a CPU and a GPU.

#include "hooks.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "shadow.h"
#include "threads.h"

namespace simt {

namespace {

uintptr_t own_stack = 0;
uintptr_t arguments = 0;
size_t arguments_size = 0;

// Other threads do not see a thread's own variables.
inline bool is_watched(const void* at) {
  const auto byte = reinterpret_cast<uintptr_t>(at);
  return own_stack != 0 && byte - own_stack >= Fiber::kStack && byte - arguments >= arguments_size;
}

struct Where {
  const char* file;
  uint32_t line, column;
};

[[noreturn]] void refuse(const Where& where, const std::string& what) {
  if (own_stack == 0) {
    std::fprintf(stderr, "%s:%u: %s\n", where.file, where.line, what.c_str());
    std::abort();
  }
  const char* const slash = std::strrchr(where.file, '/');
  abandon(about_block(": thread ", block().current, ' ', what, " in ", slash ? slash + 1 : where.file, ':', where.line));
}

}  // namespace

void enter_kernel(const char* stack) { own_stack = reinterpret_cast<uintptr_t>(stack); }
void leave_kernel() { own_stack = 0; }
void ignore_arguments(const void* at, size_t size) {
  arguments = reinterpret_cast<uintptr_t>(at);
  arguments_size = size;
}

// A volatile read, and the functions of cuda_runtime.h, are the places where one block sees what others do.
static void look_at(const void* word, size_t size, const void* site) {
  step_aside();
  note_read(word, size, Level::strong, site);
}

void touch_atomic(void* word, size_t size, const void* site) {
  if (!is_watched(word)) return;
  const bool shared = is_shared(word);
  if (!shared) step_aside();
  note_atomic(word, size, site);
  if (!shared) order_atomic(word);
}

void touch_second_level(const void* word, size_t size, const void* site) {
  step_aside();
  if (is_watched(word)) note_read(word, size, Level::second, site);
}

}  // namespace simt

#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define SITE __builtin_extract_return_addr(__builtin_return_address(0))
#define WATCHED(name, ...)                       \
  HOOK __tsan_##name(void* at) {                 \
    if (simt::is_watched(at)) simt::__VA_ARGS__; \
  }
#define ACCESSES(size)                                                         \
  WATCHED(read##size, note_read(at, size, simt::Level::plain, SITE))           \
  WATCHED(write##size, note_write(at, size, SITE))                             \
  WATCHED(unaligned_read##size, note_read(at, size, simt::Level::plain, SITE)) \
  WATCHED(unaligned_write##size, note_write(at, size, SITE))                   \
  WATCHED(volatile_write##size, note_write(at, size, SITE))                    \
  WATCHED(volatile_read##size, look_at(at, size, SITE))

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
HOOK __tsan_read_range(void* at, size_t size) {
  if (simt::is_watched(at)) simt::note_read(at, size, simt::Level::plain, SITE);
}
HOOK __tsan_write_range(void* at, size_t size) {
  if (simt::is_watched(at)) simt::note_write(at, size, SITE);
}
HOOK __tsan_vptr_update(void*, void*) {}
HOOK __tsan_vptr_read(void*) {}
HOOK __tsan_init() {}
// Host code that a file has beside its kernels: guards of static variables, and std::atomic in headers.
#define ATOMIC(bits, name, result, arguments, ...) \
  extern "C" __attribute__((visibility("hidden"))) result __tsan_atomic##bits##_##name arguments { __VA_ARGS__; }
#define MODIFY(bits, word, name) \
  ATOMIC(bits, name, word, (volatile word * at, word x, int), return __atomic_##name(at, x, __ATOMIC_SEQ_CST))
#define COMPARE(bits, word, name)                                                  \
  ATOMIC(bits, name, int, (volatile word * at, word * expected, word x, int, int), \
         return __atomic_compare_exchange_n(at, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
#define ATOMICS(bits, word)                                                                                            \
  ATOMIC(bits, load, word, (const volatile word* at, int), return __atomic_load_n(at, __ATOMIC_SEQ_CST))               \
  ATOMIC(bits, store, void, (volatile word * at, word x, int), __atomic_store_n(at, x, __ATOMIC_SEQ_CST))              \
  ATOMIC(bits, exchange, word, (volatile word * at, word x, int), return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST)) \
  MODIFY(bits, word, fetch_add)                                                                                        \
  MODIFY(bits, word, fetch_sub)                                                                                        \
  MODIFY(bits, word, fetch_and)                                                                                        \
  MODIFY(bits, word, fetch_or)                                                                                         \
  MODIFY(bits, word, fetch_xor)                                                                                        \
  COMPARE(bits, word, compare_exchange_strong)                                                                         \
  COMPARE(bits, word, compare_exchange_weak)

ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

// ---- Operations that a CPU answers and a GPU answers otherwise, or not at all. The first argument begins with the place.

HOOK __ubsan_handle_type_mismatch_v1_abort(simt::Where* where, uintptr_t at) {
  char text[64];
  std::snprintf(text, sizeof text, "uses the misaligned address 0x%zx", static_cast<size_t>(at));
  simt::refuse(*where, text);
}
HOOK __ubsan_handle_shift_out_of_bounds_abort(simt::Where* where, uintptr_t, uintptr_t) {
  simt::refuse(*where, "shifts by the number's width or more");
}
HOOK __ubsan_handle_divrem_overflow_abort(simt::Where* where, uintptr_t, uintptr_t) {
  simt::refuse(*where, "divides a whole number by 0");
}
HOOK __ubsan_handle_float_cast_overflow_abort(simt::Where* where, uintptr_t) {
  simt::refuse(*where, "turns a float into a whole number that cannot hold it");
}
