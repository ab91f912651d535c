// Threads for groups: parallel_groups() deals out the groups among them.
#pragma once

#include "../math_rounding.h"
#include "thread_parts.h"

namespace gradcomp::cpu {

// Call work(begin, end) for a share of the groups on every thread.
template <class Work>
void parallel_groups(const Groups& groups, int threads, const Work& work) {
  const int64_t all = groups.count();
  const int count = static_cast<int>(std::min<int64_t>(parts(groups.n, threads), all));
  std::vector<std::thread> others;
  for (int i = 1; i < count; ++i) others.emplace_back(work, all * i / count, all * (i + 1) / count);
  work(0, all / count);
  for (std::thread& thread : others) thread.join();
}

}  // namespace gradcomp::cpu
