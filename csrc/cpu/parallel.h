// Cores and vector units for the CPU twins: parallel() splits a range over threads, HOT compiles a loop for AVX2 beside the
// baseline.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// One function, two machine codes, chosen when the module is loaded: nothing newer than the baseline runs on an older machine.
// Elsewhere (aarch64, other compilers) the baseline's own vector unit is used. Sanitizers cannot run code that early.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#define HOT __attribute__((target_clones("avx2", "default")))
#else
#define HOT
#endif

namespace gradcomp::cpu {

// Threads are started for one call: some 20 us each, so a thread gets at least as much work as hides that.
constexpr int64_t kGrain = int64_t{1} << 18;

// How many parts of n entries are worth a thread each.
inline int parts(int64_t n, int threads) { return static_cast<int>(std::clamp<int64_t>(n / kGrain, 1, std::max(threads, 1))); }

// What loops do at once: it stays in the fastest cache.
constexpr int64_t kBlock = 2048;

// Where part i of count begins; parts meet between blocks, so that no two threads share a block or a cache line.
inline int64_t part_begin(int64_t n, int i, int count) { return i == count ? n : n / count * i / kBlock * kBlock; }

// work(part, begin, end) for every part, the last one on the calling thread.
template <class Work>
void parallel(int64_t n, int count, Work work) {
  std::vector<std::thread> threads;
  for (int i = 0; i + 1 < count; ++i) threads.emplace_back(work, i, part_begin(n, i, count), part_begin(n, i + 1, count));
  work(count - 1, part_begin(n, count - 1, count), n);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace gradcomp::cpu
