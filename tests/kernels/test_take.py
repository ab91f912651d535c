"""Takes and adds conserve every entry, bit by bit."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_arrays import Arrays, entries, flag_on, to_take
from torch import Tensor

from gradcomp.native import kernels


def take_topk(residual: Tensor, k: int, mask: kernels.Mask | None = None, flag: Tensor | None = None) -> Arrays:
    taken = to_take(k, residual.device)
    kernels.take_topk(residual, k, **taken, mask=mask, flag=flag)
    return taken


def check_topk(residual: Tensor, k: int) -> None:
    before = residual.clone()
    taken = take_topk(residual, k)
    wanted = reference.topk(before, k)
    assert torch.equal(taken["indices"].long(), wanted)
    assert reference.same(taken["values"], before[wanted])
    assert taken["header"].tolist() == [k, 0]
    left = before.clone()
    left[wanted] = 0
    assert reference.same(residual, left)


@pytest.mark.parametrize("kind", gradients.KINDS)
@pytest.mark.parametrize(
    "n,k", [(1, 1), (2, 1), (7, 7), (1000, 1), (4096, 41), (65_537, 66), (100_000, 25_000), (30_000, 30_000)]
)
def test_topk_is_exact(device: torch.device, kind: str, n: int, k: int) -> None:
    check_topk(gradients.draw(kind, n, seed=n + k).to(device), k)


@given(kind=gradients.kinds, n=st.integers(1, 20_000), share=st.floats(0.0, 1.0), seed=gradients.seeds)
def test_topk_is_exact_for_any_size(device: torch.device, kind: str, n: int, share: float, seed: int) -> None:
    check_topk(gradients.draw(kind, n, seed).to(device), max(1, min(n, int(share**4 * n))))


def test_topk_in_clusters(device: torch.device) -> None:
    """All large entries lie in one place, which a sample may miss, and which overfills one part of a list."""
    residual = torch.randn(100_000, device=device) * 1e-3
    residual[50_000:50_900] += 5
    check_topk(residual, 1000)


def test_topk_of_few_among_zeros(device: torch.device) -> None:
    """Fewer than k entries are not 0: zeros of the lowest indices fill the payload."""
    residual = torch.zeros(50_000, device=device)
    residual[[7, 49_999]] = torch.tensor([1.0, -2.0], device=device)
    check_topk(residual, 50)


@pytest.mark.parametrize("step", [1, 2, 255, 256, 257, 70_000])
def test_topk_masks_the_velocity_of_entries_with_a_residual(device: torch.device, step: int) -> None:
    residual, velocity = torch.randn(5000, device=device), torch.randn(5000, device=device)
    sent_in = torch.randint(256, (5000,), device=device).to(torch.uint8)
    sent_in[::2] = (step - 1) % 256
    wanted = reference.mask(velocity, sent_in, step, reference.topk(residual, 50))
    take_topk(residual, 50, kernels.Mask(velocity, sent_in, step))
    assert reference.same(velocity, wanted[0]) and torch.equal(sent_in, wanted[1])


def test_the_masks_of_torch_are_those_of_the_kernels(device: torch.device) -> None:
    velocity, sent_in = torch.randn(1000, device=device), torch.randint(256, (1000,), device=device).to(torch.uint8)
    places = torch.cat([torch.randperm(999)[:300], torch.tensor([999, 999, 999])]).to(device)
    sent = torch.rand(303, device=device) < 0.5
    sent[-3:] = torch.tensor([False, True, False])
    wanted = reference.mask(velocity, sent_in, 77, places[sent])
    mask = kernels.Mask(velocity, sent_in, 77)
    mask.note(places, sent)
    assert reference.same(velocity, wanted[0]) and torch.equal(sent_in, wanted[1])
    everything = torch.arange(1000, device=device)
    wanted = reference.mask(velocity, sent_in, 78, everything[500:])
    mask._replace(step=78).note_all(everything >= 500)
    assert reference.same(velocity, wanted[0]) and torch.equal(sent_in, wanted[1])


def test_topk_passes_the_flag_on(device: torch.device) -> None:
    for value in (0, 1):
        assert take_topk(torch.randn(100, device=device), 3, flag=flag_on(device, value))["header"].tolist() == [3, value]


def test_topk_on_views_that_begin_anywhere(device: torch.device) -> None:
    base = torch.randn(40_005, device=device)
    for offset in range(1, 5):
        check_topk(base[offset : offset + 40_000].clone()[offset:], 40)


@given(kind=gradients.kinds, n=st.integers(1, 5000), seed=gradients.seeds)
def test_take_then_add_gives_back_the_tensor(device: torch.device, kind: str, n: int, seed: int) -> None:
    """For every pair of take and add: x == x_after + add(zeros, take(x))."""
    before = gradients.draw(kind, n, seed).to(device)

    residual = before.clone()
    taken = take_topk(residual, max(1, n // 7))
    restored = torch.zeros(n, device=device)
    kernels.add_sparse(restored, **taken)
    assert torch.equal(residual + restored, before)

    residual, all_of_it = before.clone(), torch.empty(n, device=device)
    kernels.offer_all(residual, all_of_it)
    assert reference.same(residual, before) and reference.same(all_of_it, before)
    kernels.settle_all(residual, all_of_it)
    assert not residual.any()
    assert torch.equal(residual + all_of_it, before)


def test_offer_all_passes_the_flag_on(device: torch.device) -> None:
    residual, taken = torch.randn(1001, device=device), torch.empty(1001, device=device)
    before = residual.clone()
    kernels.offer_all(residual, taken, flag_on(device, 1))
    assert taken[0].isnan() and reference.same(taken[1:], before[1:])
    kernels.settle_all(residual, taken)
    assert reference.same(residual, before)  # it came to nothing
    kernels.settle_all(residual, torch.zeros(1001, device=device), keep=0.5)
    assert reference.same(residual, 0.5 * before)


@pytest.mark.parametrize("scale", [0.25, 1 / 3])
def test_offer_all_scales(device: torch.device, scale: float) -> None:
    residual, taken = torch.randn(1001, device=device), torch.empty(1001, device=device)
    kernels.offer_all(residual, taken, None, scale)
    assert reference.same(taken, residual * torch.tensor(scale, device=device))


@pytest.mark.parametrize(
    "sent,scale,wanted",
    [
        (entries([2.0, 4.0, 8.0], [0, 9, 5], count=2), 0.25, [1.5, 1, 1, 1, 1, 1, 1, 1, 1, 2.0]),
        (entries([2.0, 4.0], [3, 5], count=900), 1.0, [1, 1, 1, 3, 1, 5, 1, 1, 1, 1]),  # more wanted to travel: all of it
    ],
)
def test_add_sparse_adds_scaled_and_counts(device: torch.device, sent: Arrays, scale: float, wanted: list[float]) -> None:
    target = torch.ones(10, device=device)
    kernels.add_sparse(target, **{name: array.to(device) for name, array in sent.items()}, scale=scale)
    assert target.tolist() == wanted


@pytest.mark.parametrize(
    "sent",
    [
        entries([2.0], [3], flag=1),
        entries([1.0], [0], count=-1),
        entries([1.0, 1.0], [2, 10]),
        entries([1.0, 1.0], [2, -1]),
        entries([1.0], [2**31 - 1]),
    ],
)
def test_a_flagged_or_malformed_payload_is_noted_and_never_writes_elsewhere(device: torch.device, sent: Arrays) -> None:
    around = torch.ones(30, device=device)
    kernels.add_sparse(around[10:20], **{name: array.to(device) for name, array in sent.items()})
    assert around[10].isnan() and (around[:10] == 1).all() and (around[20:] == 1).all()
    assert not sent["header"][1] or (around[11:] == 1).all()


def test_settling_sparse_entries(device: torch.device) -> None:
    """All entries go back if the update is not finite, otherwise the share that is kept."""
    before = torch.randn(3000, device=device)
    residual = before.clone()
    taken = take_topk(residual, 30, flag=flag_on(device, 1))
    after = residual.clone()
    update = torch.zeros(3000, device=device)
    kernels.settle_sparse(residual, **taken, update=update)
    assert reference.same(residual, after)
    kernels.settle_sparse(residual, **taken, update=update, keep=0.5)
    assert torch.equal(residual[taken["indices"].long()], 0.5 * taken["values"])
    residual.copy_(after)
    update[0] = float("nan")
    kernels.settle_sparse(residual, **taken, update=update, keep=0.5)
    assert torch.equal(residual, before)
