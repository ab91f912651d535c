"""LGC: all ranks send the same few entries, as codes of an autoencoder that learned from the first steps' gradients.

L. Abrahamyan, Y. Chen, G. Bekoulis, N. Deligiannis, "Learned Gradient Compression for Distributed Deep Learning" (TNNLS 2021).
Three phases: everything travels; a few entries travel as they are while the autoencoder learns from them; their codes travel.

    ring      z <- mean of all ranks' E(x);  y <- D(z)                   is the update, and x - D(E(x)) stays with each rank
    server    z <- E(x) of who leads;  y_r <- D_r(z, innovation of r)    for every rank r, of which x - y_r stays; mean y_r

The first layer is reduced as it is, of the last one each rank sends its own largest entries. Every rank is its own server: to
send answers out would cost more than codes save.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp import autoencoder, coding, kernels, paths, split, wire
from gradcomp.autoencoder import Autoencoder
from gradcomp.clock import Clock
from gradcomp.coding import Innovations, Rows
from gradcomp.core import Acc, Compressor, Field, Gather, Layout, Reduce, Request, Steps, World
from gradcomp.leading import LEADERS, Leading, Support
from gradcomp.phases import CODE, DENSE, LEARN, Phases
from gradcomp.watch import NOTES, Watch

GAINS_BY_HALVES = 4
"""Ranks up to which gathering codes of half as many bytes sends less than summing whole ones."""

SMALL = 0.01
"""Of the entries: a first layer that is no more travels as it is."""


@dataclass(frozen=True)
class Lgc(Compressor):
    """Sends codes of k = max(1, ceil(ratio * n)) of the model's n entries, those of first and last layers apart."""

    ratio: float = 0.001  # lower = fewer bytes, staler gradients
    instance: str = "ring"  # ring = codes of all ranks are averaged; server = the leader's code speaks for all
    leader: str = "parts"  # parts = each rank, for a part of the entries; rotate, seed = one at a time, in turn or drawn
    dense: int = 200  # steps in which everything travels; higher = a smoother start
    learn: int = 300  # steps after these in which the autoencoder learns; higher = smaller errors of codes
    first: str = "auto"  # how the first layer travels: dense, or as a code like others; auto = dense up to 1 % of the entries
    last: str = "topk"  # how the last one does: topk, or as a code
    innovation: float = 1e-5  # of the entries, how many of its own each rank sends as they are; server only
    decoder: str = "linear"  # linear = nothing is lost; leaky = as published, what is lost is in stats()
    code: str = "auto"  # half or single precision; auto = what sends less
    places: str = "packed"  # as few bits as tell them apart; plain = 32 bits each
    bands: int = 16  # of like values, told apart; higher = smaller errors, more bytes for places; 0 = all are
    window: int = (
        4096  # entries of all ranks together that are learned from in a step, 32 a rank at least; lower = shorter steps
    )
    bound: float = 0.9  # relative error of what codes say, above which a step waits; where many do, all is learned anew
    wire: str = "compact"

    def __post_init__(self) -> None:
        paths.check_ratio("lgc", self.ratio)
        paths.check_wire("lgc", self.wire)
        for knob, known in (
            ("instance", ("ring", "server")),
            ("leader", LEADERS),
            ("first", ("auto", "dense", "code")),
            ("last", ("topk", "code")),
            ("decoder", ("linear", "leaky")),
            ("code", ("auto", "half", "single")),
            ("places", ("packed", "plain")),
        ):
            if getattr(self, knob) not in known:
                raise ValueError(f"lgc: {knob} must be one of {', '.join(known)}, not {getattr(self, knob)!r}")
        for knob, least in (("dense", 0), ("learn", 1), ("bands", 0), ("window", coding.LEAST)):
            if getattr(self, knob) < least:
                raise ValueError(f"lgc: {knob} must be {least} or more, not {getattr(self, knob)}")
        if not 0 < self.innovation <= 1:
            raise ValueError(f"lgc: innovation must lie in (0, 1], not {self.innovation}")
        if not self.bound > 0:
            raise ValueError(f"lgc: bound must be above 0, not {self.bound}")

    @property
    def whole_model(self) -> bool:
        return True

    @property
    def reads_rates(self) -> bool:
        return True

    @property
    def tells_ends_apart(self) -> bool:
        return True

    @property
    def serves(self) -> bool:
        return self.instance == "server"

    def init(self, layout: Layout, seed: int) -> State:
        return State(self, layout, seed)

    def save(self, state: State) -> dict[str, Any]:
        coder = state.coder
        own = {"decoders": coder and coder.decoders, "coder": coder and coder.save()}
        return {"phases": state.phases.save(), "watch": state.watch.save(), **own}

    def load(self, state: State, saved: Mapping[str, Any]) -> None:
        state.phases.load(saved["phases"])
        state.watch.load(saved["watch"])
        state.coder = None
        if saved["coder"] is not None:
            state.coder = self._autoencoder(saved["decoders"], state)
            state.coder.load(saved["coder"])

    def alike(self, state: State) -> str:
        coder = state.coder if state.phases.now == CODE else None
        return state.phases.alike() + ("" if coder is None else f", weights {coder.digest()}")

    def stats(self, state: State) -> dict[str, Any]:
        return {
            "phase": state.phase,
            "code_error": state.watch.error,
            "code_off": float(state.watch.off),
            "learning_seconds": state.clock.seconds,
            "learned_anew": state.phases.falls,
        }

    def exchange(self, acc: Acc, state: State, world: World) -> Steps:
        coder, update = self._coder(state, world), state.update
        state.phase = phase = state.phases.begin(acc.rates)
        if phase == DENSE:
            update = yield from paths.dense_allreduce(acc, world, update)
            state.phases.end(phase)
            return update
        update.zero_()
        if len(update[state.last]):
            found = yield from self._largest(_cut(acc, state.last), world)
            update[state.last] = found
            kernels.wipe(found)
        middle, out = _cut(acc, state.middle), update[state.middle]
        packed, step = self.places == "packed", state.phases.steps
        leading = Leading(len(out), self.ratio, self.leader, self.bands, packed, state.seed, world, step)
        support = yield from self._lead(middle.value, leading, coder, coded=phase == CODE)
        told = yield from self._innovations(middle.value, support, out)
        rows = Rows(support.of(middle.value), support, world, told)
        if phase == LEARN:
            everyone = yield from coding.as_they_are(rows)
            said = coding.exactly(rows, everyone)
            with state.clock:
                has, misses = coding.learn(rows, everyone, coder, self.window, step)
        else:
            if self.serves:
                said = coding.from_led_codes(rows, coder)
            else:
                said = yield from coding.from_mean_code(rows, coder, self._halves(world))
            has, misses = rows.normal, said.left / support.scales
        first = _cut(acc, state.first)
        notes = state.watch.note(has, misses, acc.flag, state.phases.fallen)
        total: Tensor = yield Reduce(_behind(first, notes, state.ends), 1 / world.size)
        verdict = state.watch.judge(total[-NOTES:])
        if phase == LEARN:
            verdict = verdict._replace(good=torch.ones_like(verdict.good))
        else:
            state.watch.compare(total[-NOTES:], said.mean / support.scales)
            if state.phases.see(verdict.mark):
                coder.draw()
        if len(first.value):
            kernels.settle_all(first.value, total[:-NOTES])
            update[state.first] = total[:-NOTES]
        rows.settle(middle.value, middle.velocity, out, said, verdict)
        state.phases.end(phase)
        if phase == LEARN and state.phases.now == CODE:
            coder.freeze((yield Reduce(coder.frozen(), 1 / world.size)))
        return update

    def _coder(self, state: State, world: World) -> Autoencoder:
        """The autoencoder for so many ranks; of another number than before, as many decoders have to be learned."""
        decoders = world.size if self.serves else 1
        if state.coder is None or state.coder.decoders != decoders:
            if state.coder is not None:
                state.phases.learn_again()
            state.coder = self._autoencoder(decoders, state)
        return state.coder

    def _autoencoder(self, decoders: int, state: State) -> Autoencoder:
        return Autoencoder(decoders, self.serves, self.decoder == "linear", state.seed, state.update.device)

    def _halves(self, world: World) -> bool:
        """Whether codes travel in half precision."""
        return self.code == "half" or (self.code == "auto" and (self.serves or world.size <= GAINS_BY_HALVES))

    def _largest(self, acc: Acc, world: World) -> Steps:
        """The largest entries of every rank's, as they are."""
        taken = paths.room(acc, paths.count_of(self.ratio, len(acc.value)), self.wire)
        kernels.take_topk(acc.value, len(taken.values), **taken.arrays, velocity=acc.velocity, flag=acc.flag)
        return (yield from paths.sparse_allgather(acc, taken, world))

    def _lead(self, value: Tensor, leading: Leading, coder: Autoencoder, coded: bool) -> Generator[Request, Any, Support]:
        """The places at which all ranks send; and, where the leaders' codes speak for all, these."""
        own, code = leading.choose(value), None
        if coded and self.serves:
            dtype = torch.float16 if self._halves(leading.world) else torch.float32
            code = Field("code", dtype, autoencoder.CODE * autoencoder.code_places(leading.k))
            if own:
                row = value[leading.find(own["places"], leading.leaders.index(leading.world.rank))] / own["scale"]
                own["code"] = coding.encoded(coder, row[None])
        came = yield from leading.share(own, leading.form(code), value.device)
        places = torch.stack([leading.find(each["places"], row) for row, each in enumerate(came)])
        support = Support(places, torch.stack([each["scale"] for each in came]), leading.leaders)
        if code is None:
            return support
        codes = torch.stack([each["code"].float() for each in came])
        return support._replace(codes=codes.unflatten(1, (autoencoder.CODE, -1)))

    def _innovations(self, value: Tensor, support: Support, out: Tensor) -> Generator[Request, Any, Innovations | None]:
        """What each rank sends of its own where others lead. out is zero, and is again afterwards."""
        if not self.serves:
            return None
        count = paths.count_of(self.innovation, len(value))
        few = wire.size(wire.sparse_form(count)) < wire.size(wire.packed_form(len(value), count))
        taken = paths.room(Acc(value), count, "exact" if few else self.wire)
        kernels.take_topk(value, len(taken.values), **taken.arrays)
        kernels.add_sparse(value, taken.values, taken.indices, taken.header)  # they stay until it is known what became of them
        if taken.packed:
            kernels.pack_sparse(**taken.arrays, value=None, blocks=taken.payload["blocks"], entries=taken.payload["entries"])
        came = yield Gather(taken.payload)
        inside, outside = [], []
        for reply in came:
            values, indices, _ = split.entries(reply)
            places = indices.long().clamp(0, len(out) - 1)
            out.index_copy_(0, places, values)
            inside.append(support.of(out))
            support.put(out, torch.zeros_like(inside[-1]))
            outside.append((places, out[places]))
            out.index_fill_(0, places, 0.0)
        return Innovations(torch.stack(inside), outside)


class State:
    """What lgc keeps between steps."""

    def __init__(self, knobs: Lgc, layout: Layout, seed: int):
        self.seed = seed
        self.phases = Phases(knobs.dense, knobs.learn)
        self.phase = DENSE
        self.watch = Watch(knobs.bound, seed, layout.device)
        self.clock = Clock(layout.device)
        self.coder: Autoencoder | None = None
        last, first = _ends(layout)
        if knobs.last == "code":
            last = 0
        if knobs.first == "code" or (knobs.first == "auto" and layout.total - first > SMALL * layout.total):
            first = layout.total
        self.last, self.middle, self.first = slice(0, last), slice(last, first), slice(first, layout.total)
        self.update = torch.zeros(layout.total, device=layout.device)
        self.ends = torch.zeros(layout.total - first + NOTES, device=layout.device)


def _ends(layout: Layout) -> tuple[int, int]:
    """Where the last layer ends, with which a bucket begins, and where the first one begins; of a module's parameters all
    belong to it. A model without anything between them is all between."""
    modules = [_module(name) for name in layout.names]
    spans = [span for span, module in zip(layout.spans, modules, strict=True) if module not in (modules[0], modules[-1])]
    return (spans[0][0], spans[-1][1]) if spans else (0, layout.total)


def _module(name: str) -> str:
    """Whose parameter it is. Numbered ones, as those without a name are, count each by itself."""
    head, _, leaf = name.rpartition(".")
    return name if not head or leaf.isdigit() else head


def _cut(acc: Acc, where: slice) -> Acc:
    """A part of it, without what was noted of the whole."""
    return Acc(acc.value[where], None if acc.velocity is None else acc.velocity[where], acc.flag)


def _behind(first: Acc, notes: Tensor, buffer: Tensor) -> Tensor:
    """The first layer as it is, and the notes."""
    if len(first.value):
        kernels.offer_all(first.value, buffer[: len(first.value)], first.flag)
    buffer[len(first.value) :] = notes
    return buffer
