"""SDAGC: the entries above a multiple of the standard deviation are sent; the others stay in the residual.

M. Chen, Z. Yan, J. Ren, W. Wu, "Standard Deviation based Adaptive Gradient Compression for Distributed Deep Learning" (CCGRID
2020). Only the paper's abstract was available. It names the parts: a threshold from each layer's standard deviation, residual
accumulation, local gradient clipping, momentum compensation, adaptive learning-rate revision. The way they fit together here is
a reconstruction:

    g <- clipped gradient;  u <- m u + g;  v <- v + u;  send v where |v| > lam * sigma(v);  v, u <- 0 there

The knobs clip, momentum and warmup, which every compressor has, give clipping, momentum correction with masking, and warm-up.
Error feedback lets entries act with the learning rate of their own step. lr_revision=density also lowers density as the rate
falls.

By default, lam is steered to send the share density, and one threshold serves a bucket: scope=layer and small=dense, which the
abstract's words come closest to, cost accuracy (docs/decisions/sdagc.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradcomp import knobs
from gradcomp.aliases import either
from gradcomp.compressors.dense import Dense
from gradcomp.core.compressor import Acc, Compressor, Layer, Layout, Steps, Traits
from gradcomp.core.requests import Payload, World
from gradcomp.exchanges import routes
from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import wire_knob
from gradcomp.native.kernels import Bar
from gradcomp.native.memory import DELAY, HostCopy
from gradcomp.saved import check_int, entry, number, read_int, read_ints, sequence, table, tensor

# A layer with fewer entries is small.
SMALL_SIZE = 1024
# A one-dimensional layer with at most this many entries is small: no bias is longer.
LARGEST_BIAS = 1 << 16
# The gain with which the steering of lam begins: its largest.
FIRST_GAIN = 0.1


@dataclass(frozen=True)
class Sdagc(Compressor):
    """Sends entries above a threshold. lam=3.3 sends 0.1 % of normal entries, lam=4.9 of Laplace entries."""

    density: float = knob(0.01, "or ratio: share of entries sent, with lam=auto; lower = fewer bytes, staler", above=0, below=1)
    lam: float | str = knob(
        "auto",
        "threshold in standard deviations; auto: steered to send density; a number: fixed",
        least=0,
        most=16,
        word="auto",
    )
    scope: str = knob("bucket", "scope of a threshold; layer: as published", choices=("layer", "bucket"))
    small: str = knob(
        "none",
        "tiny and one-dimensional layers: dense; pool = one threshold for all; none = like other layers",
        choices=("dense", "pool", "none"),
    )
    cap: float = knob(
        0.05,
        "largest share of a bucket in a burst, with a lam that is fixed and implies less; the largest entries go first",
        above=0,
        most=1,
    )
    flush: int = knob(0, "steps between sends of the whole residual; 0 = never", least=0)
    sam: float = knob(0.0, "SAMomentum: share of a sent entry that stays in the residual; replaces momentum", least=0, below=1)
    lr_revision: str = knob("none", "density: lower a set density as the rate falls", choices=("none", "density"))
    route: str = routes.route_knob()
    wire: str = wire_knob()
    ratio: InitVar[float | None] = None

    for_auto: ClassVar[Mapping[str, Sequence[str]]] = {"high": ["sdagc"]}
    also: ClassVar[Mapping[str, str]] = {"ratio": "density"}

    def __post_init__(self, ratio: float | None) -> None:
        if ratio is not None:
            given = None if self.density == Sdagc.density else self.density
            object.__setattr__(self, "density", either(None, ratio=ratio, density=given))
        super().__post_init__()

    @property
    def traits(self) -> Traits:
        rates: Literal["needed", "unused"] = "needed" if self.lr_revision == "density" else "unused"
        return Traits(moments=True, selects=True, share=self.density, momentum=self.sam, rates=rates)

    def refuses(self, feedback: bool) -> str | None:
        typed_knobs = {setting.partition("=")[0]: setting for setting in knobs.changed(self)}
        steers = typed_knobs.get("density") or typed_knobs.get("lr_revision")
        if "lam" in typed_knobs and steers:
            return f"{steers} steers lam, and {typed_knobs['lam']} fixes it; remove {typed_knobs['lam']} or {steers}"
        if "cap" in typed_knobs and "lam" not in typed_knobs:
            cap = typed_knobs["cap"]
            return f"{cap} bounds bursts above a lam that is fixed; remove it, or set lam: density bounds the entries sent"
        settings = [setting for name, setting in typed_knobs.items() if name in ("sam", "flush")]
        if feedback or not settings:
            return None
        typed = " and ".join(settings)
        return f"{typed} cannot work with feedback=false, which clears the residual; remove feedback=false or {typed}"

    def choose(self, name: str, layer: Layer) -> Compressor:
        """Choose the compressor of a layer: small layers follow the knob small, the others use this one."""
        is_small = layer.size < SMALL_SIZE or (layer.dims < 2 and layer.size <= LARGEST_BIAS)
        if self.small == "none" or not is_small:
            return self
        return Dense() if self.small == "dense" else replace(self, small="none", scope="bucket")

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
        n = acc.residual.numel()
        codec = routes.codec_of(self.wire, self.route)
        all_may_pass = capacity.entries >= n or payloads.size(codec.form(n, capacity.entries)) >= 4 * n
        if (self.flush and state.steps % self.flush == 0) or all_may_pass:
            # Most buckets never need this buffer.
            state.buffer = torch.empty_like(acc.residual) if state.buffer is None else state.buffer
            return (yield from routes.send_all(acc, world, state.buffer, kept_share=self.sam))
        assert acc.moments is not None
        bar = Bar(acc.moments, state.ends, state.lam, state.thresholds, pooled=self.scope == "bucket", target=target)
        route = routes.possible(self.route, acc, capacity.entries, world)
        taken = routes.take_above(acc, capacity.entries, bar, self.wire, route)
        return (yield from routes.exchange(acc, taken, world, route, kept_share=self.sam, observe=capacity.observe))

    def save(self, state: SdagcState) -> dict[str, Any]:
        return {**self.save_shared(state), "lam": state.lam.clone()}

    def load(self, state: SdagcState, saved: Mapping[str, Any]) -> None:
        self._load_common(state, saved)
        state.lam.copy_(tensor(saved, "lam", state.lam.shape))

    def save_shared(self, state: SdagcState) -> dict[str, Any]:
        return {
            "steps": state.steps,
            "set_for": state.capacity_basis,
            "highest_rate": state.highest_rate,
            "capacity": None if state.capacity is None else state.capacity.save(),
        }

    def load_shared(self, state: SdagcState, saved: Mapping[str, Any]) -> None:
        is_new = state.steps == 0
        self._load_common(state, saved)
        if is_new:  # its own lam has not been set
            state.set_lam(max(0.0, state.capacity_basis[0]))

    def _load_common(self, state: SdagcState, saved: Mapping[str, Any]) -> None:
        """Load the part of a state that all ranks share."""
        lam, target = sequence(saved, "set_for", [2])
        basis = (number({"set_for": lam}, "set_for", -1.0), check_int(target, "set_for", 0, state.n))
        state.steps, state.highest_rate = read_int(saved, "steps"), number(saved, "highest_rate")
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
        # Of Laplace entries, the share density lies beyond this many standard deviations.
        lam = -math.log(self.density) / math.sqrt(2) if isinstance(self.lam, str) else self.lam
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


class SdagcState:
    """A bucket's state between steps."""

    def __init__(self, layout: Layout):
        self.n = layout.total
        self.ends = torch.tensor(layout.sizes).cumsum(0).to(torch.int32).to(layout.device)
        self.thresholds = torch.zeros(len(layout.sizes), device=layout.device)
        self.lam = torch.zeros(2, device=layout.device)  # and the gain of its steering
        self.steps = 0
        self.capacity_basis: tuple[float, int] = (-1.0, 0)  # the lam and the target that the capacity follows from
        self.capacity: Capacity | None = None
        self.highest_rate = 0.0
        self.buffer: Tensor | None = None

    def set_lam(self, lam: float) -> None:
        """Steer from this lam on."""
        self.lam[0], self.lam[1] = lam, FIRST_GAIN


class Capacity:
    """The capacity of one bucket's payload: at first an expected count, later the largest recent count of any rank.

    The gathered headers tell every rank how many entries passed the threshold on each rank. Every rank copies these counts
    without waiting and acts on them eight steps later. So no rank waits for its device, and all ranks agree.
    """

    def __init__(self, expected: int, largest: int, fixed: bool = False):
        self.entries = min(expected, largest)
        self.largest = largest
        self.fixed = fixed
        self._copied: deque[HostCopy] = deque()  # counts of the latest steps, still on their way
        self._known: deque[int] = deque(maxlen=DELAY)  # the counts before them
        self._read: HostCopy | None = None  # the latest that was read

    def observe(self, received: Sequence[Payload]) -> None:
        """Record a step's counts, and adapt the capacity."""
        if self.fixed:
            return
        self._copied.append(HostCopy(torch.stack([payload["header"][:1] for payload in received]), self._read))
        self._read = None
        if len(self._copied) < DELAY:
            return
        self._read = self._copied.popleft()
        self._known.append(self._read.largest())
        wanted = rounded_up(max(self._known))
        if wanted > self.entries or wanted < 0.8 * self.entries:
            self.entries = max(1, min(wanted, self.largest))

    def save(self) -> dict[str, Any]:
        return {"entries": self.entries, "copied": [counts.largest() for counts in self._copied], "known": list(self._known)}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.entries = read_int(saved, "entries", 1, self.largest)
        copied, known = read_ints(saved, "copied", range(DELAY)), read_ints(saved, "known", range(DELAY + 1))
        self._copied = deque(HostCopy(torch.tensor([count])) for count in copied)
        self._known = deque(known, maxlen=DELAY)


def rounded_up(count: int) -> int:
    """Round a count up, by at most an eighth, so that the capacity does not change with every count."""
    grain = 1 << max(0, count.bit_length() - 4)
    return -(-count // grain) * grain


def laplace_density(lam: float) -> float:
    """Return the share of Laplace-distributed entries beyond lam standard deviations."""
    return math.exp(-math.sqrt(2) * lam)
