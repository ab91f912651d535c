// Threads for groups: each takes some of them, one after the other.
#pragma once

#include "../rounding.h"
#include "parallel.h"

namespace gradcomp::cpu {

// work(begin, end) for all groups.
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
