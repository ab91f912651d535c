// Exact top-k on CPUs.

#include "../check.h"
#include "../ops.h"
#include "select.h"

namespace gradcomp::cpu {
namespace {

// Wanted is what is farther from zero than a bar.
struct Magnitude {
  int32_t bar;

  template <class Work>
  void layers(int64_t begin, int64_t end, Work work) const {
    work(begin, end, 0.0f, bar);
  }
};

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return select_words(n, k); }

void take_topk(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> peaks, int64_t k,
               Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const int64_t words = take_topk_scratch(value.size, k);
  EXPECTS(scratch.size >= words, "take_topk: scratch has ", scratch.size, " words; ", words, " are needed");
  const auto sample = [&](int64_t entry, float* to) { std::copy_n(value.data + entry, kSampled, to); };
  select_largest(value.size, k, scratch, queue.threads, sample,
                 [&](Shortlist& shortlist, int64_t begin, int64_t end, int32_t bar) {
                   look_through({value.data, value.size}, peaks, begin, end, Magnitude{bar}, shortlist);
                 });
  move_out(value, velocity, scratch.data, k, values.data, indices.data);
  header.data[0] = static_cast<int32_t>(k);
  header.data[1] = flag.given() ? flag.data[0] : 0;
}

}  // namespace gradcomp::cpu
