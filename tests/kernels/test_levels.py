"""Levels of groups, rounding to them, and the words that codes travel in."""

from __future__ import annotations

import math
from typing import NamedTuple

import gradients
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradcomp.native import extension, kernels

NATIVE = extension.native
PER_WORD = {2: 64, 3: 40, 5: 27, 9: 20}
SHORTEST = 32


def ends_of(n: int, group: int) -> list[int]:
    """List the ends of the groups. A rest is a group of its own, a short one the end of the last group."""
    ends = list(range(group, n + 1, group))
    if not ends or n - ends[-1] >= SHORTEST:
        return [*ends, n]
    return [*ends[:-1], n]


def words_of(n: int, group: int, count: int) -> int:
    ends = ends_of(n, group)
    return sum(math.ceil((end - begin) / PER_WORD[count]) for begin, end in zip([0, *ends], ends, strict=False))


class Quantised(NamedTuple):
    levels: Tensor
    cuts: Tensor
    words: Tensor
    rest: Tensor
    said: Tensor


def quantise(flat: Tensor, form: str, group: int, count: int, key: int = 1, bounds: Tensor | None = None) -> Quantised:
    n, device = flat.numel(), flat.device
    groups = len(ends_of(n, group))
    levels, cuts = torch.empty(groups * count, device=device), torch.empty(groups, device=device)
    words = torch.empty(words_of(n, group, count), dtype=torch.int64, device=device)
    kernels.find_levels(flat, form, group, count, levels, cuts, bounds)
    rest = flat.clone()
    kernels.take_levels(rest, levels, group, count, key, words, cuts if form in ("mean", "lloyd", "sign") else None)
    said = torch.zeros(n, device=device)
    header = torch.zeros(2, dtype=torch.int32, device=device)
    kernels.add_levels(said, [levels], [words], [header], group, count)
    return Quantised(levels.view(groups, count), cuts, words, rest, said)


def error_of(x: Tensor, levels: Tensor) -> float:
    """Compute the expected squared error of rounding at random, and outside the levels to the nearest."""
    x, levels = x.double(), levels.double().contiguous()
    inside = x.clamp(levels[0], levels[-1])
    at = torch.searchsorted(levels, inside, right=True).clamp(1, len(levels) - 1)
    low, high = levels[at - 1], levels[at]
    return float(((inside - low) * (high - inside) + (x - inside) ** 2).sum())


CASES = [
    *(("optimal", count) for count in (3, 5, 9)),
    *((form, count) for form in ("peak", "norm") for count in (3, 5, 9)),
    *((form, count) for form in ("range", "quantile") for count in (2, 3, 5, 9)),
    *((form, 2) for form in ("partly", "mean", "lloyd", "sign")),
]
forms = pytest.mark.parametrize("form,count", CASES)


@forms
@pytest.mark.parametrize(
    "n,group", [(1, 64), (33, 64), (96, 64), (1000, 129), (1300, 512), (1000, 2048), (2079, 2048), (2500, 4096)]
)
def test_twins_agree_and_nothing_is_lost(
    device: torch.device, form: str, count: int, n: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = extension.native
    for kind in gradients.KINDS[n % 2 :: 2] if native is not NATIVE else gradients.KINDS:  # the emulator takes its time
        flat = gradients.draw(kind, n, seed=n + count).to(device)
        monkeypatch.setattr(extension, "native", native)
        found = quantise(flat, form, group, count)
        monkeypatch.setattr(extension, "native", NATIVE)
        wanted = quantise(flat.cpu(), form, group, count)
        for ours, theirs in zip(found, wanted, strict=True):
            assert reference.same(ours.cpu(), theirs) if ours.dtype == torch.float32 else torch.equal(ours.cpu(), theirs)
        assert torch.equal(found.levels.sort(1).values, found.levels)
        near = 1e-6 * (flat.abs() + found.said.abs()) + 1e-44
        assert ((found.said + found.rest - flat).abs() <= near).all()
        ends = ends_of(n, group)
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            assert torch.isin(found.said[begin:end], found.levels[i]).all()


@pytest.mark.parametrize("count", [2, 3, 5, 9])
@pytest.mark.parametrize("n,group,skipped", [(9000, 512, 0), (8210, 4096, 0), (9000, 8500, 0), (700, 64, 1)])
def test_words_of_many_blocks_of_long_groups_and_between_fours(
    device: torch.device, count: int, n: int, group: int, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU takes whole groups through shared memory, in several blocks; longer ones, and single entries, where they lie."""
    native = extension.native
    groups, flat = len(ends_of(n, group)), gradients.draw("normal", n + skipped, seed=n)
    levels = torch.linspace(-2, 2, count).repeat(groups) * torch.arange(1, groups + 1).repeat_interleave(count)
    random = torch.Generator().manual_seed(n)
    wild = torch.randint(-(2**63), 2**63 - 1, (words_of(n, group, count),), generator=random)
    found = []
    for own, place in ((native, device), (NATIVE, torch.device("cpu"))):
        monkeypatch.setattr(extension, "native", own)
        its = levels.to(place)
        rest, words = flat.clone().to(place)[skipped:], torch.empty_like(wild, device=place)
        kernels.take_levels(rest, its, group, count, 7, words)
        target = flat.clone().to(place)[skipped:]
        headers = [torch.zeros(2, dtype=torch.int32, device=place) for _ in range(2)]
        kernels.add_levels(target, [its, 3 * its], [words, wild.to(place)], headers, group, count)
        settled = rest.clone() if skipped == 0 else torch.cat([rest[:1], rest])[1:]
        kernels.settle_levels(settled, its, words, group, count, torch.full_like(settled, math.nan))
        found.append([x.cpu() for x in (rest, words, target, settled)])
    for ours, theirs in zip(*found, strict=True):
        assert reference.same(ours, theirs) if ours.dtype == torch.float32 else torch.equal(ours, theirs)


@pytest.mark.parametrize("form", ["mean", "lloyd"])
@given(seed=gradients.seeds, kind=gradients.kinds, n=st.integers(1, 300))
def test_levels_that_are_means_keep_the_sum(form: str, seed: int, kind: str, n: int) -> None:
    flat = gradients.draw(kind, n, seed)
    found = quantise(flat, form, 512, 2)
    slack = 1e-5 * float(flat.double().abs().sum()) + 1e-40
    assert abs(float(found.said.double().sum() - flat.double().sum())) <= slack
    x, above = flat.double(), flat >= found.cuts[0]
    for level, own in zip(found.levels[0], (x[~above], x[above]), strict=True):
        assert not len(own) or float(own.mean()) == pytest.approx(
            float(level), rel=1e-6, abs=1e-6 * float(x.abs().max()) + 1e-44
        )
    if form == "mean":
        assert float(found.cuts[0]) == pytest.approx(float(x.mean()), rel=1e-6, abs=1e-12 * float(x.abs().max()) + 1e-44)
        return
    # Of all ways to cut the entries in two, none errs less.
    x = x.sort().values
    ways = [float(((x[:i] - x[:i].mean()) ** 2).sum() + ((x[i:] - x[i:].mean()) ** 2).sum()) for i in range(1, n)]
    best = min([float(((x - x.mean()) ** 2).sum()), *ways])
    assert float(found.rest.double().square().sum()) <= best * (1 + 1e-5) + 1e-10 * float((x**2).sum())


@pytest.mark.parametrize("count", [3, 5, 9])
def test_rounding_at_random_is_right_in_the_mean(count: int, device: torch.device) -> None:
    n, tries = 256, 400
    flat = gradients.draw("laplace", n, 7).to(device)
    runs = [quantise(flat, "optimal", 128, count, key=key << 32 | 5) for key in range(tries)]
    mean = torch.stack([run.said.cpu().double() for run in runs]).mean(0)
    x, levels = flat.cpu().double(), runs[0].levels.cpu().double().repeat_interleave(128, 0)
    at = (x[:, None] >= levels).sum(1).clamp(1, count - 1)[:, None]
    low, high = levels.gather(1, at - 1)[:, 0], levels.gather(1, at)[:, 0]
    deviation = ((x - low) * (high - x) / tries).sqrt()
    often = torch.minimum(x - low, high - x) * tries > 5 * (high - low)  # rounded either way several times
    z = ((mean - x) / deviation)[often]
    assert often.sum() > n / 2 and z.abs().max() < 5 and abs(float(z.mean())) < 5 / math.sqrt(len(z))


@forms
@given(seed=gradients.seeds, power=st.integers(-20, 20))
def test_a_scaled_group_has_scaled_levels(form: str, count: int, seed: int, power: int) -> None:
    flat = gradients.draw("laplace", 700, seed)
    first, second = quantise(flat, form, 256, count), quantise(2.0**power * flat, form, 256, count)
    assert torch.equal(2.0**power * first.levels, second.levels)
    assert torch.equal(first.words, second.words)


MOVING = [case for case in CASES if case[0] in ("range", "quantile", "mean", "lloyd")]


@pytest.mark.parametrize("form,count", MOVING)
@settings(max_examples=15)
@given(seed=gradients.seeds, shift=st.integers(-3000, 3000))
def test_a_shifted_group_has_shifted_levels(form: str, count: int, seed: int, shift: int) -> None:
    """Entries are multiples of 2^-10, so that a shift rounds nothing."""
    flat = (1024 * gradients.draw("laplace", 700, seed)).round() / 1024
    first, second = quantise(flat, form, 256, count), quantise(flat + shift / 64, form, 256, count)
    if form in ("mean", "lloyd"):  # means are rounded
        assert torch.allclose(first.levels + shift / 64, second.levels, rtol=1e-6, atol=1e-5)
        return
    assert torch.equal(first.levels + shift / 64, second.levels)
    assert torch.equal(first.words, second.words)


def few_values() -> list[tuple[str, Tensor]]:
    """List groups with hardly more different entries than levels, or with one."""
    groups = [("one", torch.tensor([x])) for x in (0.1, -3e37, 1e-38)]
    groups += [("constant", torch.full((40,), x)) for x in (0.0, 0.1, -1 / 3, 1e38, -1e-38)]
    groups += [("one-hot", x * torch.eye(40)[at]) for x in (0.1, -2.7, 1e38) for at in (0, 17, 39)]
    share = torch.arange(40) % 7
    groups += [
        ("two-valued", torch.where(share < some, a, b)) for some in (1, 3) for a, b in ((0.1, 0.7), (-1.3, 2.9), (-3.0, -2.0))
    ]
    groups += [("three-valued", torch.tensor([a, b, c])[share % 3]) for a, b, c in ((-1.1, 0.0, 2.3), (-1e-3, 0.3, 7.7))]
    return groups


@forms
def test_huge_entries_leave_finite_errors(form: str, count: int, device: torch.device) -> None:
    """No level is so far from an entry that the difference is not finite."""
    generator = torch.Generator().manual_seed(0)
    uniform = 0.3 + 0.7 * torch.rand(300, generator=generator)
    signs = torch.randn(300, generator=generator).sign()
    lopsided = uniform.clone()
    lopsided[7] = -1.0
    for shares in (signs, signs.abs(), uniform, signs * uniform, lopsided, -lopsided, lopsided[7:] / 2):
        flat = (reference.LARGEST * shares.double()).float().to(device)
        found = quantise(flat, form, 64, count)
        assert found.levels.isfinite().all() and found.rest.isfinite().all()
        wanted = flat.double() - found.said.double()
        torch.testing.assert_close(found.rest.double(), wanted, rtol=2**-23, atol=1e31)  # one subtraction of floats apart


SAID_EXACTLY = {
    "one": {form for form, _ in CASES},
    "constant": {form for form, _ in CASES} - {"norm"},
    "one-hot": {"optimal", "range", "quantile", "peak", "norm", "mean", "lloyd"},
    "two-valued": {"optimal", "range", "quantile", "mean", "lloyd"},
    "three-valued": {"optimal"},
}


@forms
def test_few_values_are_said_exactly(form: str, count: int) -> None:
    """No draw loses anything to an interval without width, or divides by 0."""
    for kind, flat in few_values():
        for key in range(3):
            found = quantise(flat, form, 64, count, key)
            assert found.levels.isfinite().all() and torch.equal(found.levels.sort(1).values, found.levels)
            assert found.rest.isfinite().all()
            if form in SAID_EXACTLY[kind]:
                assert torch.equal(found.said, flat) and not found.rest.any(), (kind, flat[:4])


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_codes_come_out_as_they_went_in(device: torch.device, count: int) -> None:
    for n in [*range(1, 66), 100]:
        check_codes(device, count, n)


def check_codes(device: torch.device, count: int, n: int) -> None:
    torch.manual_seed(n)
    levels = torch.arange(float(count), device=device)
    codes = torch.randint(0, count, (n,), device=device).float()
    rest, words = codes.clone(), torch.empty(words_of(n, 128, count), dtype=torch.int64, device=device)
    kernels.take_levels(rest, levels, 128, count, 1, words)
    assert not rest.any()
    said = torch.zeros(n, device=device)
    kernels.add_levels(said, [levels], [words], [torch.zeros(2, dtype=torch.int32, device=device)], 128, count)
    assert torch.equal(said, codes)
    for i in range(len(words)):  # c0 + s c1 + s^2 c2 ..., of every len(words)-th code
        own = codes[i :: len(words)].long().tolist()
        assert int(words[i]) & (1 << 64) - 1 == sum(code * count**place for place, code in enumerate(own))


@pytest.mark.parametrize("ranks", [2, 5, extension.MOST_RANKS + 3])
@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_many_ranks_levels_are_added_one_after_the_other(device: torch.device, ranks: int, count: int) -> None:
    """The sums agree to the last bit. A flag of any rank shows."""
    n, group = 1000, 129
    values = [torch.randn(n, generator=torch.Generator().manual_seed(rank)).to(device) for rank in range(ranks)]
    sent = [quantise(flat, "range", group, count, key=rank) for rank, flat in enumerate(values)]
    lists = [own.levels.flatten() for own in sent], [own.words for own in sent]
    headers = [torch.zeros(2, dtype=torch.int32, device=device) for _ in sent]
    together, apart = torch.ones(n, device=device), torch.ones(n, device=device)
    kernels.add_levels(together, *lists, headers, group, count, 0.3)
    for rank in range(ranks):
        kernels.add_levels(apart, *([own[rank]] for own in (*lists, headers)), group, count, 0.3)
    assert torch.equal(together, apart)
    headers[ranks - 1][1] = 1
    kernels.add_levels(together, *lists, headers, group, count)
    assert together[0].isnan() and together[1:].isfinite().all()


def test_a_failed_exchange_returns_all_blocks_of_a_gpu(device: torch.device) -> None:
    """One block of threads puts them back, and the last of them is shorter."""
    n, group, before = 8192 + 41, 2048, torch.randn(8192 + 41, device=device)
    residual, own = before.clone(), torch.zeros(8 + 4 * 3 * 5 + 4 + 8 * kernels.words(n, group, 3), dtype=torch.uint8)
    own = own.to(device)
    kernels.find_and_take_levels(residual, "optimal", group, 3, 7, own, flag=torch.ones(1, dtype=torch.int32, device=device))
    update = torch.zeros(n, device=device)
    kernels.add_and_settle_levels(update, [own], group, 3, 1.0, residual, own)
    assert update[0].isnan() and torch.allclose(residual, before, atol=1e-6)
