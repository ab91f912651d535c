// Taking what exceeds its layer's threshold, on CPUs: one vectorised read of the bucket lists the entries that pass; where they
// are too many for the room, the largest of the list are chosen, and where they are too many for the list, a radix selection
// reads all entries. Bytes: 4 an entry, and what is taken.

#include <algorithm>
#include <vector>

#include "../check.h"
#include "../math.h"
#include "../ops.h"
#include "parallel.h"
#include "select.h"

namespace gradcomp::cpu {
namespace {

constexpr int64_t kLeastList = 1 << 12;
constexpr int64_t kStep = 64;

int64_t list_capacity(int64_t n, int64_t room) { return std::min(n, std::max(4 * room, kLeastList)); }

// What passes. Entries are asked for in ascending order mostly, so that an entry's layer is found next to the last one's.
class Criterion {
 public:
  Criterion(Span<const float> value, Span<const int32_t> ends, Span<const float> centers, Span<const float> thresholds)
      : value_(value), ends_(ends), centers_(centers), thresholds_(thresholds) {}

  // The entry's key; 0, which is no key, where it does not pass.
  uint32_t operator()(int64_t i) {
    find(i);
    const uint32_t key = magnitude_key(value_.data[i] - centers_.data[layer_]);
    return key > magnitude_key(thresholds_.data[layer_]) ? key : 0;
  }

  // work(begin, end, center, threshold's key) for each layer's part of [begin, end).
  template <class Work>
  void layers(int64_t begin, int64_t end, Work work) {
    for (int64_t at = begin; at < end;) {
      find(at);
      const int64_t stop = layer_ == ends_.size - 1 ? end : std::min<int64_t>(end, ends_.data[layer_]);
      work(at, stop, centers_.data[layer_], magnitude_key(thresholds_.data[layer_]));
      at = stop;
    }
  }

 private:
  void find(int64_t i) {
    if (layer_ > 0 && i < ends_.data[layer_ - 1]) layer_ = std::upper_bound(ends_.data, ends_.data + layer_, i) - ends_.data;
    while (layer_ + 1 < ends_.size && ends_.data[layer_] <= i) ++layer_;
  }

  Span<const float> value_;
  Span<const int32_t> ends_;
  Span<const float> centers_, thresholds_;
  int64_t layer_ = 0;
};

inline uint32_t passes(float x, float center, uint32_t threshold) {
  // Compared as signed numbers, for which there is an instruction.
  return static_cast<int32_t>(magnitude_key(x - center)) > static_cast<int32_t>(threshold) ? 1u : 0u;
}

HOT bool any_passes(const float* x, int64_t n, float center, uint32_t threshold) {
  uint32_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= passes(x[i], center, threshold);
  return any != 0;
}

HOT int64_t count_passing(const float* x, int64_t n, float center, uint32_t threshold) {
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += passes(x[i], center, threshold);
  return count;
}

// What one thread finds: how many pass, and the first of them up to the capacity of its list.
struct Found {
  int64_t passing = 0, listed = 0;
};

Found list_passing(const float* x, int64_t begin, int64_t end, Criterion criterion, uint32_t* list, int64_t capacity) {
  Found found;
  criterion.layers(begin, end, [&](int64_t layer_begin, int64_t layer_end, float center, uint32_t threshold) {
    for (int64_t at = layer_begin; at < layer_end; at += kStep) {
      const int64_t stop = std::min(at + kStep, layer_end);
      if (!any_passes(x + at, stop - at, center, threshold)) continue;
      if (found.passing + kStep > capacity) {
        for (int64_t i = at; i < stop && found.listed < capacity; ++i) {
          if (passes(x[i], center, threshold)) list[found.listed++] = static_cast<uint32_t>(i);
        }
        found.passing += count_passing(x + at, stop - at, center, threshold);
        continue;
      }
      for (int64_t i = at; i < stop; ++i) {
        list[found.listed] = static_cast<uint32_t>(i);
        found.listed += passes(x[i], center, threshold);
      }
      found.passing = found.listed;
    }
  });
  return found;
}

// All that pass, in index order at the front of the list if they fit there.
Found gather_passing(Span<float> value, const Criterion& criterion, uint32_t* list, int64_t capacity, int threads) {
  const int count = parts(value.size, threads);
  const int64_t share = capacity / count;
  std::vector<Found> found(static_cast<size_t>(count));
  parallel(value.size, count, [&](int part, int64_t begin, int64_t end) {
    found[static_cast<size_t>(part)] = list_passing(value.data, begin, end, criterion, list + part * share, share);
  });
  Found all;
  for (int part = 0; part < count; ++part) {
    const Found& its = found[static_cast<size_t>(part)];
    std::copy_n(list + part * share, its.listed, list + all.listed);
    all.passing += its.passing;
    all.listed += its.listed;
  }
  return all;
}

}  // namespace

int64_t take_above_scratch(int64_t n, int64_t room) { return list_capacity(n, room) + kStep; }

void take_above(Span<float> value, Span<float> velocity, Span<const int32_t> flag, Span<const int32_t> ends,
                Span<const float> centers, Span<const float> thresholds, Span<float> values, Span<int32_t> indices,
                Span<int32_t> header, Span<uint32_t> scratch, Queue queue) {
  const int64_t n = value.size, room = values.size;
  EXPECTS(scratch.size >= take_above_scratch(n, room), "take_above: scratch has ", scratch.size, " words; ",
          take_above_scratch(n, room), " are needed");
  Criterion criterion({value.data, n}, ends, centers, thresholds);
  uint32_t* list = scratch.data;
  const Found found = gather_passing(value, criterion, list, list_capacity(n, room), queue.threads);
  header.data[0] = static_cast<int32_t>(found.passing);
  header.data[1] = flag.given() ? flag.data[0] : 0;

  const bool listed = found.listed == found.passing;
  const int64_t sources = listed ? found.listed : n;
  const int64_t k = std::min(found.passing, room);
  const auto index_at = [&](int64_t j) { return listed ? static_cast<int64_t>(list[j]) : j; };
  const auto key_at = [&](int64_t j) { return criterion(index_at(j)); };
  const Rank rank = found.passing > room ? radix_select(sources, k, key_at) : Rank{0, k};
  move_chosen(value, velocity, sources, k, rank, index_at, key_at, values.data, indices.data);
}

}  // namespace gradcomp::cpu
