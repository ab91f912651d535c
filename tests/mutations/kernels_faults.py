"""Faults of kernels: ties, tails, arithmetic, packed entries, calls on a GPU."""

from __future__ import annotations

from mutations.fault import Fault

KERNEL_FAULTS = (
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
        "return store_whole(p, four);\n  for (int i = 0; i < 4; ++i) {",
        "return store_whole(p, four);\n  for (int i = 0; i < 2; ++i) {",
        ("test_definitions.py", "test_feedback.py", "test_take.py"),
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
        ("test_feedback.py",),
    ),
    Fault(
        "wrong rounding: bfloat16 rounds away from zero at a tie",
        "csrc",
        "(b + 0x7fffu + ((b >> 16) & 1u)) >> 16",
        "(b + 0x8000u) >> 16",
        ("test_feedback.py",),
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
        ("test_definitions.py",),
    ),
    Fault(
        "momentum is masked where entries had not waited",
        "csrc",
        "if (velocity != nullptr && has_waited(sent_in[entry], step)) velocity[entry] = 0.0f;",
        "if (velocity != nullptr) velocity[entry] = 0.0f;",
        ("test_definitions.py", "test_above.py"),
    ),
    Fault(
        "an entry that is not finite stays in the residual",
        "csrc/cpu",
        "const bool good = is_finite(g[i]);\n    refused |= good ? 0u : 1u;\n    residual[i] = rule",
        "const bool good = !std::isnan(g[i]);\n    refused |= good ? 0u : 1u;\n    residual[i] = rule",
        ("test_definitions.py",),
    ),
    Fault(
        "a velocity overflows",
        "csrc",
        "{ return within_largest(momentum * velocity + fresh * g); }",
        "{ return momentum * velocity + fresh * g; }",
        ("test_definitions.py",),
    ),
    Fault(
        "a layer whose squares overflow sends nothing",
        "csrc",
        "if (!(all.squares < kLargest)) return largest / 2;",
        "",
        ("test_above.py", "test_laws.py"),
    ),
    Fault(
        "momentum adds the old velocity on a GPU",
        "csrc/cuda",
        "to.rule.ahead(g, u)",
        "to.rule.ahead(g, velocity.x[i])",
        ("test_feedback.py",),
    ),
    Fault(
        "a sketch's sign is always plus",
        "csrc",
        "return bits << column_lane & 0x80000000u;",
        "return 0u & column_lane;",
        ("test_sketch.py",),
    ),
    Fault(
        "gradients keep the loss scale on a CPU",
        "csrc/cpu",
        "const float unscale = loss_scale.given() ? 1.0f / loss_scale.data[0] : 1.0f;",
        "const float unscale = 1.0f;",
        ("test_definitions.py",),
    ),
    Fault(
        "gradients keep the loss scale on a GPU",
        "csrc/cuda",
        "(to.loss_scale != nullptr ? 1.0f / to.loss_scale[0] : 1.0f);",
        "1.0f;",
        ("test_definitions.py",),
    ),
    Fault(
        "what a cast to 16 bits leaves out is lost",
        "csrc/cpu",
        "add_if_finite(residual[i], left_out(x[i], delivered[i], back))",
        "add_if_finite(residual[i], 0 * left_out(x[i], delivered[i], back))",
        ("test_delivery.py",),
    ),
    Fault(
        "a failed step is taken back by another scale than it was delivered with",
        "csrc/cuda",
        "const float back = 1.0f / (how.loss_scale != nullptr ? how.scale * how.loss_scale[0] : how.scale);",
        "const float back = 1.0f / how.scale;",
        ("test_delivery.py", "test_definitions.py"),
    ),
    Fault(
        "a bucket whose own exchange failed is taken back, too",
        "csrc/cpu",
        "  if (verdicts.data[bucket] == verdict_of(step, true)) return;\n",
        "",
        ("test_definitions.py",),
    ),
    # --- Packed entries: rounding, and bytes that do harm
    Fault(
        "rounding left out: the compact wire's error is lost instead of waiting",
        "csrc/cpu",
        "values.data[i] - form.value_of(code, exponent)",
        "0 * form.value_of(code, exponent)",
        ("test_packed.py",),
    ),
    Fault(
        "a malformed payload writes outside of the bucket",
        "csrc/cpu",
        "if (!word.sound || at_ + word.count > there_) return false;",
        "if (!word.sound) return false;",
        ("test_packed.py",),
    ),
    Fault(
        "a place beyond its block is not noticed",
        "csrc/cpu",
        "found == word.count || high >= highs",
        "found == word.count || high > 2 * highs",
        ("test_packed.py",),
    ),
    Fault(
        "packed values are a power of two too small at a tie",
        "csrc",
        "(magnitude + 0x400000u) >> 23",
        "(magnitude + 0x3fffffu) >> 23",
        ("test_packed.py",),
    ),
    Fault(
        "settling gives half of it back where the update is not finite",
        "csrc",
        "is_finite(update[0]) ? keep : 1.0f",
        "is_finite(update[0]) ? keep : 0.5f",
        ("test_definitions.py", "test_take.py", "test_packed.py"),
    ),
    Fault(
        "entries that are 0 keep their indices, which may repeat: a GPU adds to one place from two threads",
        "gradcomp/native",
        "torch.where(values != 0, indices, 0).int()",
        "indices.int()",
        ("test_stand_in.py", "test_split.py"),
    ),
    Fault(
        "a step that counts is captured in a CUDA graph",
        "gradcomp/engine",
        "if self.streams.are_captured:",
        "if False:",
        ("test_stand_in.py",),
    ),
)
