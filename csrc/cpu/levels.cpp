// The levels of each group, on CPUs. A group stays in the fastest cache while it is looked through as often as its form needs.
// Bytes: 4 an entry.

#include "../levels.h"

#include <vector>

#include "../ops.h"
#include "groups.h"
#include "view.h"

namespace gradcomp::cpu {

void find_levels(Span<const float> value, Span<const float> bounds, int64_t form, int64_t group, int64_t count,
                 Span<float> levels, Span<float> cuts, Queue queue) {
  const Groups groups{value.size, group};
  parallel_groups(groups, queue.threads, [&](int64_t begin, int64_t end) {
    std::vector<float> within(static_cast<size_t>(groups.longest())), room(within.size());
    for (int64_t g = begin; g < end; ++g) {
      const float* x = value.data + groups.begin(g);
      const int64_t n = groups.end(g) - groups.begin(g);
      if (bounds.given()) {
        copy_between(x, n, {bounds.data[2 * g], bounds.data[2 * g + 1]}, within.data());
        x = within.data();
      }
      levels_of(View{x, n, room.data()}, static_cast<Form>(form), count, levels.data + g * count, cuts.data[g]);
    }
  });
}

}  // namespace gradcomp::cpu
