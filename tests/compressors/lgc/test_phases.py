"""The phases of lgc, and the estimated error of its codes."""

from __future__ import annotations

import math

import pytest
import torch

from gradcomp.compressors.lgc.phases import (
    CODE,
    DENSE,
    LEARN,
    MOST_BAD_STEPS,
    SIGNED_SUMS,
    SUMMARY_LENGTH,
    WINDOW,
    CodeError,
    Phases,
)
from gradcomp.native.memory import DELAY

CPU = torch.device("cpu")


def walk(phases: Phases, steps: int, mark: int = 0, rate: float = 0.1) -> list[str]:
    """Return the phases of the next steps. Each step leaves this mark."""
    found = []
    for _ in range(steps):
        found.append(phases.begin_step((rate / 2, rate)))
        if found[-1] == CODE:
            phases.observe(torch.tensor([mark + 2 * phases.rate_fell]))
        phases.end_step(found[-1])
    return found


def test_one_comes_after_the_other() -> None:
    assert walk(Phases(2, 3), 7) == [DENSE] * 2 + [LEARN] * 3 + [CODE] * 2
    assert walk(Phases(0, 1), 300) == [LEARN] + [CODE] * 299


def test_a_step_that_did_not_end_is_begun_again() -> None:
    phases = Phases(1, 1)
    assert phases.begin_step(None) == phases.begin_step(None) == DENSE
    assert walk(phases, 2) == [DENSE, LEARN]


def test_bad_codes_start_a_second_learning_of_twice_the_length() -> None:
    phases = Phases(0, 3)
    found = walk(phases, 3 + DELAY - 1 + MOST_BAD_STEPS + 7, mark=1)
    assert found == [LEARN] * 3 + [CODE] * (DELAY + MOST_BAD_STEPS) + [LEARN] * 6
    assert phases.relearned == 1
    again = walk(phases, 200, mark=1)
    assert again.index(LEARN) == DELAY + MOST_BAD_STEPS
    assert again[DELAY + MOST_BAD_STEPS :].index(CODE) == 12


def test_a_code_that_is_wrong_by_chance_is_kept() -> None:
    phases = Phases(0, 1)
    walk(phases, 1)
    for step in range(5 * WINDOW):
        assert walk(phases, 1, mark=step % 2) == [CODE]
    assert phases.relearned == 0


def test_a_rate_that_falls_by_half_brings_learning_back() -> None:
    """Eight steps later, when all ranks know of it."""
    phases = Phases(0, 4)
    assert walk(phases, 14) == [LEARN] * 4 + [CODE] * 10
    assert walk(phases, 3, rate=0.06) == [CODE] * 3
    assert walk(phases, DELAY + 6, rate=0.04) == [CODE] * DELAY + [LEARN] * 4 + [CODE] * 2
    assert walk(phases, 20, rate=0.03) == [CODE] * 20
    assert phases.relearned == 0


def test_a_rate_falls_from_where_it_rose_to() -> None:
    phases = Phases(0, 4)
    walk(phases, 4, rate=0.01)  # as in a warm-up, in which codes are learned
    assert walk(phases, 20, rate=0.1) == [CODE] * 20
    assert LEARN in walk(phases, DELAY + 1, rate=0.04)


def test_another_ranks_rate_counts_as_much() -> None:
    phases = Phases(0, 4)
    walk(phases, 4)
    assert walk(phases, 1, mark=2) + walk(phases, DELAY) == [CODE] * DELAY + [LEARN]


@pytest.mark.parametrize("steps,mark,rate", [(3 + DELAY + 20, 1, 0.1), (4, 0, 0.06), (4, 0, 0.04)])
def test_a_copy_goes_on_alike(steps: int, mark: int, rate: float) -> None:
    """With bad codes, and with the rate that was learned with."""
    first, second = Phases(1, 2), Phases(1, 2)
    walk(first, steps, mark)
    walk(second, 90, mark=1)
    second.load(first.save())
    found = walk(first, 60, mark, rate)
    assert found == walk(second, 60, mark, rate) and (LEARN in found) == (rate != 0.06)


def notes(error: CodeError, has: list[torch.Tensor], misses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([error.summarise(*own, flag=None) for own in zip(has, misses, strict=True)]).mean(0)


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_errors_are_right_in_the_mean(share: float) -> None:
    """The squared sums estimate the squared norms of the ranks' mean and of the update's error."""
    torch.manual_seed(0)
    ratios = []
    for seed in range(300):
        error = CodeError(1.0, seed, CPU)
        has = [torch.randn(1000) for _ in range(3)]
        misses = [share * part[torch.randperm(1000)] for part in has]
        mean = notes(error, has, misses)
        assert len(mean) == SUMMARY_LENGTH
        meant, missed = torch.stack(has).mean(0).square().sum(), torch.stack(misses).mean(0).square().sum()
        ratios.append(
            [
                float(mean[:SIGNED_SUMS].square().sum() / meant),
                float(mean[SIGNED_SUMS : 2 * SIGNED_SUMS].square().sum() / missed),
            ]
        )
    found = torch.tensor(ratios)
    assert ((found.mean(0) - 1).abs() < 4 * math.sqrt(2 / SIGNED_SUMS / 300)).all()  # four standard deviations of a mean of 300
    assert (found.std(0) < 1.3 * math.sqrt(2 / SIGNED_SUMS)).all()


def check(
    error: CodeError, misses: float, flag: int = 0, has: torch.Tensor | None = None, rate_fell: bool = False
) -> list[int]:
    """Return accepted, failed and mark of a step with this relative error."""
    has = torch.randn(500) if has is None else has
    note = error.summarise(has, misses * has, torch.tensor([flag], dtype=torch.int32), rate_fell)
    return [int(part) for part in error.check(note)]


def after(misses: float, steps: int = 40, has: torch.Tensor | None = None) -> CodeError:
    """Return the estimate after this many steps with this error."""
    error = CodeError(0.9, 0, CPU)
    for _ in range(steps):
        check(error, misses, has=has)
    return error


def test_checks() -> None:
    assert check(after(0.8), 0.8) == [1, 0, 0]
    assert check(after(1.0), 1.0) == [0, 0, 1]
    assert check(after(0.8), 0.8, flag=1) == [0, 1, 0]
    assert check(after(0.8), 0.8, rate_fell=True) == [1, 0, 2]
    assert check(after(1.0), 1.0, rate_fell=True) == [0, 0, 3]
    assert after(0.8).error == pytest.approx(0.8 * (1 - 2 / SIGNED_SUMS) ** 0.5, rel=1e-3)  # as fair where errors are not alike


@pytest.mark.parametrize("wrong", [3.0, 1e20, math.inf, math.nan])
def test_a_large_error_is_refused_at_once_and_forgotten_soon(wrong: float) -> None:
    error = after(0.5)
    assert check(error, wrong) == [0, 0, 1]
    assert math.isfinite(error.error)
    for _ in range(10):
        check(error, 0.5)
    assert check(error, 0.5) == [1, 0, 0]


@pytest.mark.parametrize("wrong", [1.2, 1.5])
def test_an_error_that_grows_slowly_is_refused_soon(wrong: float) -> None:
    error = after(0.5)
    assert sum(check(error, wrong)[0] for _ in range(30)) <= 6


def test_zeros_and_overflows_give_no_estimate() -> None:
    error, zeros = after(0.5), torch.zeros(500)
    before = error.error
    assert check(error, 0.5, has=zeros) == [1, 0, 0]
    note = error.summarise(zeros, torch.ones(500), None)
    assert [int(part) for part in error.check(note)] == [0, 0, 0]  # codes of zeros are not used
    assert check(error, 5.0, flag=1)[1] == 1
    assert error.error == before


@pytest.mark.parametrize("scale", [1e-30, 1e19, 1e37])
def test_sizes_do_not_matter(scale: float) -> None:
    error, has = CodeError(0.9, 0, CPU), scale * torch.randn(500)
    assert [check(error, misses, has=has)[0] for misses in (0.5, 4.0)] == [1, 0]
