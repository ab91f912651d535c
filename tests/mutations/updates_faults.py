"""Faults in the exchange of updates around the steps of the user's optimizers."""

from __future__ import annotations

from mutations.fault import Table

UPDATES_FAULTS: Table = {
    "gradcomp/engine": {
        ("test_hidden_momentum.py", "test_laws_of_updates.py"): {
            "an entry that waits releases more than its momentum has delivered": (
                "[*[1 - m**age for age in range(255)], 1.0, *newest]",
                "[*[1 - m ** (age + 1) for age in range(255)], 1.0, *newest]",
            ),
            "Nesterov's momentum is taken for the heavy ball's": (
                "if self.nesterov else [0.0] * 256",
                "if False else [0.0] * 256",
            ),
            "SGD steps without its momentum and without the rest of each gradient's effect": (
                'values = {"momentum": 0.0, "lr": group["lr"] * whole}',
                'values = {"momentum": 0.0, "lr": group["lr"]}',
            ),
        },
        ("test_hidden_momentum.py",): {
            "a hidden momentum is not shown again after the step": (
                "        trained.momentum.show()\n        trained.has_begun = False\n",
                "        trained.has_begun = False\n",
            ),
            "a subclass of SGD loses its momentum": (
                "rule = RULES.get(class_of(optimizer))",
                "rule = next((rule for kind, rule in RULES.items() if isinstance(optimizer, kind)), None)",
            ),
            "what moments of before have not delivered is lost": (
                "bucket.progress.residual[begin:end].add_(slot.flat(step).float(), alpha=share)",
                "slot.flat(step)",
            ),
            "moments of before stay and are delivered twice": (
                "                moment.zero_()\n                yield parameter, step\n",
                "                yield parameter, step\n",
            ),
            "groups of two momenta share a bucket, and one of them": (
                "*[(i, each[name]) for i, each",
                "*[(i, None) for i, each",
            ),
        },
        ("test_hidden_momentum.py", "test_random_programs.py"): {
            "RMSprop has no momentum to go on with after a change to gradients": (
                "state[rule.buffer] = torch.zeros_like(parameter, memory_format=torch.preserve_format)",
                "pass",
            ),
        },
        ("test_step_exchange.py",): {
            "ages begin only once a momentum is 0": (
                "if self.ages is None and self.selects and momentum.value:",
                "if self.ages is None and self.selects and not momentum.value:",
            ),
            "a program whose weights no optimizer moves is not warned": (
                "if self._passes == PASSES_BEFORE_WARNING:",
                "if False:",
            ),
            "a change to gradients forgets what waits": ("        bucket.progress.deliver(Update(mean), scale)\n", ""),
            "another optimizer of the same layers begins without what waits": (
                "state.regroup(old, session.make_reducer(session.compressor))",
                "session.make_reducer(session.compressor)",
            ),
        },
        ("test_adam_noise.py",): {
            "the weight decay is lengthened as ranks' noisy steps are": (
                "[decays[id(each)] for each in params] if any(rates) else []",
                "[]",
            ),
            "the mean of ranks' noisy steps is as short as the noise makes it": (
                "            factor = self.noise.factor\n",
                "            factor = 1.0\n",
            ),
            "ranks whose data are not of one kind divide by second moments of their own": (
                "                yield from _average(moments, world)\n",
                "                pass\n",
            ),
            "a rank in the place of one that has died does not know that the ranks' data differ in kind": (
                '            self.progress.noise.load(shared["noise"])\n',
                "            pass\n",
            ),
        },
        ("test_laws_of_updates.py", "test_random_programs.py"): {
            "a bad gradient of one rank is known to that rank alone": (
                "return records[3::4].sum()",
                "return records[3::4][:1].sum()",
            ),
        },
        ("test_rates.py",): {
            "layers of a small rate wait for ever beside faster ones": (
                "    return min(round(math.log(fastest / rate, 4)), 5) if 0 < rate <= fastest < math.inf else 0\n",
                "    return 0\n",
            ),
            "ranks that look at their optimizers at other times divide other layers": (
                "                self._classes.setdefault(name, _slower(_rate(group), fastest))\n",
                "                self._classes[name] = _slower(_rate(group), fastest)\n",
            ),
        },
        ("test_agreement.py",): {
            "ranks that have parted go on": ("raise self._network.failure(_PARTED", "print(_PARTED"),
            "a rank that finds the others parted keeps its own step": (
                "                    bucket.progress.go_back()\n",
                "                    pass\n",
            ),
        },
        ("test_step_exchange.py", "test_random_programs.py"): {
            "a change to gradients leaves every rank the state of its own optimizer": (
                "        state.copy_(mean.div(network.world.size).view(state.shape))\n",
                "        pass\n",
            ),
        },
        ("test_laws_of_updates.py", "test_frozen.py"): {
            "the residual of a frozen layer moves it": ("            self.frozen.set_aside(frozen)\n", "            pass\n"),
            "the residual of a layer that is unfrozen does not come back": (
                "            self._part(layer).add_(self.residuals.pop(layer)).clamp_(-LARGEST, LARGEST)\n",
                "            self.residuals.pop(layer)\n",
            ),
        },
        ("test_other_programs.py", "test_steps.py"): {
            "a closure sees a hidden momentum": (
                "        _show(optimizer)\n        _closures += 1\n",
                "        _closures += 1\n",
            ),
        },
        ("test_other_programs.py",): {
            "a step that has raised an error stays half done": (
                "        for bucket in trained.waiting:\n",
                "        for bucket in ():\n",
            ),
            "a layer of two optimizers is exchanged after the steps of one": (
                "*[(i, each[name]) for i, each in enumerate(self._sets) if name in each])",
                "*[(i, each[name]) for i, each in enumerate(self._sets) if name in each][-1:])",
            ),
            "parameters that nobody exchanges lose their momentum": (
                "and all(each in self._own or each in exchanged for each in trained)",
                "",
            ),
            "the moments of gradients in between are lost in the next change to updates": (
                "        self._mark(optimizer, False)\n\n    def show_in",
                "\n    def show_in",
            ),
            "a change before a step leaves every rank its own gradients": (
                "                local(grad).copy_(slot.shaped(own))\n",
                "                slot.shaped(own)\n",
            ),
        },
        ("test_other_programs.py", "test_state.py"): {
            "a step that only makes a state to save is exchanged": (
                '_MAKE_STATES = ("broadcast_optimizer_state", "_init_optim_state")',
                "_MAKE_STATES = ()",
            ),
        },
        ("test_steps.py",): {
            "hooks of the user's act on the weights of one rank": (
                'cast("OrderedDict[int, Any]", every_after).move_to_end(handle.id, last=False)',
                "handle",
            ),
        },
        ("test_steps.py", "test_loops.py"): {
            "weights are copied before hooks that the user adds later": (
                "if not every_before or next(reversed(every_before.values())) is not before:",
                "if not every_before:",
            ),
        },
        ("test_step_exchange.py", "test_optimizers.py"): {
            "an outer step exchanges once more": ("        if self.in_step:\n            self._leave_out(buckets)\n", ""),
            "a closure asks the other ranks, which may call theirs more often": (
                "if poison is None or self.in_step or session.network",
                "if poison is None or session.network",
            ),
        },
        ("test_loops.py",): {
            "steps of Horovod's Adasum within backward() are taken for a training's": (
                "self.has_unchecked_gradients or not (self.has_seen_gradients or has_closure)",
                "self.has_unchecked_gradients",
            ),
        },
        ("test_step_exchange.py", "test_ways.py"): {
            "op=Sum moves the weights by the mean": (
                "bucket.progress.deliver(end.value, self.context.scale)",
                "bucket.progress.deliver(end.value, 1.0)",
            ),
        },
        ("test_step_exchange.py", "test_feedback.py"): {
            "a residual of updates does not decay": ("layout, feedback.decay\n", "layout, 1.0\n"),
        },
        ("test_feedback.py",): {},
        ("test_frozen.py",): {
            "a checkpoint leaves out what waits of a frozen layer": (
                "        bucket.put_back()\n        if bucket.progress is not None:\n            for field",
                "        if bucket.progress is not None:\n            for field",
            ),
        },
    },
    "gradcomp/horovod": {
        ("test_sets.py", "test_state.py"): {
            "Horovod's step is exchanged before it calls the optimizer's": (
                'if getattr(optimizer, "_synchronized", False):',
                "if False:",
            ),
        },
        ("test_sparse.py",): {
            "SparseAdam gets a dense gradient": ("if self._takes_sparse and not p.grad.is_sparse:", "if False:"),
        },
    },
}
