"""LGC: all ranks send the same few entries, as codes of an autoencoder that learned from the first steps' gradients.

L. Abrahamyan, Y. Chen, G. Bekoulis, N. Deligiannis, "Learned Gradient Compression for Distributed Deep Learning" (TNNLS 2021).
Three phases: everything travels; a few entries travel as they are while the autoencoder learns from them; their codes travel.

    ring      z <- mean of all ranks' E(x);  y <- D(z)                   is the update, and x - D(E(x)) stays with each rank
    server    z <- E(x) of who leads;  y_r <- D_r(z, innovation of r)    for every rank r, of which x - y_r stays; mean y_r

The first layer is reduced as it is, of the last one each rank sends its own largest entries. Every rank is its own server: to
send answers out would cost more than codes save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp.compressors.lgc import autoencoder, coding
from gradcomp.compressors.lgc.autoencoder import Autoencoder
from gradcomp.compressors.lgc.code_error import NOTES
from gradcomp.compressors.lgc.coding import Innovations, Rows, Said
from gradcomp.compressors.lgc.common_places import LEADERS, Leading, Support
from gradcomp.compressors.lgc.phases import CODE, DENSE, LEARN, Phases
from gradcomp.compressors.lgc.state import LgcState
from gradcomp.exchanges import dense, routes
from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import CODECS, EXACT, count_of, ratio_knob, wire_knob
from gradcomp.native import kernels
from gradcomp.native.memory import Update
from gradcomp.protocol import Acc, Compressor, Layout, Steps, Traits
from gradcomp.requests import Asking, Field, World, gather, reduce

GAINS_BY_HALVES = 4
"""Ranks up to which gathering codes of half as many bytes sends less than summing whole ones."""


@dataclass(frozen=True)
class Lgc(Compressor):
    """Sends codes of k = max(1, ceil(ratio * n)) of the model's n entries, those of first and last layers apart."""

    ratio: float = ratio_knob()
    instance: str = knob("ring", "codes of all ranks are averaged, or the leader's speaks for all", choices=("ring", "server"))
    leader: str = knob("parts", "each rank, for a part; or one at a time, in turn or drawn", choices=LEADERS, ablation=True)
    dense: int = knob(200, "steps in which everything travels; higher = a smoother start", least=0)
    learn: int = knob(300, "steps after these in which the autoencoder learns; higher = smaller errors of codes", least=1)
    first: str = knob(
        "auto", "how the first layer travels; auto = dense up to 1 % of the entries", choices=("auto", "dense", "code")
    )
    last: str = knob("topk", "how the last layer travels", choices=("topk", "code"), ablation=True)
    innovation: float = knob(1e-5, "of instance=server: share of its own entries each rank sends", above=0, most=1)
    decoder: str = knob("linear", "linear loses nothing; leaky, as published, does", choices=("linear", "leaky"), ablation=True)
    code: str = knob("auto", "precision of codes; auto = what sends less", choices=("auto", "half", "single"), ablation=True)
    places: str = knob("packed", "as few bits as tell them apart, or 32 each", choices=("packed", "plain"), ablation=True)
    bands: int = knob(16, "of like values; higher = smaller errors, more bytes for places", least=1)
    window: int = knob(4096, "entries of all ranks learned from in a step; lower = shorter steps", least=coding.LEAST)
    bound: float = knob(0.9, "relative error of codes above which a step waits; inf = none does", above=0, most=math.inf)
    wire: str = wire_knob()

    @property
    def traits(self) -> Traits:
        return Traits(whole_model=True, rates="used", ends=True)

    @property
    def serves(self) -> bool:
        return self.instance == "server"

    def init(self, layout: Layout, seed: int) -> LgcState:
        return LgcState(layout, seed, Phases(self.dense, self.learn), self.bound, self.first, self.last)

    def save(self, state: LgcState) -> dict[str, Any]:
        coder = state.coder
        own = {"decoders": coder and coder.decoders, "coder": coder and coder.save()}
        return {"phases": state.phases.save(), "error": state.error.save(), **own}

    def load(self, state: LgcState, saved: Mapping[str, Any]) -> None:
        state.phases.load(saved["phases"])
        state.error.load(saved["error"])
        state.coder = None
        if saved["coder"] is not None:
            state.coder = self._autoencoder(saved["decoders"], state)
            state.coder.load(saved["coder"])

    def common_state(self, state: LgcState) -> str:
        coder = state.coder if state.phases.now == CODE else None
        return state.phases.alike() + ("" if coder is None else f", weights {coder.digest()}")

    def stats(self, state: LgcState) -> dict[str, Any]:
        return {
            "phase": state.phase,
            "code_error": state.error.error,
            "code_off": float(state.error.off),
            "learning_seconds": state.stopwatch.seconds,
            "learned_anew": state.phases.falls,
        }

    def exchange(self, acc: Acc, state: LgcState, world: World) -> Steps:
        coder, update = self._coder(state, world), Update(state.update)
        state.phase = phase = state.phases.begin_step(acc.rates)
        if phase == DENSE:
            update = yield from dense.allreduce(acc, world, state.update)
        else:
            yield from self._in_common(acc, state, coder, world)
        state.phases.end(phase)
        if phase == LEARN and state.phases.now == CODE:
            coder.freeze((yield from reduce(coder.frozen(), 1 / world.size)))
        return update

    def _in_common(self, acc: Acc, state: LgcState, coder: Autoencoder, world: World) -> Asking[None]:
        """A step in which all ranks send the same few entries, as they are or as codes. Fills in the state's update."""
        update = state.update.zero_()
        yield from self._largest(_cut(acc, state.last), Update(update[state.last]), world)
        middle, out = _cut(acc, state.middle), update[state.middle]
        rows = yield from self._rows(middle, out, state, coder, world)
        if state.phase == LEARN:
            said, has, misses = yield from self._learn(rows, state, coder)
        else:
            said = yield from self._coded(rows, coder)
            has, misses = rows.normal, said.left / rows.support.scales
        first = _cut(acc, state.first)
        notes = state.error.note(has, misses, acc.flag, state.phases.fallen)
        total = yield from reduce(_behind(first, notes, state.ends), 1 / world.size)
        verdict = state.error.judge(total[-NOTES:])
        if state.phase == LEARN:
            verdict = verdict._replace(good=torch.ones_like(verdict.good))
        else:
            state.error.compare(total[-NOTES:], said.mean / rows.support.scales)
            if state.phases.see(verdict.mark):
                coder.draw()
        if len(first.residual):
            kernels.settle_all(first.residual, total[:-NOTES])
            update[state.first] = total[:-NOTES]
        rows.settle(middle.residual, middle.velocity, out, said, verdict)

    def _rows(self, middle: Acc, out: Tensor, state: LgcState, coder: Autoencoder, world: World) -> Asking[Rows]:
        """This rank's entries at the places that all ranks send alike. out is zero, and is again afterwards."""
        step, packed = state.phases.steps, self.places == "packed"
        leading = Leading(len(out), self.ratio, self.leader, self.bands, packed, state.seed, world, step)
        support = yield from self._lead(middle, leading, coder, coded=state.phase == CODE)
        told = yield from self._innovations(middle, support, out)
        return Rows(support.of(middle.residual), support, world, told)

    def _learn(self, rows: Rows, state: LgcState, coder: Autoencoder) -> Asking[tuple[Said, Tensor, Tensor]]:
        """Entries travel as they are, and the autoencoder learns: of a few, what this rank has and what codes would miss."""
        everyone = yield from coding.as_they_are(rows)
        with state.stopwatch:
            has, misses = coding.learn(rows, everyone, coder, self.window, state.phases.steps)
        return coding.exactly(rows, everyone), has, misses

    def _coded(self, rows: Rows, coder: Autoencoder) -> Asking[Said]:
        """Codes travel, or have come with the places."""
        if self.serves:
            return coding.from_led_codes(rows, coder)
        return (yield from coding.from_mean_code(rows, coder, self._halves(rows.world)))

    def _coder(self, state: LgcState, world: World) -> Autoencoder:
        """The autoencoder for so many ranks; of another number than before, as many decoders have to be learned."""
        decoders = world.size if self.serves else 1
        if state.coder is None or state.coder.decoders != decoders:
            if state.coder is not None:
                state.phases.learn_again()
            state.coder = self._autoencoder(decoders, state)
        return state.coder

    def _autoencoder(self, decoders: int, state: LgcState) -> Autoencoder:
        return Autoencoder(decoders, self.serves, self.decoder == "linear", state.seed, state.update.device)

    def _halves(self, world: World) -> bool:
        """Whether codes travel in half precision."""
        return self.code == "half" or (self.code == "auto" and (self.serves or world.size <= GAINS_BY_HALVES))

    def _largest(self, acc: Acc, update: Update, world: World) -> Asking[None]:
        """Send the largest entries of every rank's, as they are; the update is zero before."""
        n = len(acc.residual)
        if n:
            taken = CODECS[self.wire].take(acc, count_of(self.ratio, n), acc.velocity)
            yield from routes.allgather(acc, taken, world, into=update)

    def _lead(self, acc: Acc, leading: Leading, coder: Autoencoder, coded: bool) -> Asking[Support]:
        """The places at which all ranks send; and, where the leaders' codes speak for all, these."""
        own, code = leading.choose(acc.residual, acc.memory), None
        if coded and self.serves:
            dtype = torch.float16 if self._halves(leading.world) else torch.float32
            code = Field("code", dtype, autoencoder.CODE * autoencoder.code_places(leading.k))
            if own:
                row = acc.residual[leading.places_of(own["places"], leading.leaders.index(leading.world.rank))] / own["scale"]
                own["code"] = coding.encoded(coder, row[None])
        came = yield from leading.share(own, leading.form(code), acc.residual.device)
        places = torch.stack([leading.places_of(each["places"], row) for row, each in enumerate(came)])
        support = Support(places, torch.stack([each["scale"] for each in came]), leading.leaders)
        if code is None:
            return support
        codes = torch.stack([each["code"].float() for each in came])
        return support._replace(codes=codes.unflatten(1, (autoencoder.CODE, -1)))

    def _innovations(self, acc: Acc, support: Support, out: Tensor) -> Asking[Innovations | None]:
        """What each rank sends of its own where others lead. out is zero, and is again afterwards."""
        if not self.serves:
            return None
        n = len(acc.residual)
        count = count_of(self.innovation, n)
        codec = min(CODECS[self.wire], EXACT, key=lambda codec: payloads.size(codec.form(n, count)))
        taken = codec.take(Acc(acc.residual, acc.memory), count)
        kernels.add_sparse(acc.residual, *taken.entries)  # they stay until it is known what became of them
        came = yield from gather(codec.pack(taken, None))
        inside, outside = [], []
        for reply in came:
            values, indices, _ = codec.read(reply)
            places = indices.long().clamp(0, len(out) - 1)
            out.index_copy_(0, places, values)
            inside.append(support.of(out))
            support.write(out, torch.zeros_like(inside[-1]))
            outside.append((places, out[places]))
            out.index_fill_(0, places, 0.0)
        return Innovations(torch.stack(inside), outside)


def _cut(acc: Acc, where: slice) -> Acc:
    """A part of it, without what was noted of the whole."""
    return Acc(acc.residual[where], acc.memory, None if acc.velocity is None else acc.velocity[where], acc.flag)


def _behind(first: Acc, notes: Tensor, buffer: Tensor) -> Tensor:
    """The first layer as it is, and the notes."""
    if len(first.residual):
        kernels.offer_all(first.residual, buffer[: len(first.residual)], first.flag)
    buffer[len(first.residual) :] = notes
    return buffer
