"""SDAGC: in each layer, what exceeds a multiple of the standard deviation travels; the rest waits in the residual.

M. Chen, Z. Yan, J. Ren, W. Wu, "Standard Deviation based Adaptive Gradient Compression for Distributed Deep Learning" (CCGRID
2020). Only its abstract could be read. It names the parts: a threshold from each layer's standard deviation, residual
accumulation, local gradient clipping, momentum compensation, adaptive learning-rate revision. How they fit together here is
reconstructed, and every part can be switched:

    g <- clipped gradient;  u <- m u + g;  v <- v + u;  send v where |v| > lam * sigma(v), layer by layer;  v, u <- 0 there

Clipping, momentum correction with masking, and warm-up are the knobs clip, momentum and warmup of every compressor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradcomp.compressors.dense import Dense
from gradcomp.compressors.sdagc.capacity import Capacity
from gradcomp.compressors.sdagc.rate_revision import OF_RATES, REVISIONS, WAITING, Ages, rescale
from gradcomp.exchanges import dense, routes
from gradcomp.knobs import knob
from gradcomp.messages.payload import whole
from gradcomp.messages.sparse import CODECS, wire_knob
from gradcomp.native import kernels
from gradcomp.protocol import Acc, Compressor, Layer, Layout, Steps, Traits
from gradcomp.requests import World, gather

TINY = 1024
BIAS = 1 << 16
MOMENTS = ("accumulated", "raw")
SMALL = ("dense", "pool", "none")


@dataclass(frozen=True)
class Sdagc(Compressor):
    """Per-layer standard-deviation thresholds. Of normally distributed entries lam=3.3 sends a thousandth, of Laplace's 4.9."""

    lam: float = knob(3.3, "threshold in standard deviations; higher = fewer bytes, staler gradients", least=0, most=16)
    density: float = knob(0.0, "share of entries that lam is steered to; 0 = lam stays", least=0, below=1)
    stat: Literal["accumulated", "raw"] = knob(
        "accumulated", "sigma of what has accumulated, or of the raw gradient", choices=MOMENTS, ablation=True
    )
    sigma: str = knob("mean", "deviation from the mean, or from zero", choices=("mean", "zero"), ablation=True)
    shared: bool = knob(False, "one sigma for all ranks: another small exchange", ablation=True)
    per: str = knob("layer", "one threshold a layer, or a bucket", choices=("layer", "bucket"), ablation=True)
    small: str = knob(
        "dense", "tiny and one-dimensional layers: dense, a pool with one threshold, or none set apart", choices=SMALL
    )
    live: bool = knob(True, "a layer in which nothing exceeds the threshold sends its largest entry", ablation=True)
    cap: float = knob(
        0.05, "at most this share of a bucket travels in a burst; the largest do, the rest waits", above=0, most=1
    )
    flush: int = knob(0, "every so many steps all of the residual travels; 0 = never", least=0)
    sam: float = knob(0.0, "SAMomentum: what is sent leaves this times itself behind; replaces momentum", least=0, below=1)
    lr_revision: str = knob("none", "how a changing or late learning rate acts on what waits", choices=REVISIONS)
    route: str = routes.route_knob()
    wire: str = wire_knob()

    @property
    def traits(self) -> Traits:
        needs = self.lr_revision in OF_RATES
        return Traits(moments=self.stat, sparse=True, momentum=self.sam, rates="needed" if needs else "unused")

    def refuses(self, feedback: bool) -> str | None:
        if feedback or not (self.sam or self.flush or self.lr_revision in ("keep", "rescale", *WAITING)):
            return None
        return "sam, flush and lr_revision act on what waits, and with feedback=false nothing does"

    def choose(self, name: str, layer: Layer) -> Compressor:
        """Where small layers go. One dimension alone does not make a layer small: no bias has more than 2^16 entries."""
        if self.small == "none" or not (layer.size < TINY or (layer.dims < 2 and layer.size <= BIAS)):
            return self
        return Dense() if self.small == "dense" else replace(self, small="none", per="bucket")

    def ease(self, progress: float) -> Sdagc:
        """Laplace's tail is exp(-sqrt(2) lam): a share of lam is the same power of the density."""
        return replace(self, lam=self.lam * progress, density=self.density**progress if self.density else 0.0)

    def init(self, layout: Layout, seed: int) -> SdagcState:
        return SdagcState(layout)

    def revise(self, residual: Tensor, velocity: Tensor | None, state: SdagcState, rates: tuple[float, ...]) -> None:
        before, state.rates = state.rates, rates
        if before is not None and before != rates and self.lr_revision in ("keep", "rescale"):
            rescale(self.lr_revision, (residual, velocity), state.begins, before, rates)

    def exchange(self, acc: Acc, state: SdagcState, world: World) -> Steps:
        state.steps += 1
        target = self._target(acc, state)
        capacity = self._capacity(state, target)
        # In a flush, and where entries would cost what a dense exchange costs, everything goes.
        moments = acc.moments
        assert moments is not None
        if self.shared:  # also where everything goes: the parts of a host ask for the same, whatever room each has found
            replies = yield from gather(whole(moments.view(-1)))
            moments = together([reply["bytes"].view(moments.shape) for reply in replies], world.rank, state.sizes)
        as_much_as_dense = CODECS[self.wire].entry_bytes * capacity.entries >= 4 * acc.residual.numel()
        if (self.flush and state.steps % self.flush == 0) or as_much_as_dense:
            # A buffer of its own only where it is needed: most buckets never are.
            state.buffer = torch.empty_like(acc.residual) if state.buffer is None else state.buffer
            return (yield from dense.allreduce(acc, world, state.buffer, keep=self.sam, mask=True))
        kernels.set_thresholds(
            moments,
            state.ends,
            state.lam,
            state.centers,
            state.thresholds,
            from_zero=self.sigma == "zero",
            live=self.live,
            pooled=self.per == "bucket",
        )
        taken = routes.codec(self.wire, self.route).allocate(acc, capacity.entries)
        layers, masked = (state.ends, state.centers, state.thresholds), routes.masked(acc, self.route)
        kernels.take_above(acc.residual, *layers, *taken.entries, masked, acc.flag, acc.peaks, acc.memory)
        if target is not None:
            kernels.steer(state.lam, taken.entries.header, target)
        if self.lr_revision in WAITING:
            state.ages = state.ages or Ages(acc.residual.numel(), state.ends)
            state.ages.revise(taken.entries, state.steps, by_layer=self.lr_revision == "per_layer")
        return (yield from routes.exchange(acc, taken, world, self.route, keep=self.sam, seen=capacity.see))

    def save(self, state: SdagcState) -> dict[str, Any]:
        kept: dict[str, Any] = {"steps": state.steps, "lam": float(state.lam), "set_for": state.set_for, "rates": state.rates}
        kept["first_rate"] = state.first_rate
        kept["capacity"] = None if state.capacity is None else state.capacity.save()
        kept["ages"] = None if state.ages is None else state.ages.last.clone()
        return kept

    def load(self, state: SdagcState, saved: Mapping[str, Any]) -> None:
        state.steps, state.set_for, state.rates = saved["steps"], tuple(saved["set_for"]), saved["rates"]
        state.lam.fill_(saved["lam"])
        state.first_rate = saved["first_rate"]
        if saved["capacity"] is not None:
            state.capacity = Capacity(*self._expected(state.set_for, state.n))
            state.capacity.load(saved["capacity"])
        if saved["ages"] is not None:
            state.ages = Ages(state.n, state.ends)
            state.ages.last.copy_(saved["ages"])

    def _target(self, acc: Acc, state: SdagcState) -> int | None:
        """How many entries lam is steered to."""
        if not self.density:
            return None
        share = self.density
        if self.lr_revision == "density" and acc.rates is not None:  # compress harder as the rate falls
            state.first_rate = state.first_rate or max(acc.rates)
            share *= min(1.0, max(acc.rates) / state.first_rate) if state.first_rate else 1.0
        return max(1, math.ceil(share * acc.residual.numel()))

    def _capacity(self, state: SdagcState, target: int | None) -> Capacity:
        """The room of the payload; begun anew where lam or the target is another one than before, as in a warm-up."""
        wanted = (self.lam, target or 0)
        if state.capacity is None or state.set_for != wanted:
            if state.set_for[:1] != wanted[:1] or not self.density:
                state.lam.fill_(self.lam)
            state.set_for = wanted
            state.capacity = Capacity(*self._expected(wanted, state.n))
        return state.capacity

    def _expected(self, wanted: tuple[float, int], n: int) -> tuple[int, int, bool]:
        lam, target = wanted
        if target:
            capacity = min(n, math.ceil(1.1 * target))
            return capacity, capacity, True
        capacity = min(n, max(1, math.ceil(1.25 * laplace_density(lam) * n)))
        return capacity, max(capacity, math.ceil(self.cap * n)), False


class SdagcState:
    """What sdagc keeps of a bucket between steps."""

    def __init__(self, layout: Layout):
        self.n = layout.total
        self.sizes = torch.tensor(layout.sizes, dtype=torch.float64, device=layout.device)
        ends = torch.tensor(layout.sizes).cumsum(0)
        self.begins: Sequence[int] = [0, *ends.tolist()]
        self.ends = ends.to(torch.int32).to(layout.device)
        self.centers = torch.zeros(len(layout.sizes), device=layout.device)
        self.thresholds = torch.zeros(len(layout.sizes), device=layout.device)
        self.lam = torch.zeros(1, device=layout.device)
        self.steps = 0
        self.set_for: tuple[float, int] = (-1.0, 0)
        self.capacity: Capacity | None = None
        self.rates: tuple[float, ...] | None = None
        self.first_rate = 0.0
        self.ages: Ages | None = None
        self.buffer: Tensor | None = None


def laplace_density(lam: float) -> float:
    """The share of Laplace-distributed entries beyond lam standard deviations."""
    return math.exp(-math.sqrt(2) * lam)


def together(moments: Sequence[Tensor], rank: int, sizes: Tensor) -> Tensor:
    """The statistics of all ranks' layers as if of one, rank by rank alike; smallest and largest stay this rank's own."""
    all_ranks = torch.stack(list(moments))
    found = all_ranks.mean(0)
    apart = all_ranks[:, :, 0] - found[:, 0]
    found[:, 1] += sizes * apart.square().mean(0)
    found[:, 2:4] = all_ranks[rank, :, 2:4]
    return found
