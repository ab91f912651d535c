"""The study's peers: bfloat16, and PowerSGD against its definition, torch's own hook, and the law of conservation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from laboratory.study import peers
from laboratory.study.errors import Errors

SHAPES = {"conv": (6, 4, 3, 3), "weight": (10, 7), "bias": (10,), "narrow": (1, 9)}
DENSE = ("bias", "narrow")


def gradients(ranks: int, seed: int) -> list[peers.Grads]:
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(ranks)]


def ignore(meant: object, left: object) -> None:
    pass


def mean(tensors: list[Tensor]) -> Tensor:
    return sum(tensors, torch.zeros_like(tensors[0])) / len(tensors)


def test_bf16_rounds_each_rank_and_sends_two_bytes_an_entry() -> None:
    grads, errors = gradients(3, 0), Errors()
    errors.begin(1)
    exchange = peers.make("bf16", SHAPES, 3, 0, errors.note)
    update = exchange.step(grads)
    for name in SHAPES:
        rounded = [(own[name].view(torch.int32) + 0x7FFF + (own[name].view(torch.int32) >> 16 & 1)) & ~0xFFFF for own in grads]
        torch.testing.assert_close(update[name], mean([each.view(torch.float32) for each in rounded]))
    assert exchange.bytes_sent == [2 * (6 * 36 + 70 + 10 + 9)] * 3
    (meant,), (left,) = errors.squares().values()
    assert meant == pytest.approx(float(sum(own[name].square().sum() for own in grads for name in SHAPES)), rel=1e-5)
    assert 0 < left < meant * 2**-16  # half a unit in the last of 8 bits, squared


def test_powersgd_sends_two_factors_and_what_they_would_not_make_smaller() -> None:
    for rank, factors in ((1, (6 + 36) + (10 + 7)), (4, 4 * (6 + 36) + 4 * (10 + 7))):
        exchange = peers.make(f"powersgd:rank={rank}", SHAPES, 2, 0, ignore)
        grads = gradients(2, 0)
        update = exchange.step(grads)
        assert exchange.bytes_sent == [4 * (factors + 10 + 9)] * 2
        for name in DENSE:
            torch.testing.assert_close(update[name], mean([own[name] for own in grads]))
        assert {name: each.shape for name, each in update.items()} == {name: torch.Size(s) for name, s in SHAPES.items()}
    whole = peers.make("powersgd:rank=5", SHAPES, 2, 0, ignore)
    torch.testing.assert_close(whole.step(grads)["weight"], mean([own["weight"] for own in grads]))  # 5 * 17 > 70


def test_powersgd_is_exact_where_the_mean_has_its_rank() -> None:
    """Two ranks with matrices of rank 1: their mean has rank 2."""
    generator = torch.Generator().manual_seed(0)
    grads = [{"w": torch.outer(torch.randn(9, generator=generator), torch.randn(8, generator=generator))} for _ in range(2)]
    exchange = peers.PowerSGD(2, {"w": (9, 8)}, 2, 0, ignore)
    torch.testing.assert_close(exchange.step(grads)["w"], mean([own["w"] for own in grads]), atol=1e-5, rtol=1e-5)


def test_what_powersgd_does_not_send_is_left() -> None:
    """Over any steps, the updates and the mean of what is left are the mean of all gradients."""
    errors = Errors()
    exchange = peers.PowerSGD(1, SHAPES, 3, 0, errors.note)
    given, sent = ({name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    for step in range(5):
        grads = gradients(3, step)
        errors.begin(10 * step + 1)
        update = exchange.step(grads)
        for name in SHAPES:
            given[name] += mean([own[name] for own in grads])
            sent[name] += update[name]
    for name in SHAPES:
        left = torch.zeros(()) if name in DENSE else mean([own[name] for own in exchange.left])
        torch.testing.assert_close(sent[name] + left, given[name], atol=1e-5, rtol=1e-5)
    squares = float(sum(each.square().sum() for own in exchange.left for each in own.values()))
    assert errors.squares()["left"][-1] == pytest.approx(squares, rel=1e-5)


def test_powersgd_learns_the_largest_part_of_a_gradient_that_stays() -> None:
    """Without error feedback, a warm start is the power method: it finds the best approximation, which the SVD gives."""
    grad = gradients(1, 3)[0]["weight"]
    exchange = peers.PowerSGD(2, {"w": (10, 7)}, 1, 0, ignore)
    for _ in range(200):
        update = exchange.step([{"w": grad}])["w"]
        exchange.left[0]["w"].zero_()
    u, s, v = torch.linalg.svd(grad)
    torch.testing.assert_close(update, u[:, :2] * s[:2] @ v[:2], atol=1e-4, rtol=1e-4)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.barrier()  # a thread of gloo may still hold the last operation, and torch then ends the process
    dist.destroy_process_group()


def test_powersgd_is_torchs_hook(one_rank: None) -> None:
    """Feed both the same gradients. The hook sends its first two steps whole, and draws its first Q from numpy's seed."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 9, bias=False))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    exchange = peers.PowerSGD(2, {"w": (9, 8)}, 1, 0, ignore)
    with torch.random.fork_rng():
        torch.manual_seed(numpy.random.RandomState(5).randint(1_000_000_000))
        exchange.q["w"] = torch.randn(8, 2)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        x, weights = torch.randn(20, 8, generator=generator), torch.randn(20, 9, generator=generator)
        model.zero_grad()
        (model(x) * weights).sum().backward()
        (theirs,) = [parameter.grad for parameter in model.parameters()]
        if step >= 2:
            torch.testing.assert_close(exchange.step([{"w": weights.T @ x}])["w"], theirs, atol=1e-4, rtol=1e-4)


def test_peers_stand_among_specs() -> None:
    assert peers.specs("dense,topk:ratio=0.1,momentum=0.9;bf16,powersgd:rank=4") == [
        *("dense", "topk:ratio=0.1,momentum=0.9", "bf16", "powersgd:rank=4")
    ]
    for text, message in (
        ("bf61", r"beside gradcomp's specs: bf16, powersgd:rank=4"),
        ("bf16:rank=1", "'bf16:rank=1' is not a peer's spec; write bf16, or for example powersgd:rank=4"),
        ("powersgd", "'powersgd' is not a peer's spec"),
        ("powersgd:rank=0", "'powersgd:rank=0' is not a peer's spec"),
        ("bf16,bf16", "given twice"),
        ("topk:raito=1", "did you mean 'ratio'"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            peers.specs(text)
