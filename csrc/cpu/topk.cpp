// Exact top-k on CPUs.

#include "../check.h"
#include "../ops.h"
#include "select.h"

namespace gradcomp::cpu {
namespace {

// Every entry is wanted, by its distance from zero.
struct Magnitude {
  static constexpr bool kCounted = false;

  const float* x;

  int32_t key(int64_t i) const { return key_of(x[i], 0.0f); }

  template <class Work>
  void layers(int64_t begin, int64_t end, Work work) const {
    work(begin, end, 0.0f, -1);
  }
};

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return select_words(n, k); }

void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> peaks, int64_t k,
               Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const int64_t words = take_topk_scratch(value.size, k);
  EXPECTS(scratch.size >= words, "take_topk: scratch has ", scratch.size, " words; ", words, " are needed");
  select({value.data, value.size}, peaks, Magnitude{value.data}, k, scratch, queue.threads);
  move_out(value, velocity, scratch.data, k, values.data, indices.data);
  header.data[0] = static_cast<int32_t>(k);
  header.data[1] = flag.given() ? flag.data[0] : 0;
}

}  // namespace gradcomp::cpu
