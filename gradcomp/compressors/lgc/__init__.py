"""LGC: all ranks send entries at the same few indices, coded by an autoencoder that learns from early gradients.

L. Abrahamyan, Y. Chen, G. Bekoulis, N. Deligiannis, "Learned Gradient Compression for Distributed Deep Learning" (TNNLS 2021).
There are three phases. First all entries travel. Then a few entries travel as they are, and the autoencoder learns from them.
Then their codes travel. E encodes, D decodes, and x are a rank's entries at the common indices:

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

from gradcomp.compressors.lgc import autoencoder, common_entries
from gradcomp.compressors.lgc.autoencoder import Autoencoder
from gradcomp.compressors.lgc.common_entries import CommonEntries, CommonIndices, IndexSelection
from gradcomp.compressors.lgc.phases import CODE, DENSE, LEARN, SUMMARY_LENGTH, CodeError, Phases
from gradcomp.core.compressor import Acc, Compressor, Layout, Steps, Traits
from gradcomp.core.requests import Field, Requests, World, reduce
from gradcomp.exchanges import routes
from gradcomp.knobs import knob
from gradcomp.messages.sparse import CODECS, count_of, ratio_knob, wire_knob
from gradcomp.native import kernels
from gradcomp.native.memory import Update
from gradcomp.saved import entry, read_int, table

# The largest share of the entries with which first=auto sends the first layer dense.
SMALL_FIRST_LAYER = 0.01


@dataclass(frozen=True)
class Lgc(Compressor):
    """Sends codes of k = max(1, ceil(ratio * n)) entries; n counts the model's entries without the first and last layer."""

    ratio: float = ratio_knob()
    instance: str = knob(
        "ring", "ring: codes of all ranks are averaged; server: the leader's code serves all", choices=("ring", "server")
    )
    dense: int = knob(200, "dense steps at the start; higher = a smoother start", least=0)
    learn: int = knob(300, "learning steps, after the dense ones; higher = smaller coding errors", least=1)
    first: str = knob(
        "auto", "route of the first layer; auto = dense if it has at most 1 % of the entries", choices=("auto", "dense", "code")
    )
    innovation: float = knob(1e-5, "share of entries that each rank also sends uncoded, with instance=server", above=0, most=1)
    bands: int = knob(16, "bands that sort entries by value; higher = smaller errors, more bytes for indices", least=1)
    window: int = knob(
        4096, "entries of all ranks in a learning step; lower = shorter steps", least=common_entries.SHORTEST_WINDOW
    )
    max_code_error: float = knob(
        0.9,
        "relative coding error above which a step's entries stay in the residual; inf = none",
        above=0,
        most=math.inf,
    )
    wire: str = wire_knob()

    @property
    def traits(self) -> Traits:
        return Traits(whole_model=True, selects=True, rates="used", ends=True, learns=True)

    @property
    def has_server(self) -> bool:
        return self.instance == "server"

    def init(self, layout: Layout, seed: int) -> LgcState:
        return LgcState(layout, seed, self)

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
            state.coder = self._autoencoder(read_int(saved, "decoders", 1), state)
            state.coder.load(table(saved, "coder"))
        elif state.phases.steps > 0:
            raise ValueError("the state has steps of lgc, but its coder is None; the state is damaged; load another one")

    save_shared, load_shared = save, load  # all ranks share all of it

    def stats(self, state: LgcState) -> dict[str, Any]:
        return {
            "phase": state.phase,
            "code_error": state.error.error,
            "learned_anew": state.phases.relearned,
        }

    def exchange(self, acc: Acc, state: LgcState, world: World) -> Steps:
        coder, update = self._coder(state, world), Update(state.update)
        state.phase = phase = state.phases.begin_step(acc.rates)
        if phase == DENSE:
            update = yield from routes.send_all(acc, world, state.update)
        else:
            yield from self._exchange_sparse(acc, state, coder, world)
        state.phases.end_step(phase)
        if phase == LEARN and state.phases.current == CODE:
            coder.adopt((yield from reduce(coder.shared_values(), 1 / world.size)))
        return update

    def _exchange_sparse(self, acc: Acc, state: LgcState, coder: Autoencoder, world: World) -> Requests[None]:
        """Exchange the last layer, the middle and the first layer, and fill in the state's update."""
        update = state.update.zero_()
        last = _slice(acc, state.last)
        if n := len(last.residual):
            taken = CODECS[self.wire].take(last, count_of(self.ratio, n), last.ages, packs=True)
            yield from routes.allgather(last, taken, world, into=Update(update[state.last]))
        middle, middle_update = _slice(acc, state.middle), update[state.middle]
        entries = yield from self._select_entries(middle, middle_update, state, coder, world)
        if state.phase == LEARN:
            shared, checked, errors = yield from common_entries.learn(entries, coder, self.window, state.phases.steps)
        else:
            if self.has_server:
                shared = common_entries.decode_leader_codes(entries, coder)
            else:
                shared = yield from common_entries.exchange_codes(entries, coder)
            checked, errors = entries.normalised, shared.error / entries.common.scales
        first = _slice(acc, state.first)
        summary = state.error.summarise(checked, errors, acc.flag, state.phases.rate_fell)
        total = yield from reduce(_join(first, summary, state.first_buffer, world.share), world.mean_of_shares)
        first_update, summary = total[:-SUMMARY_LENGTH], total[-SUMMARY_LENGTH:]
        check = state.error.check(summary)
        if state.phase == LEARN:
            check = check._replace(accepted=torch.ones_like(check.accepted))
        elif state.phases.observe(check.mark):
            coder.draw_weights()
        if len(first.residual):
            kernels.settle_all(first.residual, first_update)
            update[state.first] = first_update
            if first.ages is not None:
                first.ages.masked_fill_(first_update[:1].isfinite(), 0)
        entries.settle(middle, middle_update, shared, check)

    def _select_entries(
        self, middle: Acc, zeros: Tensor, state: LgcState, coder: Autoencoder, world: World
    ) -> Requests[CommonEntries]:
        """Agree on the common indices and return this rank's entries there. zeros: scratch that is zero again afterwards."""
        selection = IndexSelection(len(zeros), world, state.phases.steps, self.ratio, self.bands)
        common = yield from self._share_indices(middle, selection, coder, coded=state.phase == CODE)
        innovations = None
        if self.has_server:
            count = count_of(self.innovation, len(zeros))
            innovations = yield from common_entries.gather_innovations(middle, common, count, CODECS[self.wire], zeros)
        return CommonEntries(common.read(middle.residual), common, world, innovations)

    def _coder(self, state: LgcState, world: World) -> Autoencoder:
        """Return the autoencoder for this number of ranks. New decoders must be learned if the number has changed."""
        decoders = world.size if self.has_server else 1
        if state.coder is None or state.coder.decoders != decoders:
            if state.coder is not None:
                state.phases.learn_again()
            state.coder = self._autoencoder(decoders, state)
        return state.coder

    def _autoencoder(self, decoders: int, state: LgcState) -> Autoencoder:
        return Autoencoder(decoders, self.has_server, state.seed, state.update.device)

    def _share_indices(self, acc: Acc, selection: IndexSelection, coder: Autoencoder, coded: bool) -> Requests[CommonIndices]:
        """Send the leaders' indices to all ranks, and the leaders' codes if instance=server uses codes now."""
        chosen, code = selection.choose(acc.residual, acc.memory), None
        if coded and self.has_server:
            code = Field("code", torch.float16, autoencoder.CODE_CHANNELS * autoencoder.code_length(selection.k))
            if chosen:
                indices = selection.locate(chosen["indices"], selection.leaders.index(selection.world.rank))
                chosen["code"] = common_entries.encode(coder, (acc.residual[indices] / chosen["scale"])[None])
        received = yield from selection.share(chosen, selection.form(code), acc.residual.device)
        indices = torch.stack([selection.locate(payload["indices"], row) for row, payload in enumerate(received)])
        scales = torch.stack([payload["scale"] for payload in received])
        codes = None
        if code is not None:
            codes = torch.stack([payload["code"].float() for payload in received])
            codes = codes.unflatten(1, (autoencoder.CODE_CHANNELS, -1))
        return CommonIndices(indices, scales, selection.leaders, codes)


class LgcState:
    """The model's state between steps, and the split of the model into last layer, middle and first layer."""

    def __init__(self, layout: Layout, seed: int, knobs: Lgc):
        self.seed, self.phases, self.phase = seed, Phases(knobs.dense, knobs.learn), DENSE
        self.error = CodeError(knobs.max_code_error, seed, layout.device)
        self.coder: Autoencoder | None = None
        last_end, first_begin = _middle(layout)  # a bucket begins with the model's last layer
        is_large = layout.total - first_begin > SMALL_FIRST_LAYER * layout.total
        if knobs.first == "code" or (knobs.first == "auto" and is_large):
            first_begin = layout.total
        self.last, self.middle = slice(0, last_end), slice(last_end, first_begin)
        self.first = slice(first_begin, layout.total)
        self.update = torch.zeros(layout.total, device=layout.device)
        self.first_buffer = torch.zeros(layout.total - first_begin + SUMMARY_LENGTH, device=layout.device)


def _slice(acc: Acc, span: slice) -> Acc:
    """Slice acc, without the statistics of the whole."""
    return Acc(acc.residual[span], acc.memory, None if acc.ages is None else acc.ages[span], acc.flag)


def _join(first: Acc, summary: Tensor, buffer: Tensor, share: float) -> Tensor:
    """Write shares of the first layer as it is, and of the summary behind it, into a buffer."""
    if len(first.residual):
        kernels.offer_all(first.residual, buffer[: len(first.residual)], first.flag, share)
    buffer[len(first.residual) :] = share * summary
    return buffer


def _middle(layout: Layout) -> tuple[int, int]:
    """Return where the entries between the last and the first layer begin and end.

    Here a layer is a module with all its parameters. The whole model is the middle if nothing lies between the two.
    """
    modules = [_module(name) for name in layout.names]
    spans = [span for span, module in zip(layout.spans, modules, strict=True) if module not in (modules[0], modules[-1])]
    return (spans[0][0], spans[-1][1]) if spans else (0, layout.total)


def _module(name: str) -> str:
    """Return the name of a parameter's module. A parameter with a number for a name, or no module, is a module of its own."""
    head, _, leaf = name.rpartition(".")
    return name if not head or leaf.isdigit() else head
