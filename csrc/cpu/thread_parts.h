// Threads for the CPU twins: parallel() splits a range of entries among them, parallel_groups() groups of levels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "../math_rounding.h"

namespace gradcomp::cpu {

// Entries that a thread gets at least. A thread is started for one call, which must cost little beside its work.
constexpr int64_t kGrain = int64_t{1} << 18;

// Count the parts of n entries that are worth a thread each.
inline int parts(int64_t n, int threads) { return static_cast<int>(std::clamp<int64_t>(n / kGrain, 1, std::max(threads, 1))); }

// Entries that a loop handles at once, so that they stay in the fastest cache.
constexpr int64_t kBlock = 2048;

// The begin of part i of count. Parts meet between blocks, so that no two threads share a block or a cache line.
inline int64_t part_begin(int64_t n, int i, int count) { return i == count ? n : n / count * i / kBlock * kBlock; }

// Call work(part, begin, end) for every part, the last one on the calling thread.
template <class Work>
void parallel(int64_t n, int count, Work work) {
  std::vector<std::thread> threads;
  for (int i = 0; i + 1 < count; ++i) threads.emplace_back(work, i, part_begin(n, i, count), part_begin(n, i + 1, count));
  work(count - 1, part_begin(n, count - 1, count), n);
  for (std::thread& thread : threads) thread.join();
}

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
