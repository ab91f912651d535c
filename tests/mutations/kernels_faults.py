"""Faults of kernels: ordering between threads, ties, tails, arithmetic."""

from __future__ import annotations

from mutations.fault import Fault

KERNEL_FAULTS = (
    # --- Ordering between the threads of a kernel
    Fault(
        "barrier removed: a scan's sums are read before all warps have written them",
        "csrc/cuda",
        "warp_sums[warp] = inclusive;\n  __syncthreads();",
        "warp_sums[warp] = inclusive;",
        ("test_take.py", "test_simt.py"),
    ),
    Fault(
        "barrier removed: the next scan overwrites sums that are still read",
        "csrc/cuda",
        "  __syncthreads();  // the next call writes warp_sums\n",
        "",
        ("test_simt.py",),
    ),
    Fault(
        "barrier removed: the picked digit is read before it is written",
        "csrc/cuda",
        "    above += mine[i];\n  }\n  __syncthreads();",
        "    above += mine[i];\n  }",
        ("test_simt.py",),
    ),
    Fault(
        "barrier removed: a ticket is taken before all threads have fenced",
        "csrc/cuda",
        "  __threadfence();\n  __syncthreads();\n  if (threadIdx.x == 0) place",
        "  __threadfence();\n  if (threadIdx.x == 0) place",
        ("test_simt.py", "test_take.py"),
    ),
    Fault(
        "barrier removed: the ticket is read before it is drawn",
        "csrc/cuda",
        "place = TAKE_TICKET(ticket);\n  __syncthreads();",
        "place = TAKE_TICKET(ticket);",
        ("test_take.py", "test_above.py"),
    ),
    Fault(
        "barrier removed: a histogram is counted into before it is cleared",
        "csrc/cuda",
        "counts[digit] = 0;\n  __syncthreads();",
        "counts[digit] = 0;",
        ("test_take.py", "test_above.py", "test_sketch.py"),
    ),
    Fault(
        "barrier removed: a histogram is added up before it is complete",
        "csrc/cuda",
        "uint32_t* all) {\n  __syncthreads();",
        "uint32_t* all) {",
        ("test_take.py", "test_above.py", "test_sketch.py"),
    ),
    Fault(
        "barrier removed: statistics of warps are joined before all are there",
        "csrc/cuda",
        "of_warps[threadIdx.x / kWarp] = mine;\n  __syncthreads();",
        "of_warps[threadIdx.x / kWarp] = mine;",
        ("test_above.py",),
    ),
    Fault(
        "barrier removed: a block's largest entry is used before all warps have named theirs",
        "csrc/cuda",
        "atomicMax(&largest, x);\n  __syncthreads();",
        "atomicMax(&largest, x);",
        ("test_packed.py",),
    ),
    Fault(
        "fence removed: results are published before they are visible",
        "csrc/cuda",
        "  __threadfence();\n  __syncthreads();\n  if (threadIdx.x == 0) place",
        "  __syncthreads();\n  if (threadIdx.x == 0) place",
        ("test_take.py", "test_simt.py"),
    ),
    Fault(
        "fence removed: the last block reads before it knows what the others wrote",
        "csrc/cuda",
        "  __syncthreads();\n  __threadfence();\n  return place",
        "  __syncthreads();\n  return place",
        ("test_take.py", "test_simt.py"),
    ),
    # --- Ties, tails and bounds of kernels
    Fault(
        "tie broken the other way on a CPU: of equals the last ones are taken",
        "csrc/cpu",
        "  for (int64_t j = 0; j < n; ++j) {\n    const int32_t key = list.key(j);\n"
        "    if (key < rank.key || (key == rank.key && ties-- <= 0)) continue;",
        "  for (int64_t j = 0; j < n; ++j) ties -= list.key(j) == rank.key;\n"
        "  for (int64_t j = 0; j < n; ++j) {\n    const int32_t key = list.key(j);\n"
        "    if (key < rank.key || (key == rank.key && ties++ < 0)) continue;",
        ("test_take.py",),
    ),
    Fault(
        "tie broken the other way on a GPU: equals beyond the quota are taken",
        "csrc/cuda",
        "its != 0 && equal < quota",
        "its != 0 && equal <= quota",
        ("test_take.py",),
    ),
    Fault(
        "off by one in a tail: the bucket's last line is not looked at",
        "csrc/cpu",
        "if (whole < lines) marks[whole] = 1;",
        "if (whole < lines) marks[whole] = 0;",
        ("test_take.py", "test_above.py"),
    ),
    Fault(
        "off by one in a tail: the last three entries of a bucket are not stored on a GPU",
        "csrc/cuda",
        "make_float4(four.x[0], four.x[1], four.x[2], four.x[3]);\n    return;\n  }\n  for (int i = 0; i < 4; ++i) {",
        "make_float4(four.x[0], four.x[1], four.x[2], four.x[3]);\n    return;\n  }\n  for (int i = 0; i < 2; ++i) {",
        ("test_feedback.py", "test_take.py"),
    ),
    Fault(
        "off by one: a shortlist that is full overruns by one line",
        "csrc/cpu",
        "if (found_.listed + kLine > space_)",
        "if (found_.listed + kLine > space_ + kLine)",
        ("test_take.py", "test_above.py"),
    ),
    Fault(
        "off by one: an entry at its threshold passes",
        "csrc/cpu",
        "found_.wanted += key > bar ? 1 : 0;",
        "found_.wanted += key >= bar ? 1 : 0;",
        ("test_above.py",),
    ),
    Fault(
        "a short group's levels begin at the wrong word",
        "csrc",
        "n % size >= kShortest",
        "n % size > kShortest",
        ("test_levels.py", "test_best_levels.py", "test_orq.py"),
    ),
    # --- Arithmetic of kernels
    Fault(
        "wrong rounding: halves round down at a tie",
        "csrc",
        "(b + 0xfffu + ((b >> 13) & 1u) - 0x38000000u)",
        "(b + 0xfffu - 0x38000000u)",
        ("test_packed.py", "test_feedback.py"),
    ),
    Fault(
        "wrong rounding: bfloat16 rounds away from zero at a tie",
        "csrc",
        "(b + 0x7fffu + ((b >> 16) & 1u)) >> 16",
        "(b + 0x8000u) >> 16",
        ("test_feedback.py",),
    ),
    Fault(
        "rounding left out: the compact wire's error is lost instead of waiting",
        "csrc/cpu",
        "values.data[i] - entry_value(entries.data[i], exponent)",
        "0 * entry_value(entries.data[i], exponent)",
        ("test_packed.py",),
    ),
    Fault(
        "biased rounding: a tenth of the draws go down that should go up",
        "csrc",
        "drawn * (high - low) < x - low",
        "drawn * (high - low) < 0.9f * (x - low)",
        ("test_levels.py",),
    ),
    Fault(
        "a merge of moments forgets the distance of the means",
        "csrc",
        "a.squares + b.squares + apart * apart * a.count * share",
        "a.squares + b.squares",
        ("test_above.py", "test_feedback.py"),
    ),
    Fault(
        "a flag is not passed on by a take",
        "csrc/cpu",
        "header.data[0] = static_cast<int32_t>(k);\n  header.data[1] = flag.given() ? flag.data[0] : 0;",
        "header.data[0] = static_cast<int32_t>(k);\n  header.data[1] = 0;",
        ("test_take.py",),
    ),
    Fault(
        "momentum is not masked where entries are taken",
        "csrc/cpu",
        "if (velocity.given()) velocity.data[i] = 0.0f;",
        "",
        ("test_take.py", "test_above.py"),
    ),
    Fault(
        "an entry that is not finite stays in the residual",
        "csrc/cpu",
        "const bool good = is_finite(sum);",
        "const bool good = !std::isnan(sum);",
        ("test_feedback.py",),
    ),
    Fault(
        "momentum adds the old velocity on a GPU",
        "csrc/cuda",
        "to.ahead_gradient * g + to.ahead_velocity * v : g",
        "to.ahead_gradient * g + to.ahead_velocity * velocity.x[i] : g",
        ("test_feedback.py",),
    ),
    Fault(
        "a malformed payload writes outside of the bucket",
        "csrc/cpu",
        "if (!word.sound || at + word.count > there) return false;",
        "if (!word.sound) return false;",
        ("test_packed.py",),
    ),
    Fault(
        "settling gives half of it back where the update is not finite",
        "csrc",
        "is_finite(update[0]) ? keep : 1.0f",
        "is_finite(update[0]) ? keep : 0.5f",
        ("test_take.py", "test_packed.py"),
    ),
    Fault(
        "a sketch's sign is always plus",
        "csrc",
        "return bits << column_lane & 0x80000000u;",
        "return 0u & column_lane;",
        ("test_sketch.py",),
    ),
)
