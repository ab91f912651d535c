// Count sketches on CPUs. A block of entries stays in the cache while each row adds it up. Bytes: 4 an entry; the table's
// cells come from the second cache, 64 bytes at a time. The processor can foresee neither the next tiles of the table nor the
// next block, so both are prefetched.

#include "../ops.h"
#include "block_sketch.h"

namespace gradcomp::cpu {
namespace {

HOT void add_tiles(const float* x, int64_t count, const Places& places, float scale, float* row) {
  for (int64_t i = 0; i < count; ++i) {
    fetch_ahead(row, places, i);
    const Words bits = Words{} + places.turns[i];
    const uint32_t half = places.turns[i] & 8;
    const float* from = x + i * kSketchTile;
    float* to = row + int64_t{places.columns[i]} * kSketchTile;
    const Floats low = *reinterpret_cast<const Floats*>(from + half),
                 high = *reinterpret_cast<const Floats*>(from + (half ^ 8));
    *reinterpret_cast<Floats*>(to) += scale * with_signs(exchange(low, bits), bits, false);
    *reinterpret_cast<Floats*>(to + 8) += scale * with_signs(exchange(high, bits), bits, true);
  }
}

// Prefetch entries that are added later.
void fetch(const float* begin, const float* end) {
  for (; begin < end; begin += kSketchTile) __builtin_prefetch(begin);
}

}  // namespace

void sketch(Span<const float> flat, int64_t rows, int64_t seed, float scale, Span<float> table, Queue queue) {
  const int64_t n = flat.size, columns = table.size / rows, whole = n / kSketchTile;
  const SketchHash hash(columns, seed);
  std::fill_n(table.data, table.size, 0.0f);
  float last[kSketchTile] = {};
  std::copy(flat.data + whole * kSketchTile, flat.data + n, last);
  const auto work = [&](int64_t row, int64_t last_row) {
    std::vector<Walk> through = walks(hash, row, last_row, 0);
    Places places;
    const int64_t own = last_row - row;
    // Each row fetches its share of the next tiles.
    const auto add = [&](const float* x, int64_t count, int64_t coming) {
      const float* next = x + count * kSketchTile;
      for (int64_t i = 0; i < own; ++i) {
        through[static_cast<size_t>(i)].next(count, places);
        fetch(next + coming * i / own * kSketchTile, next + coming * (i + 1) / own * kSketchTile);
        add_tiles(x, count, places, scale, table.data + (row + i) * columns);
      }
    };
    for (int64_t tile = 0; tile < whole; tile += kBlockTiles) {
      const int64_t count = std::min(kBlockTiles, whole - tile);
      add(flat.data + tile * kSketchTile, count, std::min(kBlockTiles, whole - tile - count));
    }
    if (whole * kSketchTile < n) add(last, 1, 0);
  };
  // A thread has rows of its own.
  const int count = std::min(parts(n, queue.threads), static_cast<int>(rows));
  std::vector<std::thread> threads;
  for (int part = 1; part < count; ++part) threads.emplace_back(work, rows * part / count, rows * (part + 1) / count);
  work(0, rows / count);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace gradcomp::cpu
