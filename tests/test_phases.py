"""The phases of a learned code, and the few sums that say whether it holds."""

from __future__ import annotations

import math

import pytest
import torch

from gradcomp.capacity import DELAY
from gradcomp.phases import CODE, DENSE, LEARN, LOOKED_AT, MOST_BAD, Phases
from gradcomp.watch import NOTES, SUMS, WORST, Watch

CPU = torch.device("cpu")


def walk(phases: Phases, steps: int, bad: bool = False, rate: float = 0.1) -> list[str]:
    """The phases of the steps to come, in all of which codes are off, or none."""
    found = []
    for _ in range(steps):
        found.append(phases.begin((rate / 2, rate)))
        if found[-1] == CODE:
            phases.see(torch.tensor([bad]))
    return found


def test_one_comes_after_the_other() -> None:
    assert walk(Phases(2, 3), 7) == [DENSE] * 2 + [LEARN] * 3 + [CODE] * 2
    assert walk(Phases(0, 1), 300) == [LEARN] + [CODE] * 299


def test_what_is_off_for_long_is_learned_anew_and_for_longer() -> None:
    phases = Phases(0, 3)
    found = walk(phases, 3 + DELAY - 1 + MOST_BAD + 7, bad=True)
    assert found == [LEARN] * 3 + [CODE] * (DELAY + MOST_BAD) + [LEARN] * 6
    assert phases.falls == 1
    again = walk(phases, 200, bad=True)
    assert again.index(LEARN) == DELAY + MOST_BAD
    assert again[DELAY + MOST_BAD :].index(CODE) == 12


def test_what_is_off_by_chance_is_not() -> None:
    phases = Phases(0, 1)
    for step in range(5 * LOOKED_AT):
        assert phases.begin(None) == (CODE if step else LEARN)
        if step:
            phases.see(torch.tensor([step % 2 == 0]))
    assert phases.falls == 0


def test_a_rate_that_falls_by_half_brings_learning_back() -> None:
    phases = Phases(0, 4)
    assert walk(phases, 10) == [LEARN] * 4 + [CODE] * 6
    assert walk(phases, 3, rate=0.06) == [CODE] * 3
    assert walk(phases, 6, rate=0.04) == [LEARN] * 4 + [CODE] * 2
    assert walk(phases, 3, rate=0.03) == [CODE] * 3
    assert phases.falls == 0


def test_a_copy_goes_on_alike() -> None:
    first, second = Phases(1, 2), Phases(1, 2)
    walk(first, 3 + DELAY + 20, bad=True)
    second.load(first.save())
    assert walk(first, 60, bad=True) == walk(second, 60, bad=True)


def test_a_copy_knows_the_rate_that_was_learned_with() -> None:
    first, second = Phases(0, 2), Phases(0, 2)
    walk(first, 4)
    second.load(first.save())
    assert walk(second, 1, rate=0.06) == [CODE]
    assert walk(second, 1, rate=0.04) == [LEARN]


def notes(watch: Watch, has: list[torch.Tensor], misses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([watch.note(*own, flag=None) for own in zip(has, misses, strict=True)]).mean(0)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_errors_are_right_in_the_mean(share: float) -> None:
    """Squares of the sums are the squares of the mean over the ranks, and of what the update misses of it."""
    torch.manual_seed(0)
    ratios = []
    for seed in range(300):
        watch = Watch(1.0, seed, CPU)
        has = [torch.randn(1000) for _ in range(3)]
        misses = [share * part[torch.randperm(1000)] for part in has]
        mean = notes(watch, has, misses)
        assert len(mean) == NOTES
        meant, missed = torch.stack(has).mean(0).square().sum(), torch.stack(misses).mean(0).square().sum()
        ratios.append([float(mean[:SUMS].square().sum() / meant), float(mean[SUMS : 2 * SUMS].square().sum() / missed)])
    found = torch.tensor(ratios)
    assert ((found.mean(0) - 1).abs() < 4 * math.sqrt(2 / SUMS / 300)).all()  # four standard deviations of a mean of 300
    assert (found.std(0) < 1.3 * math.sqrt(2 / SUMS)).all()


def test_verdicts() -> None:
    watch = Watch(0.9, 0, CPU)
    has = torch.randn(500)

    def verdict(misses: float, flag: int = 0, always: bool = False, has: torch.Tensor = has) -> tuple[bool, bool, bool]:
        note = watch.note(has, misses * has, torch.tensor([flag], dtype=torch.int32))
        return tuple(bool(part) for part in watch.judge(note, (1 - misses) * has, always))  # type: ignore[return-value]

    assert verdict(0.8) == (True, False, False)
    assert watch.error.item() == pytest.approx(0.8, rel=1e-5) and watch.off.item() < 1e-6
    assert verdict(1.0) == (True, True, False)
    assert verdict(WORST) == (False, True, False)
    assert verdict(WORST, always=True) == (True, True, False)
    assert verdict(math.nan) == (False, True, False)
    assert verdict(0.8, flag=1) == (True, False, True)
    assert verdict(0.8, has=torch.zeros(500)) == (True, False, False)


def test_what_the_law_is_off_by_is_seen() -> None:
    watch, has = Watch(1.0, 0, CPU), torch.randn(500)
    watch.judge(watch.note(has, 0.5 * has, None), 0.4 * has)
    assert watch.off.item() == pytest.approx(0.1, rel=1e-4)
