"""A model's parameters: gradients read and written where they lie, names, and wrong arguments."""

from __future__ import annotations

import pytest
import torch

from gradcomp.engine.slots import Parameters, ParameterSlot, named_of
from gradcomp.spec import make


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape))


def test_contiguous_gradients_are_handed_over_where_they_lie() -> None:
    p = parameter(3, 4)
    p.grad = torch.randn(3, 4)
    slot = ParameterSlot("p", p)
    assert slot.read().data_ptr() == p.grad.data_ptr()
    before = p.grad
    slot.close()
    assert p.grad is before


def test_channels_last_costs_no_copy() -> None:
    p = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    p.grad = torch.randn_like(p)
    slot = ParameterSlot("p", p)
    handed = slot.read()
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
    slot = ParameterSlot("p", p)
    handed = slot.read()
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


MODEL = torch.nn.Linear(2, 2)
WRONG = {
    "the model": (MODEL, "named_parameters is the model, a Linear; pass model.named_parameters()"),
    "no names": (
        list(MODEL.parameters()),
        "holds parameters without names; pass model.named_parameters() in place of model.par",
    ),
    "a spec": (
        "topk:ratio=0.01",
        "named_parameters is the spec 'topk:ratio=0.01'; pass model.named_parameters(), and compression='topk",
    ),
    "a compressor": (make("topk"), "named_parameters is the spec 'topk'; pass model.named_parameters()"),
    "a dict": (
        dict(MODEL.named_parameters()),
        "named_parameters holds a str, not pairs of name and parameter; pass model.named",
    ),
    "a number": (3, "named_parameters is of type int; pass model.named_parameters()"),
    "triples": ([("a", 1, 2)], "named_parameters holds a tuple, not pairs"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_anything_else_for_named_parameters_gets_a_sentence(wrong: str) -> None:
    given, sentence = WRONG[wrong]
    for use in (Parameters, lambda named: named_of(torch.optim.SGD(MODEL.parameters(), lr=1), named)):
        with pytest.raises(TypeError) as refused:
            use(given)
        assert sentence in str(refused.value)


def test_a_generator_that_has_been_read_is_found() -> None:
    named = MODEL.named_parameters()
    Parameters(named)
    with pytest.raises(ValueError, match=r"named_parameters is empty; a generator such as .* can be read only once"):
        Parameters(named)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="the optimizer has none of named_parameters"):
        named_of(torch.optim.SGD([parameter(1)], lr=1), MODEL.named_parameters())
