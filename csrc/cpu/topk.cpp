// Exact top-k on CPUs.

#include "../ops.h"
#include "bucket_select.h"

namespace gradcomp::cpu {
namespace {

// Wants the entries above one bar, whatever their layer.
struct AboveBar {
  int32_t bar;

  template <class Work>
  void layers(int64_t begin, int64_t end, Work work) const {
    work(begin, end, bar);
  }
};

}  // namespace

int64_t take_topk_scratch(int64_t n, int64_t k) { return select_words(n, k); }

void take_topk(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, int64_t k,
               Span<float> values, Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const auto sample = [&](int64_t entry, float* to) { std::copy_n(residual.data + entry, kSampled, to); };
  select_largest(residual.size, k, scratch, queue.threads, sample,
                 [&](Shortlist& shortlist, int64_t begin, int64_t end, int32_t bar) {
                   look_through({residual.data, residual.size}, begin, end, AboveBar{bar}, shortlist);
                 });
  move_out(residual, ages, scratch.data, k, values.data, indices.data);
  header.data[0] = static_cast<int32_t>(k);
  header.data[1] = flag.given() ? flag.data[0] : 0;
}

}  // namespace gradcomp::cpu
