"""What adapters need and what needs no network to be tested: carriers, the handshake's records, slots."""

from __future__ import annotations

import math
import re

import pytest
import torch

from gradcomp.engine import agreement
from gradcomp.engine.parameters import Parameters, Slot, check_momentum, named_of
from gradcomp.engine.session import Options, Session
from gradcomp.networks import carrier
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make


@pytest.mark.parametrize("size", [2, 3, 4, 7, 100, 1024])
@pytest.mark.parametrize("predivide", [1.0, 2.0, 3.0])
def test_the_carrier_tells_average_from_sum_and_refuses_the_rest(size: int, predivide: float) -> None:
    numbers = [carrier.carrier(rank).item() for rank in range(size)]
    mean = torch.tensor([x / predivide for x in numbers]).sum().item() * predivide / size
    assert carrier.scale(mean, size) == 1
    assert carrier.scale(sum(numbers), size) == size
    for op, result in {"Min": min(numbers), "Max": max(numbers), "Product": math.prod(numbers[:30])}.items():
        with pytest.raises(ValueError, match=f"op={op}, which cannot be compressed; use op=Average or op=Sum"):
            carrier.scale(result, size)
    with pytest.raises(ValueError, match="process set"):
        carrier.scale(1.25, size)


def test_one_rank_alone_is_average() -> None:
    assert carrier.scale(2.0, 1) == 1


TERMS = {"spec": "topk", "seed": "0", "names": "a, b"}


def test_records_have_one_size_whatever_they_hold() -> None:
    sizes = {agreement.record(TERMS | {"names": "x" * n}).numel() for n in (0, 1, 111, 112, 113, 100_000)}
    assert len(sizes) == 1


def test_ranks_that_agree_pass() -> None:
    agreement.check(TERMS, [agreement.record(TERMS)] * 3)


@pytest.mark.parametrize("term", TERMS)
def test_ranks_that_differ_are_told_where(term: str) -> None:
    odd = TERMS | {term: "other"}
    for own in (TERMS, odd):  # every rank comes to the same sentence
        with pytest.raises(ValueError, match=re.escape(f"{term}: rank 0 has {TERMS[term]!r}, rank 2 has 'other'")):
            agreement.check(own, [agreement.record(t) for t in (TERMS, TERMS, odd)])


def test_a_difference_beyond_what_is_shown_is_found() -> None:
    long = "x" * 500
    records = [agreement.record(TERMS | {"names": long + end}) for end in "ab"]
    with pytest.raises(ValueError, match=r"names: .*digest"):
        agreement.check(TERMS, records)


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


def test_contiguous_gradients_are_handed_over_where_they_lie() -> None:
    p = parameter(3, 4)
    p.grad = torch.randn(3, 4)
    slot = Slot("p", p)
    assert slot.open().data_ptr() == p.grad.data_ptr()
    before = p.grad
    slot.close()
    assert p.grad is before


def test_channels_last_costs_no_copy() -> None:
    p = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    p.grad = torch.randn_like(p)
    slot = Slot("p", p)
    handed = slot.open()
    assert handed.is_contiguous() and handed.data_ptr() == p.grad.data_ptr()
    assert torch.equal(handed.view(-1), p.grad.permute(0, 2, 3, 1).reshape(-1))


@pytest.mark.parametrize(
    "grad",
    [torch.randn(4, 3).t(), torch.randn(6, 8)[::2, ::2], torch.randn(3, 1).expand(3, 4), torch.ones(()).expand(3, 4)],
    ids=["transposed", "strided", "expanded rows", "expanded scalar"],
)
def test_gradients_laid_out_otherwise_are_copied_and_replaced(grad: torch.Tensor) -> None:
    p = parameter(3, 4)
    p.grad = grad
    slot = Slot("p", p)
    handed = slot.open()
    assert torch.equal(handed, grad)
    handed.mul_(2)
    slot.close()
    assert torch.equal(p.grad, 2 * grad) and p.grad.shape == (3, 4)


def test_slots_count_tied_parameters_once_and_leave_frozen_ones_out() -> None:
    tied, frozen = parameter(2), parameter(2)
    frozen.requires_grad = False
    found = Parameters([("a", tied), ("b", frozen), ("c", tied), ("d", parameter(1))])
    assert [slot.name for slot in found.slots] == ["a", "d"]
    with pytest.raises(ValueError, match="two parameters called 'a'"):
        Parameters([("a", parameter(1)), ("a", parameter(1))])


def test_names_are_the_optimizers_own_and_in_the_given_order() -> None:
    a, b, c = parameter(1), parameter(1), parameter(1)
    optimizer = torch.optim.SGD([{"params": [b]}, {"params": [a]}], lr=1)
    assert [name for name, _ in named_of(optimizer, [("a", a), ("b", b), ("c", c)])] == ["a", "b"]
    assert [name for name, _ in named_of(optimizer, None)] == ["allreduce.noname.0.0", "allreduce.noname.1.0"]


def test_momentum_twice_is_refused_and_momentum_unseen_is_warned_of() -> None:
    p = parameter(1)
    compressor = make("topk:momentum=0.9")
    with pytest.raises(ValueError, match="would act twice"):
        check_momentum(compressor, torch.optim.SGD([p], lr=1, momentum=0.9))
    assert check_momentum(compressor, torch.optim.SGD([p], lr=1)) is None
    assert "must be 0" in (check_momentum(compressor, None) or "")
    assert check_momentum(make("topk"), None) is None


class Alone(MemoryNetwork):
    """A connection of one rank."""

    def __init__(self) -> None:
        super().__init__(Board(1), 0, 1)
        self.hosts, self.device, self.generation, self.host = None, torch.device("cpu"), object(), "here"

    def prepare(self) -> None:
        """Nothing is to be prepared."""


def test_a_change_in_the_middle_of_a_step_is_refused() -> None:
    """Gradients that were handed over would be forgotten, and the ranks' weights drift apart."""
    p = parameter(100)
    session = Session(make("topk:ratio=0.1"), Parameters([("p", p)]), Alone(), Options(None, 25, 0), "unknown")
    for _ in range(2):
        p.grad = torch.randn(100)
        session.mark_ready(session.slot(p))
        with pytest.raises(RuntimeError, match=r"change\(\) came in the middle of a step"):
            session.change(make("dense"))
        session.finish_step()
    waiting = session.residual()["p"].clone()
    session.change(make("dense"))
    assert torch.equal(session.residual()["p"], waiting) and waiting.any()
