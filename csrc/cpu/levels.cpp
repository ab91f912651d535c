// The levels of each group, on CPUs. A group stays in the fastest cache for all its looks. Bytes: 4 an entry.

#include <vector>

#include "../math_levels.h"
#include "../ops.h"
#include "block_group.h"
#include "thread_parts.h"

namespace gradcomp::cpu {

void find_levels(Span<const float> flat, OptionalSpan<const float> bounds, OptionalSpan<const int32_t> flag, int64_t form,
                 int64_t group, int64_t count, Span<float> levels, Span<float> cuts, OptionalSpan<int32_t> header,
                 Queue queue) {
  if (header.given()) write_header(flag, header, queue);
  const Groups groups{flat.size, group};
  const auto rule = static_cast<Form>(form);
  const auto find = [&](int64_t begin, int64_t end, auto last) {
    std::vector<float> within(static_cast<size_t>(groups.longest())), magnitudes(within.size());
    for (int64_t g = begin; g < end; ++g) {
      const float* x = flat.data + groups.begin(g);
      const int64_t n = groups.end(g) - groups.begin(g);
      if (bounds.given()) {
        copy_between(x, n, {bounds.data[2 * g], bounds.data[2 * g + 1]}, within.data());
        x = within.data();
      }
      levels_of<decltype(last)::value>(View{x, n, magnitudes.data()}, rule, count, levels.data + g * count, cuts.data[g]);
    }
  };
  with_last(rule, count, [&](auto last) {
    parallel_groups(groups, queue.threads, [&](int64_t begin, int64_t end) { find(begin, end, last); });
  });
}

}  // namespace gradcomp::cpu
