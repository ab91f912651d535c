// Thresholds of a bucket's layers from their moments, the steering of lam, and the taking of the entries above, on CPUs.

#include "../ops.h"
#include "bucket_select.h"

namespace gradcomp::cpu {
namespace {

// Wants the entries above the threshold of their layer.
class AboveThreshold {
 public:
  AboveThreshold(Span<const int32_t> ends, Span<const float> thresholds) : ends_(ends), thresholds_(thresholds) {}

  template <class Work>
  void layers(int64_t begin, int64_t end, Work work) const {
    for (int64_t layer = layer_of(begin); begin < end; ++layer) {
      const int64_t stop = layer == ends_.size - 1 ? end : std::clamp<int64_t>(ends_.data[layer], begin, end);
      work(begin, stop, key_of(thresholds_.data[layer]));
      begin = stop;
    }
  }

 private:
  int64_t layer_of(int64_t i) const { return std::upper_bound(ends_.data, ends_.data + ends_.size - 1, i) - ends_.data; }

  Span<const int32_t> ends_;
  Span<const float> thresholds_;
};

}  // namespace

void set_thresholds(Span<const double> moments, Span<const int32_t> ends, Span<const float> lam, bool pooled,
                    Span<float> thresholds, Queue) {
  Moments<double> all{};
  for (int64_t i = 0; i < ends.size; ++i) {
    const int64_t begin = i == 0 ? 0 : ends.data[i - 1];
    const Moments<double> own = load_moments(moments.data + kMoments * i, static_cast<double>(ends.data[i] - begin));
    all = pooled ? merge(all, own) : own;
    thresholds.data[i] = threshold_of(all, lam.data[0]);
  }
  for (int64_t i = 0; pooled && i + 1 < ends.size; ++i) thresholds.data[i] = thresholds.data[ends.size - 1];
}

void steer(Span<float> lam, Span<const int32_t> header, int64_t target, Queue) {
  const Steered next = steered({lam.data[0], lam.data[1]}, static_cast<double>(header.data[0]), static_cast<double>(target));
  lam.data[0] = next.lam;
  lam.data[1] = next.gain;
}

int64_t take_above_scratch(int64_t n, int64_t capacity) { return select_words(n, capacity); }

void take_above(Span<float> residual, OptionalSpan<uint8_t> ages, OptionalSpan<const int32_t> flag, Span<const int32_t> ends,
                Span<const float> thresholds, Span<float> values, Span<int32_t> indices, Span<int32_t> header,
                Span<uint32_t> scratch, Queue queue) {
  const AboveThreshold above(ends, thresholds);
  const Found found =
      select(residual.size, values.size, true, scratch, queue.threads, [&](Shortlist& shortlist, int64_t begin, int64_t end) {
        look_through({residual.data, residual.size}, begin, end, above, shortlist);
      });
  move_out(residual, ages, scratch.data, found.listed, values.data, indices.data);
  header.data[0] = static_cast<int32_t>(found.wanted);
  header.data[1] = flag.given() ? flag.data[0] : 0;
}

}  // namespace gradcomp::cpu
