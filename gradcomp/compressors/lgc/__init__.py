"""LGC: all ranks send entries at the same few places, coded by an autoencoder that learns from early gradients.

L. Abrahamyan, Y. Chen, G. Bekoulis, N. Deligiannis, "Learned Gradient Compression for Distributed Deep Learning" (TNNLS 2021).
There are three phases. First all entries travel. Then a few entries travel as they are, and the autoencoder learns from them.
Then their codes travel. E encodes, D decodes, and x are a rank's entries at the common places:

    ring      z <- mean of all ranks' E(x);  y <- D(z)                     is the update, and x - D(E(x)) stays with each rank
    server    z <- E(x) of the leader;  y_r <- D_r(z, innovation of r)     for every rank r; the update is the mean of all y_r,
                                                                           and x - y_r stays with rank r

The first layer is reduced as it is. Each rank sends its own largest entries of the last layer. Every rank is its own server,
since the replies of one server would cost more bytes than codes save.
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
from gradcomp.compressors.lgc.code_error import SUMMARY_LENGTH
from gradcomp.compressors.lgc.coding import CommonEntries, SharedMean
from gradcomp.compressors.lgc.common_places import LEADERS, CommonPlaces, PlaceSelection
from gradcomp.compressors.lgc.phases import CODE, DENSE, LEARN, Phases
from gradcomp.compressors.lgc.state import LgcState
from gradcomp.core.compressor import Acc, Compressor, Layout, Steps, Traits
from gradcomp.core.requests import Field, Requests, World, reduce
from gradcomp.exchanges import dense, routes
from gradcomp.knobs import knob
from gradcomp.messages.sparse import CODECS, count_of, ratio_knob, wire_knob
from gradcomp.native import kernels
from gradcomp.native.memory import Update
from gradcomp.saved import entry, table, whole

# With at most this many ranks, gathering codes in half precision sends fewer bytes than summing codes in single precision.
MOST_RANKS_FOR_HALF = 4


@dataclass(frozen=True)
class Lgc(Compressor):
    """Sends codes of k = max(1, ceil(ratio * n)) entries; n counts the model's entries without the first and last layer."""

    ratio: float = ratio_knob()
    instance: str = knob(
        "ring", "ring: codes of all ranks are averaged; server: the leader's code serves all", choices=("ring", "server")
    )
    leader: str = knob(
        "parts", "parts: each rank leads a part; rotate, seed: one leader, in turn or at random", choices=LEADERS
    )
    dense: int = knob(200, "dense steps at the start; higher = a smoother start", least=0)
    learn: int = knob(300, "learning steps, after the dense ones; higher = smaller coding errors", least=1)
    first: str = knob(
        "auto", "route of the first layer; auto = dense if it has at most 1 % of the entries", choices=("auto", "dense", "code")
    )
    last: str = knob("topk", "route of the last layer", choices=("topk", "code"))
    innovation: float = knob(1e-5, "share of entries that each rank also sends uncoded, with instance=server", above=0, most=1)
    decoder: str = knob("linear", "linear loses nothing; leaky, as published, loses gradient", choices=("linear", "leaky"))
    code: str = knob("auto", "precision of codes; auto = the one with fewer bytes", choices=("auto", "half", "single"))
    places: str = knob("packed", "packed: as few bits as possible; plain: 32 bits a place", choices=("packed", "plain"))
    bands: int = knob(16, "bands that sort entries by value; higher = smaller errors, more bytes for places", least=1)
    window: int = knob(4096, "entries of all ranks in a learning step; lower = shorter steps", least=coding.SHORTEST_WINDOW)
    bound: float = knob(0.9, "relative coding error above which a step's entries wait; inf = none wait", above=0, most=math.inf)
    wire: str = wire_knob()

    @property
    def traits(self) -> Traits:
        return Traits(whole_model=True, selects=True, rates="used", ends=True, learns=True)

    @property
    def has_server(self) -> bool:
        return self.instance == "server"

    def init(self, layout: Layout, seed: int) -> LgcState:
        return LgcState(layout, seed, Phases(self.dense, self.learn), self.bound, self.first, self.last)

    def save(self, state: LgcState) -> dict[str, Any]:
        coder = state.coder
        return {
            "phases": state.phases.save(),
            "error": state.error.save(),
            "decoders": coder and coder.decoders,
            "coder": coder and coder.save(),
        }

    def load(self, state: LgcState, saved: Mapping[str, Any]) -> None:
        state.phases.load(table(saved, "phases"))
        state.error.load(table(saved, "error"))
        state.coder = None
        if entry(saved, "coder") is not None:
            state.coder = self._autoencoder(whole(saved, "decoders", 1), state)
            state.coder.load(table(saved, "coder"))
        elif state.phases.steps > 0:
            raise ValueError("the state has steps of lgc, but its coder is None; the state is damaged; load another one")

    save_shared, load_shared = save, load  # all ranks share all of it

    def stats(self, state: LgcState) -> dict[str, Any]:
        return {
            "phase": state.phase,
            "code_error": state.error.error,
            "code_off": float(state.error.imbalance),
            "learning_seconds": state.stopwatch.seconds,
            "learned_anew": state.phases.relearned,
        }

    def exchange(self, acc: Acc, state: LgcState, world: World) -> Steps:
        coder, update = self._coder(state, world), Update(state.update)
        state.phase = phase = state.phases.begin_step(acc.rates)
        if phase == DENSE:
            update = yield from dense.allreduce(acc, world, state.update)
        else:
            yield from self._exchange_sparse(acc, state, coder, world)
        state.phases.end_step(phase)
        if phase == LEARN and state.phases.current == CODE:
            coder.adopt((yield from reduce(coder.shared_values(), 1 / world.size)))
        return update

    def _exchange_sparse(self, acc: Acc, state: LgcState, coder: Autoencoder, world: World) -> Requests[None]:
        """Exchange the last layer, the middle and the first layer, and fill in the state's update."""
        update = state.update.zero_()
        yield from self._send_largest(_slice(acc, state.last), Update(update[state.last]), world)
        middle, middle_update = _slice(acc, state.middle), update[state.middle]
        entries = yield from self._select_entries(middle, middle_update, state, coder, world)
        if state.phase == LEARN:
            shared, checked, errors = yield from self._learn(entries, state, coder)
        else:
            shared = yield from self._exchange_codes(entries, coder)
            checked, errors = entries.normalised, shared.error / entries.places.scales
        first = _slice(acc, state.first)
        summary = state.error.summarise(checked, errors, acc.flag, state.phases.rate_fell)
        total = yield from reduce(_join(first, summary, state.first_buffer, world.share), world.mean_of_shares)
        first_update, summary = total[:-SUMMARY_LENGTH], total[-SUMMARY_LENGTH:]
        check = state.error.check(summary)
        if state.phase == LEARN:
            check = check._replace(accepted=torch.ones_like(check.accepted))
        else:
            state.error.measure_imbalance(summary, shared.mean / entries.places.scales)
            if state.phases.observe(check.mark):
                coder.draw_weights()
        if len(first.residual):
            kernels.settle_all(first.residual, first_update)
            update[state.first] = first_update
            if first.mask is not None:
                first.mask.note_all(first_update[:1].isfinite())
        entries.settle(middle.residual, middle.mask, middle_update, shared, check)

    def _select_entries(
        self, middle: Acc, zeros: Tensor, state: LgcState, coder: Autoencoder, world: World
    ) -> Requests[CommonEntries]:
        """Agree on the common places and return this rank's entries there. zeros: scratch that is zero again afterwards."""
        selection = PlaceSelection(
            len(zeros),
            world,
            state.phases.steps,
            ratio=self.ratio,
            leader=self.leader,
            bands=self.bands,
            packed=self.places == "packed",
            seed=state.seed,
        )
        places = yield from self._share_places(middle, selection, coder, coded=state.phase == CODE)
        innovations = None
        if self.has_server:
            count = count_of(self.innovation, len(zeros))
            innovations = yield from coding.gather_innovations(middle, places, count, CODECS[self.wire], zeros)
        return CommonEntries(places.read(middle.residual), places, world, innovations)

    def _learn(
        self, entries: CommonEntries, state: LgcState, coder: Autoencoder
    ) -> Requests[tuple[SharedMean, Tensor, Tensor]]:
        """Gather all ranks' entries uncoded, and learn from a window of them.

        Return the mean, this rank's entries in the window, and their coding errors.
        """
        all_ranks = yield from coding.gather_entries(entries)
        with state.stopwatch:
            checked, errors = coding.learn(entries, all_ranks, coder, self.window, state.phases.steps)
        return coding.exact_mean(all_ranks, entries.world.share), checked, errors

    def _exchange_codes(self, entries: CommonEntries, coder: Autoencoder) -> Requests[SharedMean]:
        """Exchange all ranks' codes, unless the leaders' codes have come with the places."""
        if self.has_server:
            return coding.decode_leader_codes(entries, coder)
        return (yield from coding.exchange_codes(entries, coder, self._half_precision(entries.world)))

    def _coder(self, state: LgcState, world: World) -> Autoencoder:
        """Return the autoencoder for this number of ranks. New decoders must be learned if the number has changed."""
        decoders = world.size if self.has_server else 1
        if state.coder is None or state.coder.decoders != decoders:
            if state.coder is not None:
                state.phases.learn_again()
            state.coder = self._autoencoder(decoders, state)
        return state.coder

    def _autoencoder(self, decoders: int, state: LgcState) -> Autoencoder:
        return Autoencoder(decoders, self.has_server, self.decoder == "linear", state.seed, state.update.device)

    def _half_precision(self, world: World) -> bool:
        """Return whether codes travel in half precision."""
        return self.code == "half" or (self.code == "auto" and (self.has_server or world.size <= MOST_RANKS_FOR_HALF))

    def _send_largest(self, acc: Acc, update: Update, world: World) -> Requests[None]:
        """Send this rank's largest entries as they are. The update must be zero."""
        n = len(acc.residual)
        if n:
            taken = CODECS[self.wire].take(acc, count_of(self.ratio, n), acc.mask, packs=True)
            yield from routes.allgather(acc, taken, world, into=update)

    def _share_places(self, acc: Acc, selection: PlaceSelection, coder: Autoencoder, coded: bool) -> Requests[CommonPlaces]:
        """Send the leaders' places to all ranks, and the leaders' codes if instance=server uses codes now."""
        chosen, code = selection.choose(acc.residual, acc.memory), None
        if coded and self.has_server:
            dtype = torch.float16 if self._half_precision(selection.world) else torch.float32
            code = Field("code", dtype, autoencoder.CODE_CHANNELS * autoencoder.code_length(selection.k))
            if chosen:
                places = selection.locate(chosen["places"], selection.leaders.index(selection.world.rank))
                chosen["code"] = coding.encode(coder, (acc.residual[places] / chosen["scale"])[None])
        received = yield from selection.share(chosen, selection.form(code), acc.residual.device)
        places = torch.stack([selection.locate(payload["places"], row) for row, payload in enumerate(received)])
        scales = torch.stack([payload["scale"] for payload in received])
        codes = None
        if code is not None:
            codes = torch.stack([payload["code"].float() for payload in received])
            codes = codes.unflatten(1, (autoencoder.CODE_CHANNELS, -1))
        return CommonPlaces(places, scales, selection.leaders, codes)


def _slice(acc: Acc, span: slice) -> Acc:
    """Slice acc, without the statistics of the whole."""
    return Acc(acc.residual[span], acc.memory, None if acc.mask is None else acc.mask.part(span), acc.flag)


def _join(first: Acc, summary: Tensor, buffer: Tensor, share: float) -> Tensor:
    """Write shares of the first layer as it is, and of the summary behind it, into a buffer."""
    if len(first.residual):
        kernels.offer_all(first.residual, buffer[: len(first.residual)], first.flag, share)
    buffer[len(first.residual) :] = share * summary
    return buffer
