"""Takes and adds conserve every entry, bit by bit."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_arrays import to_take
from torch import Tensor

from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import COMPACT
from gradcomp.native import kernels


def check_topk(before: Tensor, k: int) -> None:
    wanted, left = reference.topk(before, k), before.clone()
    left[wanted] = 0
    residual, taken = before.clone(), to_take(k, before.device)
    kernels.take_topk(residual, k, **taken)
    assert torch.equal(taken["indices"].long(), wanted)
    assert reference.same(taken["values"], before[wanted])
    assert taken["header"].tolist() == [k, 0]
    assert reference.same(residual, left)


@pytest.mark.parametrize("kind", gradients.KINDS)
@pytest.mark.parametrize(
    "n,k", [(1, 1), (2, 1), (7, 7), (1000, 1), (4096, 41), (65_537, 66), (100_000, 25_000), (30_000, 30_000)]
)
def test_topk_is_exact(device: torch.device, kind: str, n: int, k: int) -> None:
    check_topk(gradients.draw(kind, n, seed=n + k).to(device), k)


def test_topk_in_clusters(device: torch.device) -> None:
    """All large entries lie in one place, which a sample may miss, and which overfills one part of a list."""
    residual = torch.randn(100_000, device=device) * 1e-3
    residual[50_000:50_900] += 5
    check_topk(residual, 1000)
    check_topk(residual, 300)
    residual[20_000:26_400] += 2.6
    check_topk(residual[:40_000], 90)


@pytest.mark.parametrize("n, count, steps", gradients.CLOSE)
def test_topk_of_close_entries(device: torch.device, n: int, count: int, steps: int) -> None:
    check_topk(gradients.close(n, count, steps).to(device), count // 2)


def test_topk_of_few_among_zeros(device: torch.device) -> None:
    """Fewer than k entries are not 0: zeros of the lowest indices fill the payload."""
    residual = torch.zeros(50_000, device=device)
    residual[[7, 49_999]] = torch.tensor([1.0, -2.0], device=device)
    check_topk(residual, 50)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("above", [False, True])
def test_a_take_lets_the_ages_of_what_it_takes_begin_again(device: torch.device, above: bool, packed: bool) -> None:
    n, k = 10_000, 600
    before = torch.randn(n, device=device)
    before_ages = torch.randint(1, 256, (n,), device=device).to(torch.uint8)
    residual, ages = before.clone(), before_ages.clone()
    ends = torch.tensor([4000, n], dtype=torch.int32, device=device)
    threshold = reference.topk(before, k)
    bound = float(before[threshold].abs().min()) * (1 - 1e-6)
    payload = torch.zeros(payloads.size(COMPACT.form(n, k)), dtype=torch.uint8, device=device)
    if above and packed:
        moments = torch.tensor([reference.moments(part) for part in before.split([4000, 6000])], dtype=torch.float64)
        lam, thresholds = torch.tensor([2.2, 0.1], device=device), torch.empty(2, device=device)
        kernels.take_above_and_pack(residual, kernels.Bar(moments.to(device), ends, lam, thresholds), k, payload, ages)
    elif packed:
        kernels.take_topk_and_pack(residual, k, payload, ages)
    elif above:
        kernels.take_above(residual, ends, torch.full((2,), bound, device=device), **to_take(k, device), ages=ages)
    else:
        kernels.take_topk(residual, k, **to_take(k, device), ages=ages)
    taken = residual != before  # a packed entry leaves its rounding error
    assert 100 < taken.sum() <= k and ((above and packed) or taken.sum() == k)
    assert torch.equal(ages, torch.where(taken, 0, before_ages))


def test_ages_of_entries_that_torch_sends_begin_again(device: torch.device) -> None:
    before = torch.randint(256, (1000,), device=device).to(torch.uint8)
    places = torch.cat([torch.randperm(999)[:400], torch.tensor([999, 999, 999])]).to(device)
    sent = torch.rand(403, device=device) < 0.5
    sent[-3:] = torch.tensor([False, True, False])
    wanted, ages = before.clone(), before.clone()
    wanted[places[sent]] = 0
    kernels.note_sent(ages, places, sent)
    assert torch.equal(ages, wanted)


@given(kind=gradients.kinds, n=st.integers(1, 5000), seed=gradients.seeds)
def test_take_then_add_gives_back_the_tensor(device: torch.device, kind: str, n: int, seed: int) -> None:
    """For every pair of take and add: x == x_after + add(zeros, take(x))."""
    before = gradients.draw(kind, n, seed).to(device)

    residual = before.clone()
    taken = to_take(max(1, n // 7), device)
    kernels.take_topk(residual, len(taken["values"]), **taken)
    restored = torch.zeros(n, device=device)
    kernels.add_sparse(restored, **taken)
    assert torch.equal(residual + restored, before)

    residual, all_of_it = before.clone(), torch.empty(n, device=device)
    kernels.offer_all(residual, all_of_it)
    assert reference.same(residual, before) and reference.same(all_of_it, before)
    kernels.settle_all(residual, all_of_it)
    assert not residual.any()
    assert torch.equal(residual + all_of_it, before)
