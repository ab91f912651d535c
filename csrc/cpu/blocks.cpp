// Rounding to a block's budget of bits, and adding up, on CPUs. A block stays in the fastest cache. Bytes an entry, with a word
// for every 32 / bits entries beside them: take_blocks 8, add_blocks 8, read_blocks 4, or 2 into halves.

#include <algorithm>
#include <atomic>

#include "../math_blocks.h"
#include "../math_payload.h"
#include "../ops.h"
#include "block_pieces.h"
#include "entry_add.h"
#include "lane_hot.h"
#include "lane_vectors.h"
#include "thread_parts.h"

namespace gradcomp::cpu {
namespace {

using Integers = int32_t __attribute__((vector_size(32), may_alias));

// A group's 32 entries, in vectors.
struct Group {
  Floats x[4];
};

INLINE Group load_group(const float* from) {
  Group group;
  for (int i = 0; i < 4; ++i) group.x[i] = *reinterpret_cast<const Floats*>(from + 8 * i);
  return group;
}
INLINE void store_group(float* to, const Group& group) {
  for (int i = 0; i < 4; ++i) *reinterpret_cast<Floats*>(to + 8 * i) = group.x[i];
}

// One of three steps that turn 8 x 8 bits, in each byte of eight words: a bit changes places with the one `apart` words below
// and `apart` bits above it.
template <int apart>
INLINE Words turn_step(const Words& x) {
  constexpr uint32_t kLow = apart == 1 ? 0x55555555 : apart == 2 ? 0x33333333 : 0x0f0f0f0f;
  constexpr Words kUpper = (kLanes & apart) / apart, kStay = kLow ^ -kUpper;
  const Words other = reinterpret_cast<Words>(chosen(reinterpret_cast<Floats>(x), kLanes ^ apart));
  return (x & kStay) | (other << (1 - kUpper) * apart >> kUpper * apart & ~kStay);
}

// Turn codes, entry 8 i + j's in byte i of word j, into one word for each of their bits, with entry e's in bit e. And back.
INLINE Words turned(const Words& x) { return turn_step<4>(turn_step<2>(turn_step<1>(x))); }

INLINE uint32_t largest_of(Words x) {
#pragma GCC unroll 3
  for (uint32_t apart = 4; apart > 0; apart /= 2) {
    const Words other = reinterpret_cast<Words>(chosen(reinterpret_cast<Floats>(x), kLanes ^ apart));
    x = other > x ? other : x;
  }
  return x[0];
}

// Find the largest magnitude of each group.
HOT void measure(const float* x, int64_t groups, uint32_t* largest) {
  for (int64_t g = 0; g < groups; ++g) {
    Words most = {};
    for (const Floats& its : load_group(x + g * Blocks::kGroup).x) {
      const Words magnitude = reinterpret_cast<Words>(its) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
    largest[g] = largest_of(most);
  }
}

bool all_equal(const float* x, int64_t count) {
  const auto differs = [&](int64_t i) { return bits_of(x[i]) != bits_of(x[0]); };
  if (differs(count - 1)) return false;  // most groups end here
  for (int64_t i = 1; i + 1 < count; ++i) {
    if (differs(i)) return false;
  }
  return true;
}

// Count the words of groups at their depths, which are none of the marks.
HOT int64_t count_words(const int16_t* depths, int64_t count, int height) {
  int words = 0;
  for (int64_t i = 0; i < count; ++i) words += scaled_width(height, depths[i]);
  return words;
}

// Round groups, one after the other: words <- their codes, x <- the rounding errors.
HOT void round_groups(float* x, int64_t groups, uint32_t top, int height, const uint8_t* depths, uint32_t* words,
                      const uint32_t* end) {
  for (int64_t g = 0; g < groups; ++g, x += Blocks::kGroup) {
    const int depth = depths[g], width = width_of(height, depth);
    if (depth == kEmpty) continue;
    Group group = load_group(x);
    if (depth == kConstant) {
      *words++ = bits_of(x[0]);
      store_group(x, {});
      continue;
    }
    const EvenLevels levels(top - static_cast<uint32_t>(depth), width);
    const Floats most = in_all_lanes(static_cast<float>(levels.top)), rounding = most + kRounding;
    Words codes = {};
    for (int i = 0; i < 4; ++i) {
      Floats number = group.x[i] * levels.per_step;
      number = number > most ? most : number;
      number = number < -most ? -most : number;
      const Floats sum = number + rounding;
      codes |= (reinterpret_cast<Words>(sum) - bits_of(kRounding)) << (8 * i);
      group.x[i] -= (sum - rounding) * levels.step;
    }
    store_group(x, group);
    const Words planes = turned(codes);
    if (end - words >= 8) {  // zeros behind the own words, where the next ones come
      *reinterpret_cast<Unaligned*>(words) = planes;
    } else {
      memcpy(words, &planes, sizeof(uint32_t) * static_cast<size_t>(width));
    }
    words += width;
  }
}

// Read a group that is neither constant nor empty, and move on to the next one's words.
INLINE Group read_group(const uint32_t*& words, const uint32_t* end, uint32_t scale, int width) {
  Words planes = {};
  if (end - words >= 8) {  // and words of the next groups, for bits that are masked out
    planes = *reinterpret_cast<const Unaligned*>(words);
  } else {
    memcpy(&planes, words, sizeof(uint32_t) * static_cast<size_t>(width));
  }
  words += width;
  const EvenLevels levels(scale, width);
  const Words codes = turned(planes);
  const uint32_t mask = (1u << width) - 1;
  Group group;
  for (int i = 0; i < 4; ++i) {
    const Integers number = reinterpret_cast<Integers>(codes >> (8 * i) & mask) - levels.top;
    group.x[i] = __builtin_convertvector(number, Floats) * levels.step;
  }
  return group;
}

// Add scale times the entries of groups.
HOT void add_groups(float* target, int64_t groups, uint32_t top, int height, const uint8_t* depths, const uint32_t* words,
                    const uint32_t* end, float scale) {
  for (int64_t g = 0; g < groups; ++g, target += Blocks::kGroup) {
    const int depth = depths[g], width = width_of(height, depth);
    if (depth == kEmpty) continue;
    Group group = load_group(target);
    if (depth == kConstant) {
      const float value = scale * float_of(*words++);
      for (Floats& its : group.x) its += value;
    } else {
      const Group read = read_group(words, end, top - static_cast<uint32_t>(depth), width);
      for (int i = 0; i < 4; ++i) group.x[i] += scale * read.x[i];
    }
    store_group(target, group);
  }
}

// Write the entries of groups as bfloat16, straight from the vectors.
HOT void write_groups(uint16_t* to, int64_t groups, uint32_t top, int height, const uint8_t* depths, const uint32_t* words,
                      const uint32_t* end) {
  using Halves = uint16_t __attribute__((vector_size(16), aligned(2), may_alias));
  for (int64_t g = 0; g < groups; ++g, to += Blocks::kGroup) {
    const int depth = depths[g], width = width_of(height, depth);
    if (depth >= kConstant) {
      std::fill_n(to, Blocks::kGroup, depth == kEmpty ? uint16_t{0} : float_to_bf16(0.0f + float_of(*words++)));
      continue;
    }
    const Group read = read_group(words, end, top - static_cast<uint32_t>(depth), width);
    for (int i = 0; i < 4; ++i) {  // all are finite
      const Words bits = reinterpret_cast<Words>(read.x[i]);
      *reinterpret_cast<Halves*>(to + 8 * i) = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
    }
  }
}

// Call use(x) for a block's entries, with zeros behind the last one that fill up its group.
template <class Use>
void with_groups(float* x, int64_t entries, const Use& use) {
  if (entries % Blocks::kGroup == 0) return use(x);
  float whole[Blocks::kEntries];
  std::copy_n(x, entries, whole);
  std::fill(whole + entries, whole + Blocks::groups_of(entries) * Blocks::kGroup, 0.0f);
  use(whole);
  std::copy_n(whole, entries, x);
}

void take_block(float* x, const Blocks& form, int64_t entries, uint32_t* words) {
  const int64_t groups = Blocks::groups_of(entries), budget = form.budget(groups);
  std::fill_n(words, form.words_of(groups), 0u);
  auto* const depths = reinterpret_cast<uint8_t*>(words + 1);
  std::fill_n(depths, (groups + 3) / 4 * 4, uint8_t{kEmpty});
  with_groups(x, entries, [&](float* whole) {
    uint32_t scales[Blocks::kGroups], top = 0;
    measure(whole, groups, scales);
    int64_t constant = 0, scaled = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const bool empty = scales[g] == 0;
      scales[g] = scale_above(scales[g]);
      if (scales[g] != kInfiniteScale &&
          all_equal(whole + g * Blocks::kGroup, std::min(Blocks::kGroup, entries - g * Blocks::kGroup))) {
        depths[g] = empty ? kEmpty : kConstant;
        constant += !empty;
      } else {
        depths[g] = 0;
        top = std::max(top, scales[g]);
      }
    }
    words[0] = block_head(top, 0);
    if (top == kInfiniteScale) {
      std::fill_n(depths, groups, uint8_t{kEmpty});
      return;
    }
    int16_t within[Blocks::kGroups];
    for (int64_t g = 0; g < groups; ++g) {
      if (depths[g] != 0) continue;
      const int depth = depth_of(scales[g], top);
      depths[g] = static_cast<uint8_t>(depth);
      if (depth != kEmpty) within[scaled++] = static_cast<int16_t>(depth);
    }
    const int height = height_within(budget - constant, [&](int at) { return count_words(within, scaled, at); });
    words[0] = block_head(top, height);
    round_groups(whole, groups, top, height, depths, words + Blocks::codes_at(groups), words + form.words_of(groups));
  });
}

// Call use(groups, top, height, depths, words, end) with a block's groups. Returns false, and does not, for a block that is
// malformed, or whose sender had an entry that is not finite.
template <class Use>
bool with_sound(const Blocks& form, int64_t entries, const uint32_t* words, const Use& use) {
  const int64_t groups = Blocks::groups_of(entries);
  const uint32_t top = top_of(words[0]);
  const int height = height_of(words[0]);
  const auto* const depths = reinterpret_cast<const uint8_t*>(words + 1);
  if (top >= kInfiniteScale) return false;
  int64_t there = 0;
  bool sound = true;
  for (int64_t g = 0; g < groups; ++g) {
    there += width_of(height, depths[g]);
    sound &= depths[g] >= kConstant || depths[g] + kLeastScale <= top;
  }
  if (!sound || there > form.budget(groups)) return false;
  use(groups, top, height, depths, words + Blocks::codes_at(groups), words + form.words_of(groups));
  return true;
}

bool add_block(float* target, const Blocks& form, int64_t entries, const uint32_t* words, float scale) {
  return with_sound(form, entries, words, [&](auto... block) {
    with_groups(target, entries, [&](float* whole) { add_groups(whole, block..., scale); });
  });
}

// Write a block into the pieces that hold it.
void read_block(const Pieces& to, const Blocks& form, int64_t block, const uint32_t* words, bool flagged) {
  const int64_t begin = form.begin(block), entries = form.entries(block);
  const int piece = static_cast<int>(std::upper_bound(to.begin, to.begin + to.count + 1, begin) - to.begin) - 1;
  if (to.dtype[piece] == Dtype::bf16 && begin + Blocks::kEntries <= to.begin[piece + 1] && !flagged) {
    auto* const halves = static_cast<uint16_t*>(to.data[piece]) + (begin - to.begin[piece]);
    if (with_sound(form, entries, words, [&](auto... its) { write_groups(halves, its...); })) return;
  }
  float x[Blocks::kEntries] = {};
  if (!add_block(x, form, entries, words, 1) || flagged) x[0] = not_a_number();
  blocks(to, begin, begin + entries,
         [&](int its, int64_t offset, int64_t at, int64_t count) { write(x + at - begin, to, its, offset, count, 1); });
}

// Call work(block) for every block, on some threads.
template <class Work>
void for_blocks(int64_t n, int threads, const Work& work) {
  parallel(n, parts(n, threads), [&](int, int64_t begin, int64_t end) {
    const auto block_from = [](int64_t entry) { return (entry + Blocks::kEntries - 1) / Blocks::kEntries; };
    for (int64_t block = block_from(begin); block < block_from(end); ++block) work(block);
  });
}

// Add scale times the entries of payloads, rank by rank. Returns false if a block is not sound.
bool add_all(Span<float> target, const Spans<const uint8_t>& payloads, int64_t bits, float scale, Queue queue) {
  const Blocks form{target.size, bits};
  std::atomic<bool> sound{true};
  for_blocks(form.n, queue.threads, [&](int64_t block) {
    for (int rank = 0; rank < payloads.count; ++rank) {
      const auto* const words = reinterpret_cast<const uint32_t*>(payloads.data[rank] + kHeaderBytes) + form.at(block);
      if (!add_block(target.data + form.begin(block), form, form.entries(block), words, scale)) sound = false;
    }
  });
  return sound;
}

}  // namespace

void take_blocks(Span<float> residual, OptionalSpan<const int32_t> flag, int64_t bits, Span<uint8_t> payload, Queue queue) {
  const Blocks form{residual.size, bits};
  write_header(flag, {reinterpret_cast<int32_t*>(payload.data), 2}, queue);
  auto* const words = reinterpret_cast<uint32_t*>(payload.data + kHeaderBytes);
  std::fill(payload.data + kHeaderBytes + 4 * form.words(), payload.data + payload.size, uint8_t{0});
  for_blocks(form.n, queue.threads, [&](int64_t block) {
    take_block(residual.data + form.begin(block), form, form.entries(block), words + form.at(block));
  });
}

void add_blocks(Span<float> target, const Spans<const uint8_t>& payloads, int64_t bits, float scale, Queue queue) {
  bool sound = add_all(target, payloads, bits, scale, queue);
  for (int rank = 0; rank < payloads.count; ++rank) {
    sound &= reinterpret_cast<const int32_t*>(payloads.data[rank])[1] == 0;
  }
  if (!sound) spoil(target, {});
}

void read_blocks(Span<const uint8_t> payload, int64_t bits, const Pieces& to, Queue queue) {
  const Blocks form{to.size(), bits};
  const bool flagged = reinterpret_cast<const int32_t*>(payload.data)[1] != 0;
  const auto* const words = reinterpret_cast<const uint32_t*>(payload.data + kHeaderBytes);
  for_blocks(form.n, queue.threads, [&](int64_t block) { read_block(to, form, block, words + form.at(block), flagged); });
}

void settle_blocks(Span<float> residual, Span<const uint8_t> own, int64_t bits, Span<const float> update, Queue queue) {
  if (!is_finite(update.data[0])) add_all(residual, Spans(own), bits, 1, queue);
}

void add_and_settle_blocks(Span<float> target, const Spans<const uint8_t>& payloads, int64_t bits, float scale,
                           Span<float> residual, Span<const uint8_t> own, Span<uint32_t>, Queue queue) {
  add_blocks(target, payloads, bits, scale, queue);
  settle_blocks(residual, own, bits, {target.data, target.size}, queue);
}

}  // namespace gradcomp::cpu
