"""Which optimizers train the parameters that are exchanged, and which layers share buckets for them."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.updates import steps
from gradcomp.engine.updates.hidden_momentum import HiddenMomentum, Momentum
from gradcomp.engine.updates.progress import StepRule

_UNFROZEN = (
    "{name!r} of shape {shape} was frozen when gradcomp was set up, so no rank exchanges it. Leave it trainable until then, "
    "and call requires_grad_(False) afterwards, until you train it"
)

# The parameters whose optimizers have stepped on each rank's own gradients since their states were last equal.
_apart = WeakIdKeyDictionary()


def note_apart(parameters: Iterable[Tensor]) -> None:
    """Note that the optimizers of these parameters step on each rank's own gradients."""
    _apart.update(dict.fromkeys(parameters, True))


@dataclass(eq=False)
class Trained:
    """An optimizer that trains some of the parameters.

    number: of its layers, by which ranks name it: each may find optimizers in an order of its own. names: of its layers.
    momentum: hidden while it steps. never_exchanged: its parameters that were frozen at set-up, by name; added: those that it
    got after a step, which nobody exchanges. exchanges: done after its steps since a state was loaded. has_begun: its step is
    under way; inside: steps of its own that this one has called. is_new: what its moments have not delivered yet is to go into
    the residual. reducer, buckets: those of its layers. waiting: those that no inner step has exchanged. clips: some of them
    cut the gradients. rules: of the buckets. settings: of the groups, when the rules were made.
    """

    number: int
    names: frozenset[str]
    momentum: HiddenMomentum
    never_exchanged: Sequence[tuple[str, torch.nn.Parameter]] = ()
    added: Sequence[torch.nn.Parameter] = ()
    exchanges: int = 0
    has_begun: bool = False
    inside: int = 0
    is_new: bool = True
    reducer: Reducer | None = None
    buckets: list[Bucket] = field(default_factory=list)
    waiting: list[Bucket] = field(default_factory=list)
    clips: bool = False
    rules: list[StepRule] = field(default_factory=list)
    settings: Any = ()

    def buckets_in(self, reducer: Reducer) -> list[Bucket]:
        """List the buckets of its layers."""
        return [each for each in reducer.buckets if each.layout.names[0] in self.names]

    def find_buckets(self, reducer: Reducer) -> None:
        """Find the buckets of its layers."""
        self.reducer, self.settings = reducer, ()
        self.buckets = self.buckets_in(reducer)
        self.clips = any(each.feedback is not None and each.feedback.clip for each in self.buckets)


class Optimizers:
    """The optimizers of one session.

    layers: those of each, in words, by its number. parts: of each layer (see _divide). averaged: where updates were exchanged
    and gradients are now, those whose states have been made equal on all ranks since; otherwise None.
    """

    def __init__(self, session: Any):
        self._slots, self._session = session.slots, weakref.ref(session)  # the session has this object
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, ...], Trained | None]]
        self._known = weakref.WeakKeyDictionary()  # with their groups, by which another parameter in them is noticed
        self.name_parameters()
        self._latest: dict[str, weakref.ref[torch.optim.Optimizer]] = {}  # of each layer
        # The momentum of each layer, of the optimizers that train the same layers.
        self._sets: list[dict[str, Momentum]] = [dict.fromkeys(self.names.values(), Momentum())]
        # The class of each layer's rate, as it was first seen: ranks may look at their optimizers at different times.
        self._classes: dict[str, Hashable] = {}
        self._shared: set[str] = set()  # by optimizers that take turns: one residual cannot stand for two momenta
        # The layers of each that another one has trained since.
        self.taken: dict[weakref.ref[torch.optim.Optimizer], set[str]] = {}
        self.is_inner = False  # the step that this rank, without a batch, takes with others was called by another one's
        self.averaged: weakref.WeakSet[torch.optim.Optimizer] | None = None
        self.layers: dict[int, str] = {}
        self.parts: dict[str, Hashable] | None = None

    def renew_parameters(self) -> None:
        """Take other parameters that the model has got in place of its own."""
        if self._slots.renew():
            self.name_parameters()

    def name_parameters(self) -> None:
        """Note the parameters, which may be new, and look at all optimizers anew."""
        self.names = {id(slot.parameter): slot.name for slot in self._slots.slots}
        self._look_anew()

    def _look_anew(self) -> None:
        """Look at all optimizers anew, each at its next step."""
        self._known = weakref.WeakKeyDictionary({each: ((), of[1]) for each, of in self._known.items()})

    def find(self, optimizer: torch.optim.Optimizer, given: Momentum | None = None) -> Trained | None:
        """Find an optimizer. Return None if it trains none of the parameters. given: the spec's momentum."""
        seen = (steps.changes, *[each for group in optimizer.param_groups for each in (id(group), *map(id, group["params"]))])
        known = self._known.get(optimizer)
        if known is None or (known[0] != seen and not (known[1] is not None and known[1].has_begun)):
            found = self._look_at(optimizer, given, None if known is None else known[1])
            if found is not None and known is not None and known[0]:
                new = {*seen} - {*known[0], *self.names, *steps.exchanged()}
                found.added = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and id(p) in new]
            is_open = found is not None and not found.names <= self._classes.keys()  # and is looked at again
            known = self._known[optimizer] = () if is_open else seen, found
        return known[1]

    def find_stepping(self, optimizer: torch.optim.Optimizer, given: Momentum | None) -> Trained | None:
        """Find an optimizer that is about to step. Refuse it if a layer has a gradient that no rank exchanges."""
        found = self.find(optimizer, given)
        for name, parameter in () if found is None else found.never_exchanged:
            if parameter.requires_grad and parameter.grad is not None:
                raise RuntimeError(_UNFROZEN.format(name=name, shape=tuple(parameter.shape)))
        return found

    @property
    def own(self) -> set[int]:
        """The ids of the parameters whose residual stands for a momentum."""
        return {number for number, name in self.names.items() if name not in self._shared}

    def share_taken(self, optimizer: torch.optim.Optimizer, is_inner: bool) -> None:
        """Let the optimizers that take turns on layers keep their momenta from the next step on: this one has stepped again.

        is_inner: another one's step calls this one, and takes no turns with it.
        """
        layers = self.taken.pop(weakref.ref(optimizer), set()) - self._shared
        if layers and not is_inner:
            self._shared |= layers
            for each in self.every():
                each.momentum.give_back()
            steps.look_anew()

    def _look_at(self, optimizer: torch.optim.Optimizer, given: Momentum | None, before: Trained | None) -> Trained | None:
        elsewhere = steps.exchanged_by_later(self._session())
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"] if id(p) not in elsewhere}
        if self.names.keys().isdisjoint(group_of):
            return None
        momentum = HiddenMomentum(optimizer, given, self.own, steps.hidden(given))
        groups = {name: group_of[number] for number, name in self.names.items() if number in group_of}
        momenta = {name: momentum.of(group) for name, group in groups.items()}
        if (fastest := max(map(_rate, group_of.values()))) > 0:  # before a warm-up all may be 0
            for name, group in groups.items():
                self._classes.setdefault(name, _slower(_rate(group), fastest))
        place = next((i for i, each in enumerate(self._sets) if each.keys() == momenta.keys()), len(self._sets))
        self._sets[place : place + 1] = [momenta]
        number = zlib.crc32("\n".join(momenta).encode()) >> 8  # a float32 of a record holds 24 bits
        first, *others = momenta
        self.layers[number] = f"{first!r}" + (f" and {len(others)} more" if others else "")
        for name in () if self.is_inner else momenta.keys() - self._shared:  # one whose step is under way calls this one
            latest = self._latest.get(name, lambda: None)()
            if latest not in (None, optimizer) and (other := self.known(latest)) is not None and not other.has_begun:
                self.taken.setdefault(weakref.ref(latest), set()).add(name)
        self._latest |= dict.fromkeys(momenta, weakref.ref(optimizer))
        note_apart(self._slots.parameters[name] for name in momenta)
        found = Trained(number, frozenset(momenta), momentum)
        found.never_exchanged = [(name, each) for name, each in self._slots.without_gradient if id(each) in group_of]
        if before is not None:
            found.is_new, found.exchanges = before.is_new, before.exchanges
        self.parts = self._divide()
        return found

    def _divide(self) -> dict[str, Hashable] | None:
        """Return the part of each layer: those of the same optimizers, momenta and classes of rates share buckets.

        None: all are of one. Beside much faster layers, a compressor that selects would leave all of a slow one out.
        A momentum that a schedule changes later is that of its bucket's first layer. What an optimizer trained that is gone
        stays divided: when it goes differs between ranks.
        """
        parts: dict[str, Hashable] = {
            name: (self._classes.get(name, 0), *[(i, each[name]) for i, each in enumerate(self._sets) if name in each])
            for name in self._sets[0]
        }
        return parts if len({*parts.values()}) > 1 else None

    def adopt(self, parts: Mapping[str, Hashable]) -> None:
        """Divide the layers as another rank does, or a saved state, whatever the rates are by now."""
        self.parts, self._classes = {**parts}, {**parts}

    def known(self, optimizer: torch.optim.Optimizer) -> Trained | None:
        """Return what is known of an optimizer, without a look at its groups."""
        known = self._known.get(optimizer)
        return None if known is None else known[1]

    def every(self) -> list[Trained]:
        """List what is known of all that train some of the parameters."""
        return [trained for _, trained in self._known.values() if trained is not None]

    def latest(self) -> list[torch.optim.Optimizer]:
        """List the optimizers that have last trained the parameters, in the same order on all ranks."""
        latest = [self._latest[name]() for name in self._sets[0] if name in self._latest]
        return list(dict.fromkeys(each for each in latest if each is not None))

    def alive(self) -> list[torch.optim.Optimizer]:
        """List all optimizers that train the parameters. Ranks may let go of old ones at different times."""
        latest = self.latest()
        others = [each for each, (_, trained) in self._known.items() if trained is not None]
        return [*latest, *(each for each in others if each not in latest)]

    def forget(self) -> None:
        """Look at all optimizers anew: the spec may have changed, or a step has failed."""
        for each in self.every():
            each.momentum.give_back()
            each.has_begun, each.inside = False, 0
        self.is_inner = False
        self._look_anew()

    def note_averaged(self) -> None:
        """Note that the optimizers' states have become equal on all ranks."""
        for each in self._slots.parameters.values():
            _apart.pop(each, None)
        self.averaged = weakref.WeakSet(self.alive())

    def turn(self, *, to_updates: bool, were_apart: bool = False) -> None:
        """Note what is exchanged from now on. were_apart: optimizers have stepped on each rank's own gradients before."""
        if to_updates:
            self.averaged = None
        elif self.averaged is None and (were_apart or any(each in _apart for each in self._slots.parameters.values())):
            self.averaged = weakref.WeakSet()

    def find_unaveraged(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the state of an optimizer that is about to step with gradients of all ranks may differ between them."""
        session: Any = self._session()
        # It has loaded a state if the ranks are to meet; after remove(), they do so in no backward pass.
        if self.averaged is None or (optimizer in self.averaged and session.has_met):
            return False
        self.averaged.add(optimizer)
        return self.find(optimizer) is not None

    def note_change(self, *, is_loaded: bool = False) -> None:
        """Note a change of spec, or a loaded state: moments may have come that are not delivered yet."""
        for each in self.every():
            each.is_new, each.exchanges = True, 0 if is_loaded else each.exchanges
            each.reducer, each.buckets, each.waiting = None, [], []  # which have memory


def _rate(group: Mapping[str, Any]) -> float:
    """Return a group's rate; where a warm-up begins with 0, the one of its schedule. An optimizer without rates has 1."""
    rate = group.get("lr")
    return 1.0 if rate is None else float(rate) or float(group.get("initial_lr", 0.0))


def _slower(rate: float, fastest: float) -> int:
    """Return how many times by four a rate is below the fastest one, at most five; six for a rate of 0, which may rise."""
    if rate == 0:
        return 6
    return min(round(math.log(fastest / rate, 4)), 5) if 0 < rate <= fastest < math.inf else 0
