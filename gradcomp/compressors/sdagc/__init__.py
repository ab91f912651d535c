"""SDAGC: the entries above a multiple of the standard deviation are sent; the other entries wait in the residual.

M. Chen, Z. Yan, J. Ren, W. Wu, "Standard Deviation based Adaptive Gradient Compression for Distributed Deep Learning" (CCGRID
2020). Only the paper's abstract was available. It names the parts: a threshold from each layer's standard deviation, residual
accumulation, local gradient clipping, momentum compensation, adaptive learning-rate revision. The way they fit together here is
a reconstruction, and every part can be switched:

    g <- clipped gradient;  u <- m u + g;  v <- v + u;  send v where |v| > lam * sigma(v);  v, u <- 0 there

The knobs clip, momentum and warmup, which every compressor has, give clipping, momentum correction with masking, and warm-up.
Error feedback lets entries act with the learning rate of their own step. lr_revision=density lowers the knob density as the
rate falls. staleness and per_layer divide a sent entry by the steps that it waited, or by the mean over its layer's entries.

By default, lam is steered to send the share density, and one threshold serves a bucket: per=layer and small=dense, which the
abstract's words come closest to, cost accuracy (docs/decisions/sdagc.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradcomp import knobs
from gradcomp.compressors.dense import Dense
from gradcomp.compressors.sdagc.capacity import Capacity
from gradcomp.compressors.sdagc.distribution import laplace_density, laplace_threshold, merge_moments
from gradcomp.compressors.sdagc.rate_revision import AGE_REVISIONS, REVISIONS, Ages
from gradcomp.compressors.sdagc.state import SdagcState
from gradcomp.core.compressor import Acc, Compressor, Layer, Layout, Steps, Traits
from gradcomp.core.requests import World, gather
from gradcomp.exchanges import dense, routes
from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import wire_knob
from gradcomp.native.kernels import Bar
from gradcomp.saved import checked_whole, entry, number, sequence, table, tensor, whole

# A layer with fewer entries is small.
SMALL_SIZE = 1024
# A one-dimensional layer with at most this many entries is small: no bias is longer.
LARGEST_BIAS = 1 << 16
# The steps that an entry's age counts in 32 bits.
MOST_STEPS = 2**31 - 1
# The gradients that sigma may describe.
STATISTICS = ("accumulated", "raw")
# The ways of small layers.
SMALL_LAYER_MODES = ("dense", "pool", "none")


@dataclass(frozen=True)
class Sdagc(Compressor):
    """Sends entries above a threshold. lam=3.3 sends 0.1 % of normal entries, lam=4.9 of Laplace entries."""

    density: float = knob(0.01, "share of entries sent, with lam=auto; lower = fewer bytes, staler gradients", above=0, below=1)
    lam: float | str = knob(
        "auto",
        "threshold in standard deviations; auto: steered to send density; a number: fixed",
        least=0,
        most=16,
        word="auto",
    )
    stat: Literal["accumulated", "raw"] = knob(
        "accumulated", "sigma of the accumulated gradient, or of the raw one", choices=STATISTICS, ablation=True
    )
    sigma: str = knob("mean", "deviation from the mean or from zero", choices=("mean", "zero"), ablation=True)
    shared: bool = knob(False, "one sigma for all ranks; costs a small exchange", ablation=True)
    per: str = knob("bucket", "scope of a threshold; layer: as published", choices=("layer", "bucket"))
    small: str = knob(
        "none",
        "tiny and one-dimensional layers: dense; pool = one threshold for all; none = like other layers",
        choices=SMALL_LAYER_MODES,
    )
    live: bool = knob(True, "a layer without entries above its threshold sends its largest one", ablation=True)
    cap: float = knob(
        0.05,
        "largest share of a bucket in a burst, with a lam that is fixed and implies less; the largest entries go first",
        above=0,
        most=1,
    )
    flush: int = knob(0, "steps between sends of the whole residual; 0 = never", least=0)
    sam: float = knob(0.0, "SAMomentum: share of a sent entry that stays in the residual; replaces momentum", least=0, below=1)
    lr_revision: str = knob(
        "none",
        "density: lower a set density as the rate falls; staleness, per_layer: divide by steps waited",
        choices=REVISIONS,
    )
    route: str = routes.route_knob()
    wire: str = wire_knob()

    for_auto: ClassVar[Mapping[str, Sequence[str]]] = {"high": ["sdagc"]}

    @property
    def traits(self) -> Traits:
        rates: Literal["needed", "unused"] = "needed" if self.lr_revision == "density" else "unused"
        return Traits(moments=self.stat, sparse=True, selects=True, momentum=self.sam, rates=rates)

    def refuses(self, feedback: bool) -> str | None:
        typed_knobs = {setting.partition("=")[0]: setting for setting in knobs.changed(self)}
        steers = typed_knobs.get("density") or ("lr_revision=density" if self.lr_revision == "density" else None)
        if "lam" in typed_knobs and steers:
            return f"{steers} steers lam, and {typed_knobs['lam']} fixes it; remove {typed_knobs['lam']} or {steers}"
        if "cap" in typed_knobs and "lam" not in typed_knobs:
            cap = typed_knobs["cap"]
            return f"{cap} bounds bursts above a lam that is fixed; remove it, or set lam, since density bounds what is sent"
        needs_residual = {"sam": self.sam, "flush": self.flush, "lr_revision": self.lr_revision in AGE_REVISIONS}
        settings = [setting for name, setting in typed_knobs.items() if needs_residual.get(name)]
        if feedback or not settings:
            return None
        typed = " and ".join(settings)
        return f"{typed} cannot work with feedback=false, which clears the residual; remove feedback=false or {typed}"

    def choose(self, name: str, layer: Layer) -> Compressor:
        """Choose the compressor of a layer: small layers follow the knob small, the others use this one."""
        is_small = layer.size < SMALL_SIZE or (layer.dims < 2 and layer.size <= LARGEST_BIAS)
        if self.small == "none" or not is_small:
            return self
        return Dense() if self.small == "dense" else replace(self, small="none", per="bucket")

    def ease(self, progress: float) -> Sdagc:
        """Lower lam for a warm-up. A share p of lam sends density^p of Laplace entries: their tail is exp(-sqrt(2) lam)."""
        if isinstance(self.lam, str):
            return replace(self, density=self.density**progress)
        return replace(self, lam=self.lam * progress)

    def init(self, layout: Layout, seed: int) -> SdagcState:
        return SdagcState(layout)

    def exchange(self, acc: Acc, state: SdagcState, world: World) -> Steps:
        state.steps += 1
        target = self._target(acc, state)
        capacity = self._capacity(state, target)
        moments = acc.moments
        assert moments is not None
        if self.shared:
            # Before a dense exchange, too: a host's parts may differ in capacity, but all must yield the same requests.
            replies = yield from gather(payloads.wrap(moments.view(-1)))
            moments = merge_moments([reply["bytes"].view(moments.shape) for reply in replies], world.rank, state.sizes)
        n = acc.residual.numel()
        codec = routes.codec_of(self.wire, self.route)
        all_may_pass = capacity.entries >= n or payloads.size(codec.form(n, capacity.entries)) >= 4 * n
        if (self.flush and state.steps % self.flush == 0) or all_may_pass:
            # Most buckets never need this buffer.
            state.buffer = torch.empty_like(acc.residual) if state.buffer is None else state.buffer
            return (yield from dense.allreduce(acc, world, state.buffer, kept_share=self.sam))
        divides = self.lr_revision in AGE_REVISIONS
        taken = routes.take_above(acc, capacity.entries, self._bar(moments, state, target), self.wire, self.route, divides)
        if divides:
            state.ages = state.ages or Ages(acc.residual.numel(), state.ends)
            state.ages.divide(taken.unpacked, state.steps, by_layer=self.lr_revision == "per_layer")
        return (yield from routes.exchange(acc, taken, world, self.route, kept_share=self.sam, observe=capacity.observe))

    def _bar(self, moments: Tensor, state: SdagcState, target: int | None) -> Bar:
        """Return what entries must exceed: lam times the deviation of their layer, or of the bucket."""
        options = self.sigma == "zero", self.live, self.per == "bucket"
        return Bar(moments, state.ends, state.lam, state.thresholds, *options, target)

    def save(self, state: SdagcState) -> dict[str, Any]:
        return {
            "steps": state.steps,
            "lam": state.lam.clone(),
            "set_for": state.capacity_basis,
            "highest_rate": state.highest_rate,
            "capacity": None if state.capacity is None else state.capacity.save(),
            "ages": None if state.ages is None else state.ages.last_sent.clone(),
        }

    def load(self, state: SdagcState, saved: Mapping[str, Any]) -> None:
        self._load_common(state, saved)
        state.lam.copy_(tensor(saved, "lam", state.lam.shape))
        if entry(saved, "ages") is not None:
            state.ages = Ages(state.n, state.ends)
            state.ages.last_sent.copy_(tensor(saved, "ages", state.ages.last_sent.shape))

    def save_shared(self, state: SdagcState) -> dict[str, Any]:
        saved = self.save(state)
        return {name: saved[name] for name in ("steps", "set_for", "highest_rate", "capacity")}

    def load_shared(self, state: SdagcState, saved: Mapping[str, Any]) -> None:
        is_new = state.steps == 0
        self._load_common(state, saved)
        if is_new:  # its own lam has not been set, and none of its entries waits yet
            state.set_lam(max(0.0, state.capacity_basis[0]))
            if self.lr_revision in AGE_REVISIONS:
                state.ages = Ages(state.n, state.ends)
                state.ages.last_sent.fill_(state.steps)

    def _load_common(self, state: SdagcState, saved: Mapping[str, Any]) -> None:
        """Load the part of a state that all ranks share."""
        lam, target = sequence(saved, "set_for") if len(sequence(saved, "set_for")) == 2 else (math.nan, 0)
        basis = (number({"set_for": lam}, "set_for", -1.0), checked_whole(target, "set_for", 0, state.n))
        state.steps, state.highest_rate = whole(saved, "steps", most=MOST_STEPS), number(saved, "highest_rate")
        state.capacity_basis, state.capacity = basis, None
        if entry(saved, "capacity") is not None:
            state.capacity = Capacity(*self._expected_capacity(basis, state.n))
            state.capacity.load(table(saved, "capacity"))

    def _target(self, acc: Acc, state: SdagcState) -> int | None:
        """Return the number of entries that lam is steered to send; None if lam is fixed."""
        if not isinstance(self.lam, str):
            return None
        share = self.density
        if self.lr_revision == "density" and acc.rates is not None:  # send less as the rate falls
            state.highest_rate = max(state.highest_rate, *acc.rates)
            share *= max(0.0, *acc.rates) / state.highest_rate if state.highest_rate else 1.0
        return max(1, math.ceil(share * acc.residual.numel()))

    def _capacity(self, state: SdagcState, target: int | None) -> Capacity:
        """Return the payload's capacity. It is reset whenever lam or the target changes, as in a warm-up."""
        lam = laplace_threshold(self.density) if isinstance(self.lam, str) else self.lam
        basis = (lam, target or 0)
        if state.capacity is None or state.capacity_basis != basis:
            if state.capacity_basis[:1] != basis[:1]:
                state.set_lam(lam)
            state.capacity_basis = basis
            state.capacity = Capacity(*self._expected_capacity(basis, state.n))
        return state.capacity

    def _expected_capacity(self, basis: tuple[float, int], n: int) -> tuple[int, int, bool]:
        """Return the first capacity, the largest one, and whether it is fixed."""
        lam, target = basis
        if target:
            capacity = min(n, math.ceil(1.1 * target))
            return capacity, capacity, True
        capacity = min(n, max(1, math.ceil(1.25 * laplace_density(lam) * n)))
        return capacity, max(capacity, math.ceil(self.cap * n)), False
