// Threads for the CPU twins: parallel() splits a range of entries among them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

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

}  // namespace gradcomp::cpu
