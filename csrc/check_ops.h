// What each kernel expects of its arguments' sizes and ranges; the signatures are those of ops.inc.
#pragma once

#include <cstdint>

#include "check.h"
#include "levels.h"
#include "math.h"
#include "sketch.h"
#include "span.h"

namespace gradcomp::check {

template <class A, class B>
void same_size(const char* op, Span<A> a, const char* a_name, Span<B> b, const char* b_name) {
  EXPECTS(a.size == b.size, op, ": ", a_name, " has ", a.size, " entries, but ", b_name, " has ", b.size);
}

template <class A>
void holds(const char* op, Span<A> span, const char* name, int64_t least) {
  EXPECTS(span.size >= least, op, ": ", name, " has ", span.size, " entries; ", least, " are needed");
}

template <class A>
void covers(const char* op, const Pieces& grads, Span<A> flat, const char* name) {
  EXPECTS(grads.begin[grads.count] == flat.size, op, ": grads have ", grads.begin[grads.count], " entries in all, but ", name,
          " has ", flat.size);
}

template <class A>
void indexable(const char* op, Span<A> span, const char* name) {
  EXPECTS(span.size < (int64_t{1} << 31), op, ": ", name, " has ", span.size,
          " entries; indices on the wire are 32 bits, so a ", "bucket must stay below 2^31");
}

inline void flatten(const Pieces& grads, Span<float> flat, Queue) { covers("flatten", grads, flat, "flat"); }

inline void sum_squares(const Pieces& grads, Span<double> squares, Span<uint32_t>, Queue) {
  holds("sum_squares", squares, "squares", grads.count);
}

template <class A, class B>
void lines_of(const char* op, Span<A> lines, const char* name, Span<B> flat, const char* flat_name) {
  const int64_t needed = (flat.size + kLine - 1) / kLine;
  EXPECTS(!lines.given() || lines.size == needed, op, ": ", name, " has ", lines.size, " entries; ", flat.size, " entries of ",
          flat_name, " lie in ", needed, " lines");
}

inline void accumulate(const Pieces& grads, Span<const float> scales, Span<float> value, Span<float> velocity,
                       Span<int32_t> flag, Span<double> moments, Span<uint32_t> peaks, Span<uint32_t>, float momentum, bool,
                       bool, Queue) {
  covers("accumulate", grads, value, "value");
  if (scales.given()) holds("accumulate", scales, "scales", grads.count);
  if (velocity.given()) same_size("accumulate", velocity, "velocity", value, "value");
  holds("accumulate", flag, "flag", 1);
  if (moments.given()) holds("accumulate", moments, "moments", kMoments * grads.count);
  lines_of("accumulate", peaks, "peaks", value, "value");
  EXPECTS(momentum >= 0 && momentum < 1, "accumulate: momentum = ", momentum, " is outside [0, 1)");
  EXPECTS(momentum == 0 || velocity.given(), "accumulate: momentum = ", momentum, " needs a velocity");
}

inline void spread(Span<const float> flat, Span<const uint8_t> marks, const Pieces& grads, float, Queue) {
  covers("spread", grads, flat, "flat");
  lines_of("spread", marks, "marks", flat, "flat");
}

inline void wipe(Span<float> flat, Span<uint8_t> marks, Queue) { lines_of("wipe", marks, "marks", flat, "flat"); }

inline void offer_all(Span<const float> value, Span<const int32_t> flag, Span<float> taken, Queue) {
  same_size("offer_all", taken, "taken", value, "value");
  if (flag.given()) holds("offer_all", flag, "flag", 1);
}

inline void settle_all(Span<float> value, Span<const float> update, float, Queue) {
  same_size("settle_all", update, "update", value, "value");
}

inline void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> peaks, int64_t k,
                      Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t>, Queue) {
  indexable("take_topk", value, "value");
  EXPECTS(k >= 1 && k <= value.size, "take_topk: k = ", k, " is outside 1 .. ", value.size, ", the number of entries");
  if (velocity.given()) same_size("take_topk", velocity, "velocity", value, "value");
  if (flag.given()) holds("take_topk", flag, "flag", 1);
  lines_of("take_topk", peaks, "peaks", value, "value");
  holds("take_topk", values, "values", k);
  holds("take_topk", indices, "indices", k);
  holds("take_topk", header, "header", 2);
}

inline void add_sparse(Span<float> target, Span<uint8_t> marks, Span<const float> values, Span<const int32_t> indices,
                       Span<const int32_t> header, float, Queue) {
  lines_of("add_sparse", marks, "marks", target, "target");
  indexable("add_sparse", target, "target");
  holds("add_sparse", target, "target", 1);
  same_size("add_sparse", values, "values", indices, "indices");
  holds("add_sparse", header, "header", 2);
}

inline void settle_sparse(Span<float> value, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                          Span<const float> update, float, Queue) {
  same_size("settle_sparse", values, "values", indices, "indices");
  same_size("settle_sparse", update, "update", value, "value");
  holds("settle_sparse", value, "value", 1);
  holds("settle_sparse", header, "header", 2);
}

inline void set_thresholds(Span<const double> moments, Span<const int32_t> ends, Span<const float> lam, bool, bool, bool, bool,
                           bool, Span<float> centers, Span<float> thresholds, Queue) {
  holds("set_thresholds", moments, "moments", kMoments * ends.size);
  holds("set_thresholds", lam, "lam", 1);
  same_size("set_thresholds", centers, "centers", ends, "ends");
  same_size("set_thresholds", thresholds, "thresholds", ends, "ends");
}

inline void steer(Span<float> lam, Span<const int32_t> header, int64_t target, Queue) {
  holds("steer", lam, "lam", 1);
  holds("steer", header, "header", 2);
  EXPECTS(target >= 1, "steer: target = ", target, " must be at least 1");
}

inline void take_above(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> peaks,
                       Span<const int32_t> ends, Span<const float> centers, Span<const float> thresholds, Span<float> values,
                       Span<int32_t> indices, Span<int32_t> header, Span<uint32_t>, Queue) {
  indexable("take_above", value, "value");
  holds("take_above", value, "value", 1);
  if (velocity.given()) same_size("take_above", velocity, "velocity", value, "value");
  if (flag.given()) holds("take_above", flag, "flag", 1);
  lines_of("take_above", peaks, "peaks", value, "value");
  holds("take_above", ends, "ends", 1);
  same_size("take_above", centers, "centers", ends, "ends");
  same_size("take_above", thresholds, "thresholds", ends, "ends");
  holds("take_above", values, "values", 1);
  same_size("take_above", values, "values", indices, "indices");
  holds("take_above", header, "header", 2);
}

template <class A>
void is_table(const char* op, Span<A> table, int64_t rows) {
  EXPECTS(rows >= 3 && rows <= 9 && rows % 2 == 1, op, ": rows = ", rows, " is not 3, 5, 7 or 9");
  EXPECTS(table.size > 0 && table.size % (kSketchTile * rows) == 0, op, ": table has ", table.size,
          " entries, which is not a multiple of ", kSketchTile * rows, ": ", rows, " rows of columns in sixteens");
}

inline void sketch(Span<const float> value, int64_t rows, int64_t, Span<float> table, Queue) {
  indexable("sketch", value, "value");
  is_table("sketch", table, rows);
}

inline void heaviest(Span<const float> table, int64_t rows, int64_t, int64_t n, Span<int32_t> indices, Span<float> estimates,
                     Span<uint32_t>, Queue) {
  is_table("heaviest", table, rows);
  EXPECTS(n >= 1 && n < (int64_t{1} << 31), "heaviest: n = ", n, " is outside 1 .. 2^31 - 1");
  EXPECTS(indices.size >= 1 && indices.size <= n, "heaviest: indices has ", indices.size, " entries; 1 .. ", n,
          " are possible");
  same_size("heaviest", estimates, "estimates", indices, "indices");
}

template <class A>
void blocks_of(const char* op, Span<const uint32_t> blocks, Span<A> flat, const char* name) {
  indexable(op, flat, name);
  holds(op, flat, name, 1);
  const int64_t needed = (flat.size + kBlockEntries - 1) / kBlockEntries;
  EXPECTS(blocks.size == needed, op, ": blocks has ", blocks.size, " entries; ", flat.size, " entries of ", name, " lie in ",
          needed);
}

inline void pack_sparse(Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header, Span<float> value,
                        Span<uint32_t> blocks, Span<uint32_t> entries, Queue) {
  holds("pack_sparse", blocks, "blocks", 1);
  if (value.given()) blocks_of("pack_sparse", {blocks.data, blocks.size}, value, "value");
  same_size("pack_sparse", values, "values", indices, "indices");
  same_size("pack_sparse", values, "values", entries, "entries");
  holds("pack_sparse", header, "header", 2);
}

inline void unpack_sparse(Span<const uint32_t> blocks, Span<const uint32_t> entries, Span<int32_t> header, Span<float> values,
                          Span<int32_t> indices, Queue) {
  holds("unpack_sparse", blocks, "blocks", 1);
  same_size("unpack_sparse", values, "values", entries, "entries");
  same_size("unpack_sparse", indices, "indices", entries, "entries");
  holds("unpack_sparse", header, "header", 2);
}

// Of each rank one.
template <class A, class B>
void of_as_many_ranks(const char* op, const Spans<A>& spans, const char* name, const Spans<B>& headers) {
  EXPECTS(spans.count == headers.count, op, ": ", name, " are of ", spans.count, " ranks, headers of ", headers.count);
}

inline void add_packed(Span<float> target, Span<uint8_t> marks, const Spans<const uint32_t>& blocks,
                       const Spans<const uint32_t>& entries, const Spans<const int32_t>& headers, float, Queue) {
  lines_of("add_packed", marks, "marks", target, "target");
  blocks_of("add_packed", {nullptr, blocks.size}, target, "target");
  holds("add_packed", headers[0], "headers", 2);
  of_as_many_ranks("add_packed", blocks, "blocks", headers);
  of_as_many_ranks("add_packed", entries, "entries", headers);
}

inline void settle_packed(Span<float> value, Span<const uint32_t> blocks, Span<const uint32_t>, Span<const int32_t> header,
                          Span<const float> update, float, Queue) {
  blocks_of("settle_packed", blocks, value, "value");
  same_size("settle_packed", update, "update", value, "value");
  holds("settle_packed", header, "header", 2);
}

inline void groups_of(const char* op, Span<const float> value, int64_t group, int64_t count, Span<const float> levels) {
  indexable(op, value, "value");
  holds(op, value, "value", 1);
  EXPECTS(group >= Groups::kShortest, op, ": group = ", group, " must be at least ", Groups::kShortest);
  EXPECTS(packing_of(count) != nullptr, op, ": there are 2, 3, 5 or 9 levels, not ", count);
  holds(op, levels, "levels", Groups{value.size, group}.count() * count);
}

inline void words_of(const char* op, Span<const float> value, int64_t group, int64_t count, Span<const uint64_t> words) {
  holds(op, words, "words", packing_of(count)->words(Groups{value.size, group}));
}

inline void find_levels(Span<const float> value, Span<const float> bounds, int64_t form, int64_t group, int64_t count,
                        Span<float> levels, Span<float> cuts, Queue) {
  groups_of("find_levels", value, group, count, {levels.data, levels.size});
  const int64_t groups = Groups{value.size, group}.count();
  if (bounds.given()) holds("find_levels", bounds, "bounds", 2 * groups);
  holds("find_levels", cuts, "cuts", groups);
  EXPECTS(form >= 0 && form < kForms, "find_levels: form = ", form, " is outside [0, ", kForms, ")");
}

inline void take_levels(Span<float> value, Span<const float> levels, Span<const float> cuts, int64_t group, int64_t count,
                        int64_t, Span<uint64_t> words, Queue) {
  const Span<const float> entries{value.data, value.size};
  groups_of("take_levels", entries, group, count, levels);
  words_of("take_levels", entries, group, count, {words.data, words.size});
  EXPECTS(!cuts.given() || count == 2, "take_levels: cuts are for 2 levels, not ", count);
  if (cuts.given()) holds("take_levels", cuts, "cuts", Groups{value.size, group}.count());
}

inline void add_levels(Span<float> target, const Spans<const float>& levels, const Spans<const uint64_t>& words,
                       const Spans<const int32_t>& headers, int64_t group, int64_t count, float, Queue) {
  const Span<const float> entries{target.data, target.size};
  groups_of("add_levels", entries, group, count, levels[0]);
  words_of("add_levels", entries, group, count, words[0]);
  holds("add_levels", headers[0], "headers", 2);
  of_as_many_ranks("add_levels", levels, "levels", headers);
  of_as_many_ranks("add_levels", words, "words", headers);
}

inline void settle_levels(Span<float> value, Span<const float> levels, Span<const uint64_t> words, int64_t group, int64_t count,
                          Span<const float> update, float, Queue) {
  const Span<const float> entries{value.data, value.size};
  groups_of("settle_levels", entries, group, count, levels);
  words_of("settle_levels", entries, group, count, words);
  same_size("settle_levels", update, "update", entries, "value");
}

}  // namespace gradcomp::check
