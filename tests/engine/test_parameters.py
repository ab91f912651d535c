"""A model's parameters: gradients read and written where they lie, names, learning rates, and the check for two momenta."""

from __future__ import annotations

import pytest
import torch

from gradcomp.engine.parameters import Parameters, Slot, check_momentum, named_of, rates_of
from gradcomp.spec import make


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


def test_rates_are_those_of_the_moment() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    rate = rates_of(optimizer, model.named_parameters())
    assert rate("0.weight") == 0.5 and rate("1.bias") == 0.1
    optimizer.param_groups[0]["lr"] = 0.25
    assert rate("0.weight") == 0.25
    few = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not have the parameter '1\.weight'"):
        rates_of(few, model.named_parameters())("1.weight")
