"""The exchange of updates around the steps of the user's optimizers.

Each optimizer steps on its rank's own gradients, as if it were alone. Before a step the weights are copied. After it, start
minus now goes into the residual, the ranks exchange what their compressors take from it, and the weights become start minus the
mean, equal to the last bit on all ranks. What the program does to its gradients between backward() and step() needs no code.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.requests import Reduce
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.context import layer_rates
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.slots import Slots
from gradcomp.engine.stages.feedback import cut_factors
from gradcomp.engine.updates.agreement import BACKWARD, STEP, Agreement
from gradcomp.engine.updates.hidden_momentum import HiddenMomentum, Momentum, class_of, decay_of, floating_state
from gradcomp.engine.updates.local_gradients import LocalGradients
from gradcomp.engine.updates.progress import StepRule
from gradcomp.engine.updates.steps import warn_user
from gradcomp.native.memory import Memory, Update
from gradcomp.networks import Connection

_IN_BACKWARD = (
    "{name}.step() was called within backward(), where no updates can be exchanged: call it after backward(), or take the spec "
    '"blocks", which exchanges gradients'
)
_SHARDED = (
    "{name} steps a part of the parameters on each rank, with gradients that must be equal everywhere, and this spec exchanges "
    'updates after the step: take the spec "blocks", which exchanges gradients, or an optimizer that is whole on each rank'
)
_CAPTURED = (
    "{name}.step() is captured in a CUDA graph, which would repeat one step's exchange: capture forward and backward passes, "
    'and call step() outside of the graph, or take the spec "blocks"'
)


_SUMS = (
    "op=Sum adds the ranks' updates up, and those of {name} do not grow with the gradient: its steps would be as many times "
    'too long as there are ranks. Use op=Average, or the spec "blocks", which exchanges gradients'
)


# Backward passes without a step of any optimizer, before the warning. Few trainings add up so many.
PASSES_BEFORE_WARNING = 200
_NO_STEP = (
    f"{PASSES_BEFORE_WARNING} backward passes, and no torch optimizer has stepped: updates are exchanged after its step(). If "
    'the program moves the weights by itself, the ranks train apart: take the spec "blocks", which exchanges gradients'
)

_NEVER_STEPPED = (
    "this rank has joined without a step of its own, and does not know what the others exchange after theirs: give each rank "
    'at least one batch, or take the spec "blocks", which exchanges gradients'
)
_UNFROZEN = (
    "{name!r} of shape {shape} was unfrozen after the exchange was set up: its gradient stays on this rank, and the replicas "
    "drift apart. Unfreeze it before that, and freeze it right after that, by requires_grad_(False), until it is to train"
)


@dataclass(eq=False)
class Trained:
    """An optimizer that trains some of the parameters.

    signature: of its groups, by which another parameter in them is noticed. number: by which ranks name it. names: of its
    layers. momentum: hidden while it steps. never_exchanged: its parameters that were frozen at set-up, by name. exchanges:
    done after its steps since a state was loaded. has_begun: its step is under way. is_new: what its moments have not delivered
    yet is to go into the residual. reducer, buckets: those of its layers. clips: some of them cut the gradients. momenta,
    decays: of the groups, in the last step.
    """

    signature: tuple[int, ...]
    number: int
    names: frozenset[str]
    momentum: HiddenMomentum
    never_exchanged: Sequence[tuple[str, torch.nn.Parameter]] = ()
    exchanges: int = 0
    has_begun: bool = False
    is_new: bool = True
    reducer: Reducer | None = None
    buckets: list[Bucket] = field(default_factory=list)
    clips: bool = False
    momenta: Sequence[Any] = ()
    decays: Sequence[float] = ()

    def find_buckets(self, reducer: Reducer) -> None:
        """Find the buckets of its layers."""
        self.reducer, self.momenta, self.decays = reducer, (), ()
        self.buckets = [each for each in reducer.buckets if each.layout.names[0] in self.names]
        self.clips = any(each.feedback is not None and each.feedback.clip for each in self.buckets)


class StepExchange:
    """What an exchange of updates knows of the optimizers that step, and the acts around their steps."""

    def __init__(self, slots: Slots, network: Connection):
        self._slots, self._network = slots, network
        self._names = {id(slot.parameter): slot.name for slot in slots.slots}
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Trained | None] = weakref.WeakKeyDictionary()
        self._signatures: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._is_on_cuda = any(slot.layer.device.type == "cuda" for slot in slots.slots)
        self._number_of: dict[str, int] = dict.fromkeys(self._names.values(), 0)  # by layer: its optimizer's
        self.parts: dict[str, Hashable] | None = None  # of each layer (see _divide)
        self.gradients, self._agreement = LocalGradients(Memory()), Agreement(network)
        self._passes = 0  # backward passes since the last step of any optimizer that trains the parameters
        self._adds_up = False  # updates are sums over the ranks
        self.in_step = 0  # steps under way, as in a closure
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []  # since the last backward pass
        self.keeps_residuals = False  # also where an optimizer's state is loaded
        self.has_moments = True  # a first moment in an optimizer's state is of gradients before the exchange of updates

    # The optimizers.

    def find(self, optimizer: torch.optim.Optimizer, given: Momentum | None = None) -> Trained | None:
        """Find an optimizer. Return None if it trains none of the parameters. given: the spec's momentum."""
        signature = tuple([len(group["params"]) for group in optimizer.param_groups])
        if self._signatures.get(optimizer) != signature:
            self._signatures[optimizer] = signature
            self._known[optimizer] = self._look_at(optimizer, signature, given)
        return self._known[optimizer]

    def find_stepping(self, optimizer: torch.optim.Optimizer, given: Momentum | None) -> Trained | None:
        """Find an optimizer that is about to step. Refuse it if a layer has a gradient that no rank exchanges."""
        found = self.find(optimizer, given)
        for name, parameter in () if found is None else found.never_exchanged:
            if parameter.requires_grad and parameter.grad is not None:
                raise RuntimeError(_UNFROZEN.format(name=name, shape=tuple(parameter.shape)))
        return found

    def _look_at(self, optimizer: torch.optim.Optimizer, signature: tuple[int, ...], given: Momentum | None) -> Trained | None:
        params = [each for group in optimizer.param_groups for each in group["params"]]
        names = frozenset(self._names[id(each)] for each in params if id(each) in self._names)
        if not names:
            return None
        number = min(self._number_of[name] for name in names)
        if names != {name for name, each in self._number_of.items() if each == number}:
            number = max(self._number_of.values()) + 1
            self._number_of |= dict.fromkeys(names, number)
        before = self._known.get(optimizer)
        found = Trained(signature, number, names, HiddenMomentum(optimizer, given), is_new=self.has_moments)
        own = {id(each) for each in params}
        found.never_exchanged = [(name, each) for name, each in self._slots.without_gradient if id(each) in own]
        if before is not None:
            found.is_new, found.exchanges = before.is_new, before.exchanges
        self._known[optimizer] = found
        self.parts = self._divide()
        return found

    def _divide(self) -> dict[str, Hashable] | None:
        """Return the part of each layer: layers of one optimizer, and of one momentum, share buckets. None: all are of one.

        A momentum that a schedule changes later is that of its bucket's first layer.
        """
        momenta: dict[str, Momentum] = {}
        for optimizer, trained in self._known.items():
            if trained is None:
                continue
            for group in optimizer.param_groups:
                of_group = trained.momentum.of(group)
                momenta |= {self._names[id(each)]: of_group for each in group["params"] if id(each) in self._names}
        parts: dict[str, Hashable] = {name: (number, momenta.get(name)) for name, number in self._number_of.items()}
        return parts if len({*parts.values()}) > 1 else None

    def adds_up(self, optimizer: torch.optim.Optimizer, trained: Trained, op: bool | None, before: bool) -> bool:
        """Say whether updates are sums over the ranks. op: what the optimizer's door knows of it; None: as before."""
        sums = before if op is None else op
        if sums and trained.momentum.normalizes:
            raise ValueError(_SUMS.format(name=class_of(optimizer).__name__))
        self._adds_up = sums
        return sums

    def show(self, optimizer: torch.optim.Optimizer) -> None:
        """Show an optimizer's own settings."""
        if (trained := self._known.get(optimizer)) is not None:
            trained.momentum.give_back()

    def note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Empty the residual of an optimizer whose state was loaded in mid-training: the training goes on from elsewhere.

        A residual that was loaded since its last step stays.
        """
        trained = self._known.get(optimizer)
        if trained is None or not trained.exchanges or self.keeps_residuals:
            return
        trained.exchanges = 0
        for bucket in trained.buckets:
            bucket.empty()

    def hide(self, optimizer: torch.optim.Optimizer) -> None:
        """Hide the momentum of an optimizer that is in the middle of a step."""
        if (trained := self._known.get(optimizer)) is not None and trained.has_begun:
            trained.momentum.hide()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """List the optimizers that train some of the parameters, in the same order on all ranks."""
        trained = [(each.number, optimizer) for optimizer, each in self._known.items() if each is not None]
        return [optimizer for _, optimizer in sorted(trained, key=lambda pair: pair[0])]

    def forget(self) -> None:
        """Look at all optimizers anew: the spec may have changed, or a step has failed."""
        for each in self._known.values():
            if each is not None:
                each.momentum.give_back()
                each.has_begun = False
        self._signatures.clear()
        self.in_step = 0

    def note_change(self, *, to_updates: bool) -> None:
        """Note a change of spec, or a loaded state. to_updates: from gradients, so that the moments are of these."""
        self.has_moments = to_updates
        for each in self._known.values():
            if each is not None:
                each.is_new, each.exchanges = to_updates, 0

    def discard(self) -> None:
        """Discard a step, and a backward pass, under way."""
        self._agreement.discard()
        self.gradients.discard()
        self.forget()

    # Around a backward pass, and a step.

    def end_backward(self, steps: int) -> Tensor | None:
        """End a backward pass. Return 0 if all ranks' gradients are finite, otherwise NaN; None where nobody else is asked."""
        poison = self.gradients.end()
        if poison is None or self.in_step or self._network.world.size == 1:
            return None
        self._passes += 1
        if self._passes == PASSES_BEFORE_WARNING:
            warn_user(_NO_STEP)
        self._agreement.begin(BACKWARD, 0, steps, poison)
        return self._agreement.end()

    def note_backward(self) -> None:
        """Note that a backward pass of this rank's has ended, after which others may step."""
        self._stepped.clear()

    def take_stepped(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have stepped since this rank's last backward pass, and forget them."""
        if not self.optimizers() and self._network.world.size > 1:
            raise RuntimeError(_NEVER_STEPPED)
        stepped, self._stepped = self._stepped, []
        return [optimizer for each in stepped if (optimizer := each()) is not None]

    def begin(self, optimizer: torch.optim.Optimizer, trained: Trained, reducer: Reducer) -> None:
        """Copy the weights before a step, and hide the momentum. A step that calls another one begins with each."""
        if torch._C._current_graph_task_id() >= 0 or (not trained.exchanges and not trained.has_begun) or self._is_on_cuda:
            self._check(optimizer)
        if trained.reducer is not reducer:
            trained.find_buckets(reducer)
        if self._network.world.size > 1 and self._agreement.answer is None:
            self._agreement.begin(STEP, trained.number, reducer.steps_done)  # which a rank that joins learns
        if trained.clips:
            self._clip(trained)
        if trained.is_new:
            self._take_undelivered(trained)
        if not trained.has_begun:
            self._note_rules(optimizer, trained)
            trained.has_begun = True
            self.in_step += 1
        trained.momentum.hide()  # also where state_dict() has shown it after a step that raised an error
        for bucket in trained.buckets:
            assert bucket.progress is not None
            bucket.progress.begin()
        if reducer.rates_need != "unused":
            reducer.layer_rates = layer_rates(self._names, [optimizer])

    def end(self, optimizer: torch.optim.Optimizer, trained: Trained, scale: float) -> None:
        """Exchange the progress of a step, once: after the innermost of those that call one another."""
        trained.momentum.show()
        trained.has_begun = False
        self.in_step -= 1
        if self.in_step:
            self._end_around(trained)
        if self._agreement.answer is not None:
            try:
                self._agreement.end()
            except BaseException:  # this rank alone has stepped
                for bucket in trained.buckets:
                    assert bucket.progress is not None
                    bucket.progress.go_back()
                raise
        skipped = getattr(optimizer, "found_inf", None)  # a GradScaler sets it where the optimizer itself skips its step
        if isinstance(skipped, Tensor) and not skipped.is_cuda and bool(skipped):
            return
        for bucket in trained.buckets:
            assert bucket.progress is not None
            bucket.progress.skipped = skipped
        assert trained.reducer is not None
        trained.reducer.run(trained.buckets, scale)
        trained.exchanges += 1
        self._passes = 0
        self._stepped.append(weakref.ref(optimizer))

    def _end_around(self, inner: Trained) -> None:
        """End the steps that have called this one: they exchange nothing of their own."""
        for each in self._known.values():
            if each is not None and each.has_begun and not each.names.isdisjoint(inner.names):
                each.momentum.show()
                each.has_begun = False
                self.in_step -= 1

    def _note_rules(self, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Tell the buckets how the optimizer's step is to go into their residuals."""
        groups, momentum = optimizer.param_groups, trained.momentum
        if momentum.rule is None:
            return
        setting = momentum.rule.setting
        if trained.momenta != (now := [group[setting] for group in groups]):
            trained.momenta = now
            of_layer = {id(each): momentum.of(group) for group in groups for each in group["params"]}
            for bucket in trained.buckets:
                first = self._slots.parameters[bucket.layout.names[0]]
                if bucket.progress is not None:
                    bucket.progress.rule = StepRule(of_layer[id(first)], momentum.normalizes)
        if momentum.normalizes and any(
            each.progress is not None and each.progress.noise.factor != 1 for each in trained.buckets
        ):
            rates = [decay_of(optimizer, group) for group in groups]
            if any(rates) and rates != trained.decays:
                trained.decays = rates
                decays = {id(each): rate for group, rate in zip(groups, rates, strict=True) for each in group["params"]}
                for bucket in trained.buckets:
                    assert bucket.progress is not None
                    bucket.progress.decays = [decays[id(self._slots.parameters[name])] for name in bucket.layout.names]

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what an exchange after the step cannot serve."""
        name = class_of(optimizer).__name__
        if torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(_IN_BACKWARD.format(name=name))
        if name == "ZeroRedundancyOptimizer":
            raise RuntimeError(_SHARDED.format(name=name))
        if self._is_on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_CAPTURED.format(name=name))

    @torch.no_grad()
    def _clip(self, trained: Trained) -> None:
        """Cut this rank's gradients, where the spec says clip=."""
        for bucket in trained.buckets:
            feedback = bucket.feedback
            if feedback is None or not feedback.clip:
                continue
            grads = [self._slots.parameters[name].grad for name in bucket.layout.names]
            there = [each for each in grads if each is not None and not each.is_sparse]
            if there:
                squares = torch.stack([each.double().square().sum() for each in there])
                bound, whole_model = feedback.clip / math.sqrt(self._network.world.size), feedback.clip_by == "model"
                torch._foreach_mul_(there, [*cut_factors(bound, squares, whole_model).unbind()])

    def _take_undelivered(self, trained: Trained) -> None:
        """Put what the optimizer's moments have not delivered of earlier gradients into the residual, once."""
        trained.is_new = False
        at = {name: (bucket, span) for bucket in trained.buckets for name, span in _spans(bucket)}
        for parameter, step in trained.momentum.take_undelivered():
            name = self._names.get(id(parameter))
            if name in at:
                bucket, (begin, end) = at[name]
                slot = self._slots.slot(parameter)
                assert slot is not None
                # All ranks have the same moment, of the sum: each adds its share of it.
                share = 1 / self._network.world.size if self._adds_up else 1.0
                bucket.residual[begin:end].add_(slot.flat(step).float(), alpha=share)


def _spans(bucket: Bucket) -> Iterator[tuple[str, tuple[int, int]]]:
    return zip(bucket.layout.names, bucket.layout.spans, strict=True)


@torch.no_grad()
def deliver_residuals(reducer: Reducer, optimizers: Sequence[torch.optim.Optimizer], network: Connection) -> Iterator[None]:
    """Deliver the mean of all residuals, and average the optimizers' states, in lock-step with other ranks.

    The ranks can then exchange gradients: their optimizers go on alike.
    """
    size = network.world.size
    for bucket in reducer.buckets:
        bucket.put_back()  # a frozen layer's, which would be lost
    residuals = [(each.index, each.residual / size) for each in reducer.buckets]
    answers = [network.start(Reduce(each), f"the mean residual of bucket {index}") for index, each in residuals]
    states = [each for optimizer in optimizers for each in floating_state(optimizer)]
    means = [network.start(Reduce(each.float().reshape(-1) / size), f"the mean of state {i}") for i, each in enumerate(states)]
    yield
    for bucket, answer in zip(reducer.buckets, answers, strict=True):
        mean = answer()
        assert isinstance(mean, Tensor) and bucket.progress is not None
        bucket.residual.zero_()
        bucket.progress.start.zero_()
        assert bucket.progress.weights is not None
        bucket.progress.weights.read()  # it may lie elsewhere since the last step, or have had none
        bucket.progress.keeps_rest = True
        bucket.progress.deliver(Update(mean), 1.0)
    for state, answer in zip(states, means, strict=True):
        mean = answer()
        assert isinstance(mean, Tensor)
        state.copy_(mean.view(state.shape))
