// Taking what exceeds its layer's threshold, on CPUs.

#include "../check.h"
#include "../ops.h"
#include "select.h"

namespace gradcomp::cpu {
namespace {

// Wanted is what is farther from its layer's center than the threshold.
class Beyond {
 public:
  Beyond(Span<const int32_t> ends, Span<const float> centers, Span<const float> thresholds)
      : ends_(ends), centers_(centers), thresholds_(thresholds) {}

  template <class Work>
  void layers(int64_t begin, int64_t end, Work work) const {
    for (int64_t layer = layer_of(begin); begin < end; ++layer) {
      const int64_t stop = layer == ends_.size - 1 ? end : std::min<int64_t>(end, ends_.data[layer]);
      work(begin, stop, centers_.data[layer], key_of(thresholds_.data[layer], 0.0f));
      begin = stop;
    }
  }

 private:
  int64_t layer_of(int64_t i) const { return std::upper_bound(ends_.data, ends_.data + ends_.size - 1, i) - ends_.data; }

  Span<const int32_t> ends_;
  Span<const float> centers_, thresholds_;
};

}  // namespace

int64_t take_above_scratch(int64_t n, int64_t room) { return select_words(n, room); }

void take_above(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const uint32_t> peaks,
                Span<const int32_t> ends, Span<const float> centers, Span<const float> thresholds, Span<float> values,
                Span<int32_t> indices, Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const int64_t words = take_above_scratch(value.size, values.size);
  EXPECTS(scratch.size >= words, "take_above: scratch has ", scratch.size, " words; ", words, " are needed");
  const Beyond beyond(ends, centers, thresholds);
  const Found found =
      select(value.size, values.size, true, scratch, queue.threads, [&](Shortlist& shortlist, int64_t begin, int64_t end) {
        look_through({value.data, value.size}, peaks, begin, end, beyond, shortlist);
      });
  move_out(value, velocity, scratch.data, found.listed, values.data, indices.data);
  header.data[0] = static_cast<int32_t>(found.wanted);
  header.data[1] = flag.given() ? flag.data[0] : 0;
}

}  // namespace gradcomp::cpu
