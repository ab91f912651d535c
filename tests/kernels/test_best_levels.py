"""The levels that err least, held to brute force: orq's, BinGrad's, and of three levels all."""

from __future__ import annotations

import math

import gradients
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.test_levels import ends_of, error_of, quantise
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("laplace", "heavy", "sparse")
# csrc/math_levels.h: of at least so many entries on the emptier side of a level, one in so many may lie on the wrong side.
SLACK = 20
# The share that this may add to the error between two levels, or of a group. The mean of many groups is held to 1 %.
WORSE = 0.1
# Levels are found near enough, at this price at most.
NEARLY = 1.01


def bounds_of(flat: Tensor, ends: list[int], deviations: float | None) -> Tensor | None:
    """Bound each group at so many of its deviations, also if float32 cannot hold their squares."""
    if deviations is None:
        return None
    each = [deviations * flat[begin:end].double().std(correction=0) for begin, end in zip([0, *ends], ends, strict=False)]
    most = torch.stack(each).float()
    return torch.stack([-most, most], 1).flatten()


def check_between(x: Tensor, low: Tensor, level: Tensor, high: Tensor) -> None:
    """Check the optimal condition, P(v in [level, high]) (high - low) = E[v - low; v in [low, high]], against all entries."""
    inside = x[(x >= low) & (x <= high)]
    if low == high:
        assert level == low
        return
    wanted = float((inside - low).sum() / (high - low))
    fewer = min(math.ceil(wanted), len(inside) - math.ceil(wanted))
    slack = 0 if fewer < SLACK else 1 + fewer // SLACK
    above, from_it_on = int((inside > level).sum()), int((inside >= level).sum())
    # Kernels subtract floats, and round each entry's part of the sum to 20 bits.
    near = 1e-6 * (wanted + len(inside))
    assert above - slack <= wanted + near and wanted - near <= from_it_on + slack
    tried, entries = torch.cat([inside.unique(), level[None]]), inside[:, None]
    errors = torch.cat(
        [
            torch.where(entries <= some, (entries - low) * (some - entries), (entries - some) * (high - entries)).sum(0)
            for some in tried.split(64)
        ]
    )
    assert slack or level in inside
    worse = 1 + (WORSE if slack else 1e-6)
    assert float(errors[-1]) <= float(errors.min()) * worse + 2e-6 * len(inside) * float(high - low) ** 2


def bisected(x: Tensor, count: int) -> Tensor:
    """Put a level into each interval by the optimal condition, then into each half, from sorted entries and float64 sums."""
    x = x.sort().values
    levels = [x[0], x[-1]]
    while len(levels) < count:
        for at in range(len(levels) - 1, 0, -1):
            low, high = levels[at - 1], levels[at]
            inside = x[(x >= low) & (x <= high)]
            if high > low:
                wanted = float((inside - low).sum() / (high - low))
                rank = min(max(1, math.ceil(wanted * (1 - 1e-9))), len(inside))
                levels.insert(at, inside[len(inside) - rank])
            else:
                levels.insert(at, low)
    return torch.stack(levels)


def refined(x: Tensor, levels: Tensor) -> Tensor:
    """Move each level in turn to the place between its neighbours where it errs least, twice."""
    x, levels = x.sort().values, levels.clone()
    for at in 2 * list(range(1, len(levels) - 1)):
        low, high = levels[at - 1], levels[at + 1]
        inside = x[(x >= low) & (x <= high)]
        if high > low:
            rank = min(max(1, math.ceil(float((inside - low).sum() / (high - low)))), len(inside))
            levels[at] = inside[len(inside) - rank]
    return levels


def is_lopsided(x: Tensor, middle: Tensor) -> bool:
    return 3 * min(int(((x >= middle) & (x < x.max())).sum()), int((x < middle).sum())) < len(x)


def check_best(flat: Tensor, group: int, deviations: float | None) -> None:
    """Check three and nine levels: each is the best between its two neighbours when it was found. Check that refined levels,
    five or those of a lopsided group, err no more than unrefined ones."""
    ends = ends_of(len(flat), group)
    bounds = bounds_of(flat, ends, deviations)
    three, five, nine = (quantise(flat, "optimal", group, count, bounds=bounds).levels.double() for count in (3, 5, 9))
    for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        x = flat[begin:end].double()
        if bounds is not None:
            x = x.clamp(*bounds.view(-1, 2)[i].double())
        assert nine[i, 0] == five[i, 0] == x.min() and nine[i, 8] == five[i, 4] == x.max()
        check_between(x, *three[i])
        halves = bisected(x, 9)
        slack = 1e-9 * len(x) * float(x.max() - x.min()) ** 2  # ties are broken elsewhere
        assert error_of(x, five[i]) <= error_of(x, halves[::2]) * (1 + WORSE) + slack
        if is_lopsided(x, three[i, 1]):
            assert error_of(x, nine[i]) <= error_of(x, halves) * (1 + WORSE) + slack
            continue
        for step in (8, 4, 2):
            for at in range(0, 8, step):
                check_between(x, nine[i, at], nine[i, at + step // 2], nine[i, at + step])


@given(seed=gradients.seeds, kind=gradients.kinds, n=st.integers(1, 90), deviations=st.sampled_from([None, 0.5, 1.5, 2.5]))
def test_orq_is_the_best_there_is(seed: int, kind: str, n: int, deviations: float | None) -> None:
    check_best(gradients.draw(kind, n, seed), 128, deviations)


@pytest.mark.parametrize("deviations", [None, 1.5])
@pytest.mark.parametrize(
    "n,group,kind", [*((1124, 512, kind) for kind in KINDS), (532, 512, "laplace"), (2748, 2048, "laplace")]
)
def test_orq_is_the_best_there_is_in_every_group(n: int, group: int, kind: str, deviations: float | None) -> None:
    """The last group may be shorter or longer."""
    check_best(gradients.draw(kind, n, n), group, deviations)


@pytest.mark.parametrize("count", [3, 5, 9])
@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy"])
def test_groups_err_at_most_1_percent_more_than_with_exact_levels(kind: str, count: int) -> None:
    """Levels are exact if each one was found among sorted entries. Five are refined. Lopsided groups may err less than that."""
    group, groups = 2048, 24
    flat = gradients.draw(kind, group * groups, 11)
    found = quantise(flat, "optimal", group, count).levels
    ratios = []
    for x, levels in zip(flat.double().view(groups, group), found, strict=True):
        exact = bisected(x, count)
        ratios.append(error_of(x, levels) / error_of(x, refined(x, exact) if count == 5 else exact))
    assert sum(ratios) / groups <= 1.01 and max(ratios) <= 1 + WORSE


def test_a_group_of_very_many_has_its_best_level() -> None:
    """Sums of so many entries' worth do not fit into 32 bits."""
    n = 200_000
    flat = gradients.draw("laplace", n, 5)
    low, level, high = quantise(flat, "optimal", n, 3).levels[0].double()
    wanted = float((flat.double() - low).sum() / (high - low))
    slack = 1 + min(wanted, n - wanted) / SLACK
    assert int((flat > level).sum()) - slack <= wanted <= int((flat >= level).sum()) + slack


@pytest.mark.parametrize("deviations", [None, 1.5, 2.5])
@pytest.mark.parametrize("kind", ["normal", "laplace", "heavy", "skewed"])
@pytest.mark.parametrize("count,share", [(3, 1.0), (5, 0.97), (9, 0.97)])
def test_other_levels_err_less_in_few_groups_and_nowhere_in_the_mean(
    count: int, share: float, kind: str, deviations: float | None
) -> None:
    """Errors include those of clipping."""
    n = 128 * 512
    flat = gradients.draw("laplace" if kind == "skewed" else kind, n, 3)
    if kind == "skewed":
        flat = flat.abs() + gradients.draw("laplace", n, 4).abs() - 2  # of Gamma(2)
    most = math.inf if deviations is None else deviations * float(flat.double().std(correction=0))
    within, wins = flat.clamp(-most, most), []
    for group in (512, 2048):
        bounds = None if deviations is None else torch.tensor([-most, most]).repeat(n // group)
        errors = torch.tensor(
            [
                [error_of(x, own) for x, own in zip(within.view(-1, group), levels, strict=True)]
                for form in ("optimal", "norm", "peak", "range", "quantile")
                for levels in [quantise(flat, form, group, count, bounds=bounds).levels]
            ],
            dtype=torch.float64,
        )
        errors += (flat - within).double().square().view(-1, group).sum(1)
        assert (errors[0].mean() <= errors[1:].mean(1) * NEARLY).all()
        wins.append(errors[0] <= errors[1:].amin(0) * NEARLY)
    assert torch.cat(wins).double().mean() >= share


@given(seed=gradients.seeds, kind=gradients.kinds, n=st.integers(1, 300))
def test_partly_is_the_best_there_is(seed: int, kind: str, n: int) -> None:
    """A fixed point, or where the sum jumps across b; and of all magnitudes, and all sums of the largest, none errs less."""
    flat = gradients.draw(kind, n, seed)
    b = float(quantise(flat, "partly", 512, 2).levels[0, 1])
    magnitudes = flat.double().abs().sort(descending=True).values
    sums = [float(magnitudes[magnitudes > at].sum()) / n for at in (b * (1 - 1e-6), b)]
    assert sums[1] * (1 - 1e-5) <= b <= sums[0] * (1 + 1e-5) + 1e-42
    tried = torch.cat([torch.tensor([b]).double(), magnitudes, magnitudes.cumsum(0) / n])
    x = magnitudes[:, None]
    errors = torch.where(x <= tried, tried.square() - x.square(), (x - tried).square()).sum(0)
    assert errors[0] <= errors.min() * (1 + 1e-6) + 1e-80
