"""Faults of kernels: ties, tails, arithmetic, packed entries, calls on a GPU."""

from __future__ import annotations

from mutations.fault import Table

KERNEL_FAULTS: Table = {
    "csrc/cpu": {
        ("test_definitions.py", "test_unused_layers.py"): {
            "a failed step is marked in the bucket's first layer alone, on a CPU": (
                "if (grads.begin[piece] < grads.begin[piece + 1]) write(&mark",
                "if (piece == 0) write(&mark",
            ),
        },
        ("test_take.py",): {
            "tie broken the other way on a CPU: of equals the last ones are taken": (
                (
                    "  for (int64_t j = 0; j < n; ++j) {\n    const int32_t key = list.key(j);\n"
                    "    if (key < rank.key || (key == rank.key && ties-- <= 0)) continue;"
                ),
                (
                    "  for (int64_t j = 0; j < n; ++j) ties -= list.key(j) == rank.key;\n"
                    "  for (int64_t j = 0; j < n; ++j) {\n    const int32_t key = list.key(j);\n"
                    "    if (key < rank.key || (key == rank.key && ties++ < 0)) continue;"
                ),
            ),
        },
        ("test_take.py", "test_above.py"): {
            "off by one in a tail: the bucket's last line is not looked at": (
                "if (whole < lines) marks[whole] = 1;",
                "if (whole < lines) marks[whole] = 0;",
            ),
            "off by one: a shortlist that is full overruns by one line": (
                "if (found_.listed + kLine > space_)",
                "if (found_.listed + kLine > space_ + kLine)",
            ),
        },
        ("test_above.py",): {
            "off by one: an entry at its threshold passes": (
                "found_.wanted += key > bar ? 1 : 0;",
                "found_.wanted += key >= bar ? 1 : 0;",
            ),
        },
        ("test_definitions.py",): {
            "a flag is not passed on by a take": (
                "header.data[0] = static_cast<int32_t>(k);\n  header.data[1] = flag.given() ? flag.data[0] : 0;",
                "header.data[0] = static_cast<int32_t>(k);\n  header.data[1] = 0;",
            ),
            "an entry that is not finite stays in the residual": (
                "const bool good = is_finite(g[i]);",
                "const bool good = !std::isnan(g[i]);",
            ),
        },
        ("test_definitions.py", "test_above.py"): {
            "an entry that a take sends goes on growing older, on a CPU": ("if (ages.given()) ages.data[i] = 0;", ""),
        },
        ("test_packed.py",): {
            "rounding left out: the compact wire's error is lost instead of waiting": (
                "values.data[i] - form.value_of(code, exponent)",
                "0 * form.value_of(code, exponent)",
            ),
            "a malformed payload writes outside of the bucket": (
                "if (!word.sound || at_ + word.count > there_) return false;",
                "if (!word.sound) return false;",
            ),
            "a place beyond its block is not noticed": (
                "found == word.count || high >= highs",
                "found == word.count || high > 2 * highs",
            ),
        },
        ("test_blocks.py",): {
            "two bits of a code change places": (
                "turn_step<4>(turn_step<2>(turn_step<1>(x)))",
                "turn_step<4>(turn_step<2>(x))",
            ),
            "entries between two equal ones count as equal": (
                "if (differs(count - 1)) return false;",
                "if (differs(count - 1)) return false;\n  if (count > 2) return true;",
            ),
            "a group of zeros takes a word": ("depths[g] = empty ? kEmpty : kConstant;", "depths[g] = kConstant;"),
            "a block may read behind its words": (
                "if (!sound || there > form.budget(groups)) return false;",
                "if (!sound) return false;",
            ),
        },
    },
    "csrc/cuda": {
        ("test_definitions.py",): {
            "the next launch's barrier begins with what this one's has left": ("atomicExch(ticket, 0u);", ";"),
            "what a failed exchange has sent is lost on a GPU": ("!is_finite(first)) put_back(own, form);", "false) {}"),
            "an update that a GPU delivers is not wiped": ("if (how.wipes && marked) store", "if (false) store"),
            "a failed step is marked in the bucket's first layer alone, on a GPU": (
                "if (failed && entry == grads.begin[piece])",
                "if (failed && entry == 0)",
            ),
        },
        ("test_take.py",): {
            "a list is longer than its room": ("bool listed = reach <= plan.longest_list;", "bool listed = true;"),
            "tie broken the other way on a GPU: equals beyond the quota are taken": (
                "is_equal && its_equal < quota",
                "is_equal && its_equal <= quota",
            ),
        },
        ("test_definitions.py", "test_gradients.py", "test_take.py"): {
            "off by one in a tail: the last three entries of a bucket are not stored on a GPU": (
                "return store_whole(p, four);\n  for (int i = 0; i < 4; ++i) {",
                "return store_whole(p, four);\n  for (int i = 0; i < 2; ++i) {",
            ),
        },
        ("test_definitions.py", "test_above.py"): {
            "an entry that a take sends goes on growing older, on a GPU": ("if (ages != nullptr) ages[index] = 0;", ""),
        },
        ("test_blocks.py",): {
            "two bits of a code change places on a GPU": (
                "for (unsigned apart = 1; apart < 8; apart *= 2) {\n    const uint32_t low",
                "for (unsigned apart = 2; apart < 8; apart *= 2) {\n    const uint32_t low",
            ),
            "a block may read behind its words on a GPU": (
                "(totals >> 16 * i & 0xffff) <= budget",
                "(totals >> 16 * i & 0xffff) <= 3 * budget",
            ),
        },
    },
    "gradcomp/exchanges": {
        ("test_frozen_by_ranks.py",): {
            "replicas drift apart where one rank has frozen a layer": (
                "differ = ~_agree(acc, received)",
                "differ = ~_agree(acc, ())",
            ),
        },
        ("test_blocks.py",): {
            "a rank's part of an update is the sum of shares": (
                "rounding.add_and_settle(part, [result], world.mean_of_shares, residual, sent[rank], acc.memory)",
                "rounding.add_and_settle(part, [result], world.share, residual, sent[rank], acc.memory)",
            ),
        },
    },
    "csrc": {
        ("test_levels.py", "test_best_levels.py", "test_orq.py"): {
            "a short group's levels begin at the wrong word": ("n % size >= kShortest", "n % size > kShortest"),
        },
        ("test_gradients.py",): {
            "wrong rounding: halves round down at a tie": (
                "(b + 0xfffu + ((b >> 13) & 1u) - 0x38000000u)",
                "(b + 0xfffu - 0x38000000u)",
            ),
            "wrong rounding: bfloat16 rounds away from zero at a tie": (
                "(b + 0x7fffu + ((b >> 16) & 1u)) >> 16",
                "(b + 0x8000u) >> 16",
            ),
        },
        ("test_levels.py",): {
            "biased rounding: a tenth of the draws go down that should go up": (
                "drawn * (high - low) < x - low",
                "drawn * (high - low) < 0.9f * (x - low)",
            ),
        },
        ("test_above.py", "test_gradients.py"): {
            "a merge of moments forgets the distance of the means": (
                "a.squares + b.squares + apart * apart * a.count * share",
                "a.squares + b.squares",
            ),
        },
        ("test_definitions.py",): {
            "a residual overflows": ("return within_largest(factor * residual + added);", "return factor * residual + added;"),
        },
        ("test_above.py", "test_laws.py"): {
            "a layer whose squares overflow sends nothing": ("if (!(all.squares < kLargest)) return largest / 2;", ""),
        },
        ("test_sketch.py",): {
            "a sketch's sign is always plus": ("return bits << column_lane & 0x80000000u;", "return 0u & column_lane;"),
        },
        ("test_packed.py",): {
            "packed values are a power of two too small at a tie": (
                "(magnitude + 0x400000u) >> 23",
                "(magnitude + 0x3fffffu) >> 23",
            ),
        },
        ("test_definitions.py", "test_take.py", "test_packed.py"): {
            "settling gives half of it back where the update is not finite": (
                "is_finite(update[0]) ? keep : 1.0f",
                "is_finite(update[0]) ? keep : 0.5f",
            ),
        },
        ("test_blocks.py",): {
            "a group of blocks gets a bit less for an octave less": (
                "const int width = (height - depth) >> 4;",
                "const int width = (height - depth) >> 3;",
            ),
            "a block leaves its last words unused": ("words_at(height + step) <= budget", "words_at(height + step) < budget"),
            "a block's least scale is not kept apart": (
                "return scale < kLeastScale || depth > kMostDepth",
                "return depth > kMostDepth",
            ),
            "a group far below its block's largest has a depth that stands for equal entries": (
                "depth > kMostDepth ?",
                "depth > kMostDepth + 1 ?",
            ),
            "a scale is the nearest one, and may lie below its group": (
                "(magnitude + 0xfffff) >> 20",
                "(magnitude + 0x80000) >> 20",
            ),
        },
    },
    "gradcomp/native": {
        ("test_stand_in.py", "test_split.py"): {
            "entries that are 0 keep their indices, which may repeat: a GPU adds to one place from two threads": (
                "torch.where(values != 0, indices, 0).int()",
                "indices.int()",
            ),
        },
    },
    "gradcomp/engine": {
        ("test_stand_in.py",): {
            "a step that counts is captured in a CUDA graph": (
                "if self.streams.has_streams and self.streams.are_captured:",
                "if False:",
            ),
        },
    },
    "gradcomp/messages": {
        ("test_blocks.py",): {
            "blocks are not scaled as they are added": (
                "kernels.add_blocks(target, [*map(self._bytes, received)], self.bits, scale)",
                "kernels.add_blocks(target, [*map(self._bytes, received)], self.bits, 1.0)",
            ),
            "a block's flag is not passed on": (
                "kernels.take_blocks(residual, self.bits, own, flag)",
                "kernels.take_blocks(residual, self.bits, own, None)",
            ),
        },
    },
}
