// Thresholds of a bucket's layers from their moments, on CPUs.

#include "../math.h"
#include "../ops.h"

namespace gradcomp::cpu {

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

}  // namespace gradcomp::cpu
