"""Faults of the package: residuals, saved states, ranks, the algorithms, and momentum."""

from __future__ import annotations

from mutations.fault import Table

PACKAGE_FAULTS: Table = {
    "gradcomp/engine": {
        ("test_laws.py",): {
            "a residual is dropped: error feedback forgets what it did not send": (
                "residual_factor=self.decay",
                "residual_factor=0.0",
            ),
        },
        ("test_feedback.py", "test_phases.py"): {
            "clipping is by all ranks, not by a rank's share": (
                "self.clip / math.sqrt(world.size)",
                "self.clip",
            ),
            "warm-up counts one stage too many": (
                "(int(STAGES * steps / self.warmup) + 1) / (STAGES + 1)",
                "(int(STAGES * steps / self.warmup) + 2) / (STAGES + 1)",
            ),
        },
        ("test_carrier_value.py", "test_ways.py"): {
            "a wrong scale: the mean is delivered whatever the operation": (
                "self._deliver(bucket, self._arrays(bucket), end.value, self.context.scale)",
                "self._deliver(bucket, self._arrays(bucket), end.value, 1.0)",
            ),
        },
        ("test_simulate.py",): {
            "a layer without a gradient keeps its bucket from starting": (
                "            if not bucket.has_started:\n                self._start(bucket)",
                "            if not bucket.has_started and bucket.grads:\n                self._start(bucket)",
            ),
        },
        ("test_plan.py", "test_simulate.py", "test_feedback.py"): {
            "a bucket is one layer too large": ("sizes[index] + layer.size > most", "sizes[index] > most"),
        },
        ("test_laws_of_updates.py", "test_every_spec.py"): {
            "a checkpoint leaves the ages out": (
                '({} if self.ages is None else {"ages": self.ages})',
                "{}",
            ),
        },
        ("test_state.py",): {
            "a state of another format is loaded": (
                '        if not isinstance(found := state.get("format", 1), int) or not OLDEST <= found <= FORMAT:',
                '        if not isinstance(found := state.get("format", 1), int) or found == 1:',
            ),
        },
        ("test_state.py", "test_every_spec.py"): {
            "a change of spec loses what waits": (
                "            bucket.progress.load([before], 1.0)()\n",
                "            pass\n",
            ),
        },
        ("test_agreement.py",): {
            "ranks do not compare their seeds": ('"seed": str(self.seed), ', ""),
        },
        ("test_agreement.py", "test_slots.py"): {
            "ranks do not meet again after Horovod is initialised anew": (
                "return self.membership.met_in is self.network.generation",
                "return self.membership.met_in is not None",
            ),
        },
        ("test_odd_models.py", "test_ways.py"): {
            "a channels-last gradient is written to a copy that nobody reads": (
                "self.parameter.grad, self.copy = self._reordered(self.copy), None",
                "self.copy = None",
            ),
        },
        ("test_health.py",): {},
        ("test_membership.py",): {
            "what waits is not scaled to a new number of ranks": (
                "if self.owner.scaled_for not in (0, size) and not sums:",
                "if self.owner.scaled_for not in (0, size) and sums:",
            ),
            "a rank that joins keeps what its script has loaded": ("state.scale_state(self.reducer, 0.0)", "pass"),
            "a rank that is ahead stays ahead": ('if each.share["steps"] == steps and', 'if each.share["steps"] > steps and'),
        },
        ("test_membership.py", "test_failures.py"): {
            "a failed step is forgotten at once": (
                "here if found is Phase.EXCHANGING or found is Phase.FAILED else None",
                "here if found is Phase.EXCHANGING else None",
            ),
        },
        ("test_session.py",): {
            "a failed step is taken back by another scale than it was delivered with": (".float() / scale", ".float()"),
        },
        ("test_laws.py", "test_session.py"): {
            "a step that failed in one bucket is lost in the others": ("        if self._takes_back:\n", "        if False:\n"),
            "a bucket whose own exchange failed is taken back, too": (
                "if bucket.progress is not None and not bool(arrays[0].view(-1)[0].isnan()):",
                "if bucket.progress is not None:",
            ),
        },
        ("test_adam_noise.py",): {
            "a gradient that is not finite spoils what is known of the ranks' noise": (
                "torch.where(found.isfinite().all(), KEPT * self.sums + found, self.sums)",
                "KEPT * self.sums + found",
            ),
        },
        ("test_frozen.py",): {
            "what waits of a frozen layer moves it": (
                "if each.parameter is not None and not each.parameter.requires_grad]",
                "if False]",
            ),
        },
    },
    "gradcomp/exchanges": {
        ("test_laws.py", "test_split.py"): {
            "a residual is dropped where the update was refused by the tree": (
                "returned = torch.where(sent, kept_share * taken.values, taken.values)",
                "returned = torch.where(sent, kept_share * taken.values, 0.0)",
            ),
        },
        ("test_split.py", "test_laws.py"): {
            "a residual is dropped: entries beyond a part's capacity are lost": (
                "add_entries(acc.residual, dealt.overflow_indices, dealt.overflow_values)\n",
                "pass\n",
            ),
            "a residual is dropped: the rounding errors of a part's sums are lost": (
                "errors = (1 - kept_share) / world.share *",
                "errors = 0 *",
            ),
        },
        ("test_frozen.py",): {
            "zeros of a frozen layer are rounded to something, and move it": (
                "update[begin:end].mul_(differ)",
                "update[begin:end].mul_(True)",
            ),
        },
        ("test_orq.py", "test_laws.py"): {
            "a wrong scale: a part's owner adds half of what others sent": (
                "self.rounding(len(own)).add(sums, [received[rank] for rank in sorted(received)], world.share)",
                "self.rounding(len(own)).add(sums, [received[rank] for rank in received], 0.5)",
            ),
        },
        ("test_laws.py",): {
            "a tree adds whole entries up, which overflows": (
                "n, share = acc.residual.numel(), world.share",
                "n, share = acc.residual.numel(), 1.0",
            ),
        },
        ("test_gs_sgd.py", "test_sketched_sgd.py"): {
            "a sketch's entries stay although they were sent": (
                "torch.where(failed, values, 0.0)",
                "torch.where(failed, 0.0, values)",
            ),
        },
        ("test_gtopk.py",): {
            "gTop-k's merge drops the wrong one of two equal sums": (
                "repeated[1:] = indices[1:] == indices[:-1]",
                "repeated[:-1] = indices[1:] == indices[:-1]",
            ),
        },
        ("test_orq.py", "test_bingrad.py"): {
            "ORQ draws alike on all ranks": ("(rank * 0x9E3779B1 + part & 0xFFFFFFFF)", "(part & 0xFFFFFFFF)"),
            "ORQ draws alike in every step": (
                "(self.seed * 1_000_003 + self.steps & 0x7FFFFFFF)",
                "(self.seed * 1_000_003 & 0x7FFFFFFF)",
            ),
        },
        ("test_sdagc.py",): {
            "a flush is forgotten: entries that it sent count as waiting": (
                "acc.ages.masked_fill_(update[:1].isfinite(), 0)",
                "pass",
            ),
        },
    },
    "gradcomp/native": {
        ("test_memory.py",): {
            "an update is not given back: the next one begins with the last one's entries": (
                "extension.native.wipe(update.flat, update.marks, **extension.queue(update.flat))\n",
                "pass\n",
            ),
        },
    },
    "gradcomp/horovod": {
        ("test_carrier_value.py", "test_sets.py", "test_refusals.py"): {
            "op=Sum is taken for op=Average": ("return scale\n    others", "return 1.0\n    others"),
        },
    },
    "gradcomp/networks": {
        ("test_sets.py", "test_every_spec.py"): {
            "ranks in the wrong order: a gather's parts are turned round": (
                "return payload.read_all(sent.form, received, [size] * (received.numel() // size))",
                "return payload.read_all(sent.form, received, [size] * (received.numel() // size))[::-1]",
            ),
        },
    },
    "gradcomp/core": {
        ("test_by_host.py", "test_feedback.py", "test_laws.py"): {
            "by_host divides by the wrong number of ranks": (
                ".mul_(position.host_world.mean_of_shares)",
                ".mul_(position.peer_world.mean_of_shares)",
            ),
            "by_host takes a shard twice": ("state.slice(acc.residual, shard).zero_()\n", "pass\n"),
        },
        ("test_laws_of_updates.py", "test_by_host.py"): {
            "by_host takes an entry that the host has sent for one that waits": (
                "acc.ages.masked_fill_(empty | ((update != 0) & update.isfinite()), 0)",
                "acc.ages.masked_fill_(empty, 0)",
            ),
        },
    },
    "gradcomp/compressors": {
        ("test_sdagc.py",): {
            "SDAGC counts capacity one step too early": ("if len(self._copied) < DELAY:", "if len(self._copied) < DELAY - 1:"),
        },
        ("test_phases.py",): {
            "LGC never finds that its codes are off": (
                "if sum(self._bad_steps) <= MOST_BAD_STEPS:",
                "if sum(self._bad_steps) >= 0:",
            ),
        },
        ("test_lgc.py", "test_laws.py"): {
            "LGC leaves nothing of what its code misses": (
                "return SharedMean(_bounded(mean), _bounded(entries.values - own))",
                "return SharedMean(_bounded(mean), 0.0 * own)",
            ),
        },
    },
    "gradcomp/messages": {
        ("test_coding.py",): {
            "ascending indices are packed one bit short": (
                "return k + (max(n - 1, 0) >> low) + 1",
                "return k + (max(n - 1, 0) >> low) - 1",
            ),
        },
    },
    "gradcomp": {
        ("test_remove.py",): {
            "a rank that calls remove() alone is not told so": (
                'agreed["remove()"] = "called"',
                'agreed["remove()"] = "not called"',
            ),
        },
        ("test_names.py",): {
            "a ring that adds up sends each entry once": ("2 * self.reduced / world.size", "self.reduced / world.size"),
        },
        ("test_knobs.py",): {
            "a spec's knob is parsed and forgotten": (
                "{name: value for name, value in settings.items() if name not in fields},",
                "{},",
            ),
        },
        ("test_step_exchange.py", "test_auto.py"): {
            "auto drops the residual: a change to gradients does not deliver it": (
                "delivers = has_any and old.on_updates and not new.on_updates",
                "delivers = False",
            ),
        },
        ("test_auto.py",): {
            "auto decides by a rank's own times": (
                "return [statistics.fmean(each) for each in zip(*(of_rank.tolist() for of_rank in every), strict=True)]",
                "return list(own)",
            ),
            "auto takes all steps of a slow candidate's try": (
                "if min(seconds) <= STOP * min(self._medians.values()):",
                "if True:",
            ),
            "auto stops a try for a pause in one step": ("if min(seconds) <= STOP *", "if seconds[-1] <= STOP *"),
            "auto has a faster link confirmed": (
                "(ODD_CHECKS if probe * LINK_CHANGED < usual_probe else 1) if odd",
                "1 if odd",
            ),
            "auto lets candidates come and go": ("seconds[best] * (NO_LONGER if loses_less else 1 / WORTH)", "seconds[best]"),
            "auto chooses again and again where steps always vary": (
                "heeds_steps = not drift.changed or drift.link_changed",
                "heeds_steps = True",
            ),
        },
    },
}
