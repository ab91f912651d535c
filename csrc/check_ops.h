// What each kernel expects of its arguments' sizes and ranges; the signatures are those of ops.inc.
#pragma once

#include <cstdint>

#include "check.h"
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

inline void accumulate(const Pieces& grads, Span<float> value, Span<float> velocity, Span<int32_t> flag, float momentum, bool,
                       Queue) {
  covers("accumulate", grads, value, "value");
  if (velocity.given()) same_size("accumulate", velocity, "velocity", value, "value");
  holds("accumulate", flag, "flag", 1);
  EXPECTS(momentum >= 0 && momentum < 1, "accumulate: momentum = ", momentum, " is outside [0, 1)");
  EXPECTS(momentum == 0 || velocity.given(), "accumulate: momentum = ", momentum, " needs a velocity");
}

inline void spread(Span<const float> flat, const Pieces& grads, float, Queue) { covers("spread", grads, flat, "flat"); }

inline void take_all(Span<float> value, Span<const int32_t> flag, Span<float> taken, Queue) {
  same_size("take_all", taken, "taken", value, "value");
  if (flag.given()) holds("take_all", flag, "flag", 1);
}

inline void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, int64_t k, Span<float> values,
                      Span<int32_t> indices, Span<int32_t> header, Span<uint32_t>, Queue) {
  indexable("take_topk", value, "value");
  EXPECTS(k >= 1 && k <= value.size, "take_topk: k = ", k, " is outside 1 .. ", value.size, ", the number of entries");
  if (velocity.given()) same_size("take_topk", velocity, "velocity", value, "value");
  if (flag.given()) holds("take_topk", flag, "flag", 1);
  holds("take_topk", values, "values", k);
  holds("take_topk", indices, "indices", k);
  holds("take_topk", header, "header", 2);
}

inline void add_sparse(Span<float> target, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                       float, Queue) {
  indexable("add_sparse", target, "target");
  holds("add_sparse", target, "target", 1);
  same_size("add_sparse", values, "values", indices, "indices");
  holds("add_sparse", header, "header", 2);
}

inline void restore_sparse(Span<float> value, Span<const float> values, Span<const int32_t> indices, Span<const int32_t> header,
                           Span<const float> update, Queue) {
  same_size("restore_sparse", values, "values", indices, "indices");
  same_size("restore_sparse", update, "update", value, "value");
  holds("restore_sparse", value, "value", 1);
  holds("restore_sparse", header, "header", 2);
}

}  // namespace gradcomp::check
