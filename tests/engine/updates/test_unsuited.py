"""Optimizers that an exchange of updates does not suit are named in one warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replicas import Replicas
from torch import optim

import gradcomp
from gradcomp.engine.updates.hidden_momentum import kept_tensors

pytestmark = pytest.mark.usefixtures("group_of_one")


class Masters(optim.Optimizer):
    """Steps a float32 copy of the weights in its state, and rounds it to theirs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state["mean"] = each.grad.clone()
            master = state.setdefault("master", each.float())
            each.copy_(master.sub_(0.01 * each.grad))


class Gathering(optim.SGD):
    """Steps a part of the parameters on each rank, and gathers them, where there are several."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        if self.param_groups[0].get("ranks", 1) > 1:
            torch.distributed.all_gather([], torch.zeros(1))


class Estimating(optim.SGD):
    """Has the settings of D-Adaptation's optimizers, and of Prodigy."""

    def __init__(self, weights: Any):
        super().__init__(weights, 0.01)
        self.param_groups[0] |= {"d": 1e-6, "growth_rate": float("inf")}


class FewBits(torch.Tensor):
    """A state in 8 bits, as torchao's: codes and a scale, and no arithmetic but an optimizer's own."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> FewBits:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        raise NotImplementedError(f"FewBits has no {function}")


class InFewBits(optim.SGD):
    """Keeps the last gradient in 8 bits."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for each in self.param_groups[0]["params"]:
            scale = each.grad.abs().max() / 127
            self.state[each]["mean"] = FewBits((each.grad / scale).round().to(torch.int8), scale)


def test_a_state_in_few_bits_is_left_as_it_is() -> None:
    ours = Replicas("topk", lambda weights: InFewBits(weights, 0.01), ranks=2).train(2)
    before = [[each.clone() for each in kept_tensors(rank.optimizer)] for rank in ours.ranks]
    with pytest.warns(gradcomp.GradcompWarning, match="InFewBits.* still differ in what they keep"):
        ours.change("blocks")
    for rank, kept in zip(ours.ranks, before, strict=True):
        assert kept and all(map(torch.equal, kept_tensors(rank.optimizer), kept)), "a scale would not fit its codes"


def test_an_optimizer_that_needs_equal_gradients_or_learns_from_its_steps_is_warned_of() -> None:
    for make, said in (
        (lambda weights: Gathering(weights, 0.01), r"Gathering calls all_gather\(\) itself: .*\"blocks\""),
        (Estimating, r"Estimating estimates its rate from how its own steps agree .*\"blocks\""),
    ):
        ours = Replicas("topk", make, ranks=2)
        with pytest.warns(gradcomp.GradcompWarning, match=said):
            ours.train(1)
        ours.train(2, first=1)  # once


@pytest.mark.parametrize("spec", ["sign", "topk"])
def test_an_optimizer_that_keeps_weights_of_its_own_is_warned(spec: str) -> None:
    ours = Replicas(spec, lambda weights: Masters(weights, {}), ranks=2, form=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"Masters keeps weights of its own \('master' in its state\).*\"blocks\""):
        ours.train(1)
    ours.train(2, first=1)  # once
