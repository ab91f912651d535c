"""Small faults, each of which some test must find: what a hasty change could break without a word from the compiler."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One small fault: a text that stands once in a folder, and the wrong text in its place.

    tests: the files that are to find it, tried first. A fault that they let pass meets all other tests.
    """

    name: str
    folder: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = (
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
        ("test_feedback.py",),
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
        "biased rounding: draws always go down",
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
        ("test_feedback.py",),
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
        "Nesterov's form reads the old velocity",
        "csrc/cuda",
        "const float sum = run.",
        "if (kWithVelocity && to.ahead_gradient != 0) v = velocity.x[i];\n    const float sum = run.",
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
    # --- Error feedback and what it keeps
    Fault(
        "a residual is dropped: error feedback forgets what it did not send",
        "gradcomp/engine",
        "if not self.feedback:\n",
        "if self.feedback:\n",
        ("test_laws.py",),
    ),
    Fault(
        "a residual is dropped where the update was refused by the tree",
        "gradcomp/exchanges",
        'returned = torch.where(sent, kept_share * taken["values"], taken["values"])',
        'returned = torch.where(sent, kept_share * taken["values"], 0.0)',
        ("test_laws.py", "test_split.py"),
    ),
    Fault(
        "a residual is dropped: entries beyond a part's capacity are lost",
        "gradcomp/exchanges",
        "acc.residual.index_add_(0, dealt.overflow_places, dealt.overflow_values)\n",
        "",
        ("test_split.py", "test_laws.py"),
    ),
    Fault(
        "a residual is dropped: a partition's remainder is not added back",
        "gradcomp/exchanges",
        "parts.add(world.rank, torch.where(failed, 0.0, sums.flat * (1 - kept_share)), acc.residual)",
        "parts.add(world.rank, torch.where(failed, 0.0, 0.0 * sums.flat), acc.residual)",
        ("test_split.py", "test_laws.py"),
    ),
    Fault(
        "clipping is by all ranks, not by a rank's share",
        "gradcomp/engine",
        "self.clip / math.sqrt(ranks)",
        "self.clip",
        ("test_feedback.py", "test_phases.py"),
    ),
    Fault(
        "warm-up counts one stage too few",
        "gradcomp/engine",
        "(int(STAGES * steps / self.warmup) + 1) / (STAGES + 1)",
        "(int(STAGES * steps / self.warmup) + 2) / (STAGES + 1)",
        ("test_feedback.py", "test_phases.py"),
    ),
    Fault(
        "a knob is ignored: masking=false masks all the same",
        "gradcomp/engine",
        "masked = state.velocity if self.masking else None",
        "masked = state.velocity",
        ("test_feedback.py",),
    ),
    Fault(
        "a knob is ignored: a dense flush keeps the velocity",
        "gradcomp/compressors",
        "dense.allreduce(acc, world, state.buffer, kept_share=self.sam, mask=True)",
        "dense.allreduce(acc, world, state.buffer, kept_share=self.sam)",
        ("test_sdagc.py",),
    ),
    # --- Buckets, sessions and states
    Fault(
        "a wrong scale: the mean is delivered whatever the operation",
        "gradcomp/engine",
        "self.scale = scale\n",
        "self.scale = 1.0\n",
        ("test_parameters.py", "test_sets.py"),
    ),
    Fault(
        "an update is not given back: the next one begins with the last one's entries",
        "gradcomp/native",
        "extension.native.wipe(update.flat, update.marks, **extension.queue(update.flat))\n",
        "",
        ("test_memory.py",),
    ),
    Fault(
        "a layer without a gradient keeps its bucket from starting",
        "gradcomp/engine",
        "            if bucket.steps is None:\n                self._start(bucket)",
        "            if bucket.steps is None and bucket.grads:\n                self._start(bucket)",
        ("test_simulate.py",),
    ),
    Fault(
        "a bucket is one layer too large",
        "gradcomp/engine",
        "sizes[index] + 4 * layer.size > limit",
        "sizes[index] > limit",
        ("test_simulate.py", "test_feedback.py"),
    ),
    Fault(
        "a checkpoint leaves the velocity out",
        "gradcomp/engine",
        '*_pairs(reducer, "velocity", state["velocity"])]',
        '*_pairs(reducer, "velocity", state["velocity"])][: len(state["residual"])]',
        ("test_every_spec.py", "test_public.py"),
    ),
    Fault(
        "a state of another format is loaded",
        "gradcomp/engine",
        'if state.get("format") != FORMAT:',
        'if state.get("format") is None:',
        ("test_public.py", "test_every_spec.py"),
    ),
    Fault(
        "a change of spec loses what waits",
        "gradcomp/engine",
        'for array in ("residual", "velocity"):',
        'for array in ("velocity",):',
        ("test_checkpoint.py", "test_every_spec.py"),
    ),
    Fault(
        "ranks do not compare their seeds",
        "gradcomp/engine",
        '"seed": str(self._options.seed),\n',
        "",
        ("test_agreement.py",),
    ),
    Fault(
        "ranks do not meet again after Horovod is initialised anew",
        "gradcomp/engine",
        "return self._met_in is self.network.generation",
        "return self._met_in is not None",
        ("test_agreement.py", "test_parameters.py"),
    ),
    Fault(
        "a channels-last gradient is written to a copy that nobody reads",
        "gradcomp/engine",
        "self.parameter.grad, self._copy = self._reordered(self._copy), None",
        "self._copy = None",
        ("test_models.py", "test_weights.py"),
    ),
    Fault(
        "op=Sum is taken for op=Average",
        "gradcomp/networks",
        'return 1.0 if op == "Average" else float(size)',
        "return 1.0",
        ("test_carrier.py", "test_sets.py", "test_refusals.py"),
    ),
    # --- Ranks and hosts
    Fault(
        "ranks in the wrong order: a gather's parts are turned round",
        "gradcomp/networks",
        "_result(handle).chunk(self.world.size)]",
        "reversed(_result(handle).chunk(self.world.size))]",
        ("test_sets.py", "test_exchanges.py", "test_every_spec.py"),
    ),
    Fault(
        "ranks in the wrong order: sums at a server differ from rank to rank",
        "gradcomp/exchanges",
        "rounding.add(sums, [received[rank] for rank in sorted(received)], 1.0)",
        "rounding.add(sums, [received[rank] for rank in received], 0.5)",
        ("test_orq.py", "test_laws.py"),
    ),
    Fault(
        "by_host divides by the wrong number of ranks",
        "gradcomp/engine",
        ".div_(len(position.neighbours))",
        ".div_(len(position.peers))",
        ("test_by_host.py", "test_feedback.py", "test_laws.py"),
    ),
    Fault(
        "by_host takes a part twice",
        "gradcomp/engine",
        "state.slice(acc.residual, part).zero_()\n",
        "pass\n",
        ("test_by_host.py", "test_feedback.py", "test_laws.py"),
    ),
    # --- Algorithms
    Fault(
        "SDAGC counts capacity one step too early",
        "gradcomp/compressors",
        "if len(self._counts) < DELAY:\n            return\n        wanted",
        "if len(self._counts) < DELAY - 1:\n            return\n        wanted",
        ("test_sdagc.py",),
    ),
    Fault(
        "SDAGC rescales the wrong way when the learning rate changes",
        "gradcomp/compressors",
        'factor = old / new if revision == "keep" else new / old',
        "factor = new / old",
        ("test_sdagc.py",),
    ),
    Fault(
        "SDAGC's ages are off by one",
        "gradcomp/compressors",
        "self.last_sent[places] = step",
        "self.last_sent[places] = step - 1",
        ("test_sdagc.py",),
    ),
    Fault(
        "gs-SGD sends estimates for exact values",
        "gradcomp/exchanges",
        "error = torch.zeros_like(values) if exact else",
        "error = torch.zeros_like(values) if not exact else",
        ("test_gs_sgd.py", "test_sketched_sgd.py"),
    ),
    Fault(
        "gTop-k's merge drops the wrong one of two equal sums",
        "gradcomp/exchanges",
        "repeated[1:] = indices[1:] == indices[:-1]",
        "repeated[:-1] = indices[1:] == indices[:-1]",
        ("test_gtopk.py",),
    ),
    Fault(
        "ORQ draws alike on all ranks",
        "gradcomp/exchanges",
        "(rank * 0x9E3779B1 + part & 0xFFFFFFFF)",
        "(part & 0xFFFFFFFF)",
        ("test_orq.py", "test_bingrad.py"),
    ),
    Fault(
        "ORQ draws alike in every step",
        "gradcomp/exchanges",
        "(self.seed * 1_000_003 + self.steps & 0x7FFFFFFF)",
        "(self.seed * 1_000_003 & 0x7FFFFFFF)",
        ("test_orq.py", "test_bingrad.py"),
    ),
    Fault(
        "places are packed one bit short",
        "gradcomp/messages",
        "return k + (max(n - 1, 0) >> low) + 1",
        "return k + (max(n - 1, 0) >> low)",
        ("test_coding.py", "test_lgc.py"),
    ),
    Fault(
        "LGC never finds that its codes are off",
        "gradcomp/compressors",
        "if sum(self._bad_steps) <= MOST_BAD_STEPS:",
        "if sum(self._bad_steps) >= 0:",
        ("test_phases.py",),
    ),
    Fault(
        "LGC leaves nothing of what its code misses",
        "gradcomp/compressors",
        "return SharedMean(mean, entries.values - own)",
        "return SharedMean(mean, 0.0 * own)",
        ("test_lgc.py", "test_laws.py"),
    ),
    Fault(
        "a spec's knob is parsed and forgotten",
        "gradcomp",
        "return _wrap(kind(**settings), wrapper_settings)",
        "return _wrap(kind(**settings), {})",
        ("test_knobs.py",),
    ),
)
