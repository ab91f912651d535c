"""Errors of rounding to levels: orq beside the others at equal clipping, over known distributions and real gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from kernels.test_best_levels import check_best
from torch import Tensor, nn

import gradcomp
from gradcomp.native import kernels
from laboratory.tasks import digits

KINDS = ("normal", "laplace", "t3", "skewed", "real")
GROUPS = (512, 2048)
CLIPS = (0.0, 1.5, 2.5)  # standard deviations; 0 = none
STEPS = 30
# Levels are found near enough (csrc/math_levels.h), at this price at most.
NEARLY = 1.01
Named = Mapping[str, Tensor]

pytestmark = pytest.mark.usefixtures("one_thread")
kinds = pytest.mark.parametrize("kind", KINDS)
counts = pytest.mark.parametrize("count", [3, 5, 9])
clips = pytest.mark.parametrize("sigmas", CLIPS)


def gradients_of(net: nn.Sequential) -> list[Named]:
    """Those of the first step and of a later one, on real pictures. In float64, so that machines hardly differ."""
    net.double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    batches = digits.batches(digits.load(), 0, 1, 16)
    seen: list[Named] = []
    for step in range(STEPS + 1):
        pictures, labels = next(batches)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(pictures.double()), labels))
        if step in (0, STEPS):
            seen.append({name: p.grad.float() for name, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    return seen


@functools.cache
def drawn(kind: str) -> list[Named]:
    """Gradients, each to be compressed as one bucket."""
    if kind == "real":
        pytest.importorskip("sklearn", reason="errors on real gradients were NOT tested: scikit-learn is not installed")
        return gradients_of(digits.model(0, 256)) + gradients_of(digits.conv(0, 16))
    n = 128 * 512
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(4, n, generator=generator)
    exponential = torch.empty(2, n).exponential_(generator=generator)
    match kind:
        case "normal":
            return [{"w": normal[0]}]
        case "laplace":
            return [{"w": exponential[0] * normal[0].sign()}]
        case "t3":
            return [{"w": normal[0] / (normal[1:].square().sum(0) / 3).sqrt()}]
        case "skewed":
            return [{"w": exponential.sum(0) - 2}]
    raise ValueError(kind)


class Found(NamedTuple):
    """The entries of a compressor, and the levels and bounds of their groups."""

    value: Tensor
    group: int
    levels: Tensor
    bounds: Tensor


def simulation(spec: str, grads: Named) -> gradcomp.Simulation:
    return gradcomp.Simulation(spec, {name: tuple(grad.shape) for name, grad in grads.items()}, 1)


def found_by(spec: str, grads: Named) -> Found:
    """A compressor's levels and errors in its first step."""
    found: list[Found] = []
    find_levels, find_and_take_levels = kernels.find_levels, kernels.find_and_take_levels

    def note(value: Tensor, group: int, levels: Tensor, bounds: Tensor | None) -> None:
        within = torch.tensor([-math.inf, math.inf]).repeat(len(levels)) if bounds is None else bounds
        found.append(Found(value, group, levels.clone(), within.view(-1, 2)))

    def watched(
        value: Tensor, form: str, group: int, count: int, levels: Tensor, cuts: Tensor, bounds: Tensor | None = None
    ) -> None:
        find_levels(value, form, group, count, levels, cuts, bounds)
        note(value.clone(), group, levels.view(-1, count), bounds)

    def watched_chain(
        residual: Tensor, rule: str, group: int, count: int, key: int, payload: Tensor, *drawn_and_bounds: Any
    ) -> None:
        value, end = residual.clone(), 8 + 4 * kernels.groups(len(residual), group) * count
        find_and_take_levels(residual, rule, group, count, key, payload, *drawn_and_bounds)
        note(value, group, payload[8:end].view(torch.float32).view(-1, count), drawn_and_bounds[1])

    made = simulation(spec, grads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "find_levels", watched)
        patch.setattr(kernels, "find_and_take_levels", watched_chain)
        made.step([dict(grads)])
    (one,) = found
    return one


class Rows(NamedTuple):
    """Groups of one length: their entries, the same within bounds, and the levels these lie between."""

    value: Tensor
    clipped: Tensor
    low: Tensor
    high: Tensor

    def errors(self) -> Tensor:
        """Return each group's expected squared error: of clipping to the bounds, and of random rounding after it."""
        rounding = (self.clipped - self.low) * (self.high - self.clipped)
        return (rounding + (self.value - self.clipped).square()).sum(1)


def rows_of(found: Found) -> Iterator[Rows]:
    """All groups but the last, and the last one, which has a length of its own."""
    last = len(found.levels) - 1
    value, levels, bounds = found.value.double(), found.levels.double(), found.bounds.double()
    for rows, of in (
        (value[: last * found.group].view(-1, found.group), slice(0, last)),
        (value[last * found.group :][None], [last]),
    ):
        clipped = rows.clamp(bounds[of, :1], bounds[of, 1:])
        at = torch.searchsorted(levels[of], clipped, right=True).clamp(1, levels.shape[1] - 1)
        low, high = levels[of].gather(1, at - 1), levels[of].gather(1, at)
        assert (low <= clipped).all() and (clipped <= high).all()
        yield Rows(rows, clipped, low, high)


def errors_of(found: Found) -> Tensor:
    return torch.cat([rows.errors() for rows in rows_of(found)])


def levels_of(found: Found, form: str) -> Tensor:
    """Those of another form; by QSGD's norm they reach beyond bounds, so that no spec clips with it."""
    groups, count = found.levels.shape
    levels, cuts, bounds = torch.empty(groups * count), torch.empty(groups), found.bounds.flatten()
    kernels.find_levels(found.value, form, found.group, count, levels, cuts, bounds)
    return levels.view(groups, count)


def peers(count: int) -> list[str]:
    """QSGD by either norm, levels in even steps from end to end, and by rank; with three levels also TernGrad."""
    others = ["qsgd:norm=l2", "qsgd:norm=max", "linear:spacing=minmax", "linear:spacing=quantile"]
    return [*(f"{spec},levels={count}," for spec in others), *(["terngrad:"] if count == 3 else [])]


@functools.cache
def compared(kind: str, count: int, sigmas: float) -> list[tuple[Tensor, Tensor]]:
    """For each bucket and size of groups the errors of orq in each group, and below each other those of its peers."""
    pairs = []
    for grads in drawn(kind):
        for group in GROUPS:
            knobs = f"sigmas={sigmas},group={group},route=allgather"
            ours = found_by(f"orq:levels={count},{knobs}", grads)
            others = []
            for peer in peers(count):
                theirs = ours._replace(levels=levels_of(ours, "norm")) if "l2" in peer else found_by(peer + knobs, grads)
                assert torch.equal(ours.value, theirs.value) and torch.equal(ours.bounds, theirs.bounds)
                others.append(errors_of(theirs))
            pairs.append((errors_of(ours), torch.stack(others)))
    return pairs


@pytest.mark.parametrize("deviations", [None, 1.5])
def test_every_level_of_a_real_gradient_is_the_best_between_its_neighbours(deviations: float | None) -> None:
    check_best(torch.cat([grad.flatten() for grad in drawn("real")[-1].values()]), 512, deviations)


@kinds
@counts
@clips
def test_in_the_mean_no_other_levels_err_less(kind: str, count: int, sigmas: float) -> None:
    for ours, others in compared(kind, count, sigmas):
        assert (ours.mean() <= others.mean(1) * NEARLY).all()


def share_of_wins(kind: str, count: int, sigmas: float) -> float:
    """Return the share of groups in which no peer has a clearly smaller error."""
    wins = [ours <= others.min(0).values * NEARLY for ours, others in compared(kind, count, sigmas)]
    return float(torch.cat(wins).double().mean())


@kinds
@clips
def test_no_other_three_levels_err_less(kind: str, sigmas: float) -> None:
    assert share_of_wins(kind, 3, sigmas) == 1


@kinds
@pytest.mark.parametrize("count", [5, 9])
@clips
def test_in_97_of_100_groups_no_other_levels_err_less(kind: str, count: int, sigmas: float) -> None:
    assert share_of_wins(kind, count, sigmas) >= 0.97


@pytest.mark.parametrize(
    "kind,sigmas,wanted",
    [
        ("normal", 0.0, (1.753, 0.342, 0.0778)),
        ("normal", 1.5, (0.379, 0.127, 0.067)),
        ("normal", 2.5, (1.009, 0.224, 0.056)),
        ("laplace", 0.0, (2.731, 0.501, 0.1125)),
        ("laplace", 1.5, (0.430, 0.196, 0.141)),
        ("laplace", 2.5, (0.877, 0.223, 0.077)),
    ],
)
def test_its_error_is_the_known_one(kind: str, sigmas: float, wanted: tuple[float, ...]) -> None:
    """Over the squares of the entries, in groups of 2,048; the figures are those of sorted groups and sums in float64."""
    (grads,) = drawn(kind)
    for count, error in zip((3, 5, 9), wanted, strict=True):
        update = simulation(f"orq:levels={count},sigmas={sigmas}", grads).step([dict(grads)])["w"]
        found = float((update - grads["w"]).square().sum() / grads["w"].square().sum())
        assert found == pytest.approx(error, rel=0.05)  # samples of 40 and of 32 groups, and draws


@kinds
@counts
def test_it_is_unbiased(kind: str, count: int) -> None:
    """Over many steps with the same gradients, entries, sums of groups and inner products deviate no more than by chance."""
    steps, grads = 150, drawn(kind)[-1]
    if kind != "real":
        grads = {"w": grads["w"][: 12 * 512]}
    spec = f"orq:levels={count},group=512,route=allgather"
    found, repeated = found_by(spec, grads), simulation(spec, grads)
    names = repeated._reducers[0].buckets[0].layout.names
    assert torch.equal(found.value, torch.cat([grads[name].flatten() for name in names]))
    total = torch.zeros_like(found.value, dtype=torch.float64)
    for _ in range(steps):
        update = repeated.step([dict(grads)])
        total += torch.cat([update[name].flatten() for name in names])
    rows = next(rows_of(found))
    value, low, high = rows.value, rows.low, rows.high
    off = total[: value.numel()].view_as(value) / steps - value
    variance = (value - low) * (high - value) / steps
    often = variance * steps > 0.16 * (high - low).square()  # either way in every fifth step or more often
    assert often.double().mean() > 0.1
    assert (off[often].square() < 25 * variance[often]).all()
    for weights in (torch.ones_like(value), value, value.abs()):
        deviation = (weights.square() * variance).sum(1).sqrt()
        rounding = 1e-6 * (weights * value).abs().sum(1)  # of floats
        assert ((off * weights).sum(1).abs() <= 5 * deviation + rounding).all()


@pytest.mark.parametrize("spec", ["orq:", "terngrad:", "qsgd:norm=max,", "linear:", "linear:spacing=quantile,"])
def test_a_clipped_entry_counts_as_the_bound(spec: str) -> None:
    """Their mean counts as the bound, too."""
    torch.manual_seed(0)
    grad = torch.randn(8192)
    grad[::8] = 8.0
    bound = 1.5 * float(grad.std(correction=0))
    update = gradcomp.Simulation(f"{spec}sigmas=1.5", {"w": (8192,)}, 1).step([{"w": grad}])["w"][::8]
    assert float(update.mean()) == pytest.approx(bound, abs=1e-4 + 5 * float(update.std()) / 32)
