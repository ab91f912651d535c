// The checks that a call passes before its kernel runs. ops.inc lists them for each kernel, in these words.
//
// Each returns true, or throws a message with the names of the kernel and its arguments, which come from ops.inc too. An
// array that was not given passes.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "expects.h"
#include "math_blocks.h"
#include "math_levels.h"
#include "math_packed.h"
#include "math_payload.h"
#include "math_progress.h"
#include "math_rounding.h"
#include "math_sketch.h"
#include "ops.h"
#include "span.h"

// An argument, under its name, of the kernel whose checks are running.
#define NAMED(argument) ::gradcomp::named(__func__, #argument, argument)

#define EXPECT(condition, ...) ((condition) || ::gradcomp::refuse(__func__, ": ", __VA_ARGS__))
#define HOLDS(array, least) ::gradcomp::holds(NAMED(array), least)
#define SAME_SIZE(array, other) ::gradcomp::same_size(NAMED(array), NAMED(other))
#define SAME_RANKS(arrays, others) \
  EXPECT(arrays.count == others.count, #arrays " come from ", arrays.count, " ranks, but " #others " from ", others.count)
#define COVERS(grads, flat) ::gradcomp::covers(NAMED(grads), NAMED(flat))
#define INDEXABLE(flat) ::gradcomp::indexable(NAMED(flat))
#define AT_MOST(k, flat) \
  EXPECT(k >= 1 && k <= flat.size, #k "=", k, " must be in [1, ", flat.size, "], the number of entries of " #flat)
#define LINES_OF(lines, flat) ::gradcomp::one_for_each(NAMED(lines), NAMED(flat), kLine)
#define WIPES(wipes, marks, flat, first)                                                \
  (EXPECT(!wipes || marks.given(), "wipes=true needs marks, but " #marks " is None") && \
   EXPECT(!wipes || first.data < flat.data || first.data >= flat.data + flat.size,      \
          "wipes=true, but " #first " lies in " #flat ": pass a copy"))
#define PACKED(blocks, entries, n, capacity) ::gradcomp::is_packed(NAMED(blocks), NAMED(entries), n, capacity)
#define PACKED_PAYLOAD(payload, n, capacity) \
  (::gradcomp::is_packed_payload(NAMED(payload), n, capacity) && ::gradcomp::is_aligned(NAMED(payload), payload))
#define LEVELS_PAYLOAD(payload, n, group, count) \
  (::gradcomp::is_levels_payload(NAMED(payload), n, group, count) && ::gradcomp::is_aligned(NAMED(payload), payload))
#define BLOCKS_OF(flat, bits) ::gradcomp::is_in_blocks(NAMED(flat), bits)
#define BLOCKS_PAYLOAD(payload, n, bits) \
  (::gradcomp::has_bytes(NAMED(payload), BlocksPayload(n, bits).bytes()) && ::gradcomp::is_aligned(NAMED(payload), payload))
#define TABLE(table, rows) ::gradcomp::is_table(NAMED(table), rows)
#define GROUPS_OF(flat, group, count) ::gradcomp::is_grouped(NAMED(flat), group, count)

namespace gradcomp {

constexpr int64_t kMostEntries = int64_t{1} << 31;

struct Named {
  const char* kernel;
  const char* name;
  int64_t size;
  bool given;
};

template <class T>
Named named(const char* kernel, const char* name, const Span<T>& array) {
  return {kernel, name, array.size, true};
}
template <class T>
Named named(const char* kernel, const char* name, const OptionalSpan<T>& array) {
  return {kernel, name, array.size, array.given()};
}
template <class T>
Named named(const char* kernel, const char* name, const Spans<T>& arrays) {
  return {kernel, name, arrays.size, true};
}
inline Named named(const char* kernel, const char* name, const Pieces& grads) { return {kernel, name, grads.size(), true}; }

template <class... Parts>
[[noreturn]] bool refuse(const Parts&... parts) {
  fail(parts...);
}

inline bool holds(const Named& array, int64_t least) {
  return !array.given || array.size >= least ||
         refuse(array.kernel, ": ", array.name, " has ", array.size, " entries, but needs at least ", least);
}

inline bool same_size(const Named& array, const Named& other) {
  return !array.given || array.size == other.size ||
         refuse(array.kernel, ": ", array.name, " has ", array.size, " entries, but ", other.name, " has ", other.size);
}

inline bool covers(const Named& grads, const Named& flat) {
  return grads.size == flat.size ||
         refuse(grads.kernel, ": ", grads.name, " have ", grads.size, " entries in all, but ", flat.name, " has ", flat.size);
}

inline bool indexable(const Named& flat) {
  return flat.size < kMostEntries ||
         refuse(flat.kernel, ": ", flat.name, " has ", flat.size,
                " entries, but a bucket must stay below 2^31, because indices have 32 bits: lower bucket_mb");
}

// Check that the array has one entry for every `each` entries of flat, and one for the rest.
inline bool one_for_each(const Named& array, const Named& flat, int64_t each) {
  const int64_t needed = (flat.size + each - 1) / each;
  return !array.given || !flat.given || array.size == needed ||
         refuse(array.kernel, ": ", array.name, " has ", array.size, " entries, but needs ", needed, ": one for every ", each,
                " of the ", flat.size, " entries of ", flat.name);
}

inline bool is_table(const Named& table, int64_t rows) {
  if (rows < 3 || rows > 9 || rows % 2 == 0) refuse(table.kernel, ": rows=", rows, " must be 3, 5, 7 or 9");
  return (table.size > 0 && table.size % (kSketchTile * rows) == 0) ||
         refuse(table.kernel, ": ", table.name, " has ", table.size, " entries, but needs a multiple of ", kSketchTile * rows,
                ": ", rows, " rows of a multiple of ", kSketchTile, " columns");
}

inline bool is_grouped(const Named& flat, int64_t group, int64_t count) {
  if (group < Groups::kShortest || group >= kMostEntries) {
    refuse(flat.kernel, ": group=", group, " must be in [", Groups::kShortest, ", 2^31)");
  }
  if (packing_of(count) == nullptr) refuse(flat.kernel, ": count=", count, " levels must be 2, 3, 5 or 9");
  return indexable(flat) && holds(flat, 1);
}

inline bool is_in_blocks(const Named& flat, int64_t bits) {
  if (bits < kNarrowest || bits > kWidest)
    refuse(flat.kernel, ": bits=", bits, " must be in [", kNarrowest, ", ", kWidest, "]");
  return indexable(flat) && holds(flat, 1);
}

inline Packed packed_form(const char* kernel, int64_t n, int64_t capacity) {
  if (n < 1 || n >= kMostEntries) refuse(kernel, ": n=", n, " must be in [1, 2^31)");
  if (capacity < 1 || capacity > n) refuse(kernel, ": capacity=", capacity, " must be in [1, ", n, "]");
  return {n, capacity};
}

inline bool is_packed(const Named& blocks, const Named& entries, int64_t n, int64_t capacity) {
  const Packed form = packed_form(blocks.kernel, n, capacity);
  const auto needs = [&](const Named& array, int64_t size) {
    return array.size == size || refuse(array.kernel, ": ", array.name, " has ", array.size, " words, but needs ", size,
                                        " for ", capacity, " of ", n, " entries");
  };
  return needs(blocks, form.blocks()) && needs(entries, form.words());
}

// Check that payloads have this many bytes.
inline bool has_bytes(const Named& payload, int64_t needed) {
  return payload.size == needed ||
         refuse(payload.kernel, ": ", payload.name, " has ", payload.size, " bytes, but needs ", needed);
}

inline bool is_packed_payload(const Named& payload, int64_t n, int64_t capacity) {
  return has_bytes(payload, PackedPayload(packed_form(payload.kernel, n, capacity)).bytes());
}

// The group and the count have passed.
inline bool is_levels_payload(const Named& payload, int64_t n, int64_t group, int64_t count) {
  return has_bytes(payload, LevelsPayload(Groups{n, group}, count).bytes());
}

inline bool is_aligned(const Named& named, const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 ||
         refuse(named.kernel, ": ", named.name, " begins at an address that is no multiple of ", kAlignment, ": pass a copy");
}
template <class T>
bool is_aligned(const Named& named, const Span<T>& payload) {
  return is_aligned(named, static_cast<const void*>(payload.data));
}
template <class T>
bool is_aligned(const Named& named, const Spans<T>& payloads) {
  for (int rank = 0; rank < payloads.count; ++rank) is_aligned(named, static_cast<const void*>(payloads.data[rank]));
  return true;
}

// The numbers of groups, and of words for their codes, that a checked flat array makes.
template <class T>
int64_t groups_in(Span<T> flat, int64_t group) {
  return Groups{flat.size, group}.count();
}
template <class T>
int64_t words_in(Span<T> flat, int64_t group, int64_t count) {
  return packing_of(count)->words(Groups{flat.size, group});
}

inline void pass(std::initializer_list<bool>) {}

// A function for each kernel and twin, since the twins need different scratch. Most checks use some of the arguments only.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define KERNEL(name, arguments, ...) \
  inline void name arguments { pass({__VA_ARGS__}); }
#define SCRATCH(name, sizes)

namespace cpu::checks {
#include "ops.inc"
}  // namespace cpu::checks
namespace cuda::checks {
#include "ops.inc"
}  // namespace cuda::checks

#undef KERNEL
#undef SCRATCH
#pragma GCC diagnostic pop

}  // namespace gradcomp
