"""FSDP2: models and their options: types, offloading, placements, ties, groups of modules, compilation, factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import RANKS, by_hand, inputs, loss, net, run_cases, whole_grads, wrap_of, wrapped
from ranks import join, launch, once
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import gradcomp
import gradcomp.fsdp
from gradcomp.fsdp import _scale

# By mesh: a spec, and the largest squared error of an exchange; of bfloat16 it is larger.
SPECS = {"shards": ("blocks:bits=8", 1e-4), "two by two": ("blocks:bits=8", 3e-4)}
COARSE = 1e-4


def attached(model: nn.Module, spec: str, batch: Tensor | None = None) -> Any:
    """Exchange the gradients of a batch."""
    handle = gradcomp.fsdp.attach(model, spec)
    loss(model, inputs(0)[dist.get_rank()] if batch is None else batch).backward()
    grads = {name.replace("_orig_mod.", ""): each.float() for name, each in whole_grads(model).items()}
    return grads, by_hand(0), handle


def reduced_in_bfloat16(kind: str, mesh: Any, spec: str) -> Any:
    return attached(wrapped(kind, net(), mesh, reduce_dtype=torch.bfloat16), spec)


def reduced_in_float16(kind: str, mesh: Any, spec: str) -> Any:
    """The gradients are divided in two parts, before and after the sums."""
    return attached(wrapped(kind, net(), mesh, reduce_dtype=torch.float16), spec)


def parameters_in_bfloat16(kind: str, mesh: Any, spec: str) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return attached(wrapped(kind, net(), mesh, mp_policy=policy), spec)


def all_in_bfloat16(kind: str, mesh: Any, spec: str) -> Any:
    return attached(wrapped(kind, net(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), spec)


def offloaded(kind: str, mesh: Any, spec: str) -> Any:
    return attached(wrapped(kind, net(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), spec)


def even() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(52, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))


def sharded_by_columns(kind: str, mesh: Any, spec: str) -> Any:
    model, batch = even(), torch.randn(RANKS, 8, 52, generator=torch.Generator().manual_seed(0))
    wrapped(kind, model, mesh, shard_placement_fn=lambda _: Shard(1))
    grads, _, handle = attached(model, spec, batch[dist.get_rank()])
    by_itself = even()
    (sum(loss(by_itself, each) for each in batch) / RANKS).backward()
    return grads, {n: each.grad for n, each in by_itself.named_parameters()}, handle


class Tied(nn.Module):
    """A model with one weight for the embedding and the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)).tanh())


def tied(kind: str, mesh: Any, spec: str) -> Any:
    model, tokens = Tied(), torch.randint(0, 20, (RANKS, 6), generator=torch.Generator().manual_seed(0))
    wrap_of(kind)(model.middle, mesh=mesh)
    wrap_of(kind)(model, mesh=mesh)
    grads, _, handle = attached(model, spec, tokens[dist.get_rank()])
    by_itself = Tied()
    (sum(loss(by_itself, each) for each in tokens) / RANKS).backward()
    return grads, {n: each.grad for n, each in by_itself.named_parameters()}, handle


def two_layers_as_one_module(kind: str, mesh: Any, spec: str) -> Any:
    model = net()
    wrap_of(kind)([model[0], model[2]], mesh=mesh)
    return attached(wrap_of(kind)(model, mesh=mesh), spec)


def compiled_before(kind: str, mesh: Any, spec: str) -> Any:
    model = net()
    for i in (0, 2, 4):
        model[i].compile(backend="eager")
    return attached(wrapped(kind, model, mesh), spec)


def compiled_after(kind: str, mesh: Any, spec: str) -> Any:
    return attached(torch.compile(wrapped(kind, net(), mesh), backend="eager"), spec)


def sums_forced(kind: str, mesh: Any, spec: str) -> Any:
    model = wrapped(kind, net(), mesh)
    model.set_force_sum_reduction_for_comms(True)
    return attached(model, spec)


def divided_by_five(kind: str, mesh: Any, spec: str) -> Any:
    """Gloo refuses torch's own reduce-scatter with this factor."""
    model = wrapped(kind, net(), mesh)
    for i in (0, 2, 4):
        model[i].set_gradient_divide_factor(5.0)
    grads, wanted, handle = attached(model, "blocks:bits=8")
    return grads, {n: each * RANKS / 5 for n, each in wanted.items()}, handle


def loaded_after(kind: str, mesh: Any, spec: str) -> Any:
    """Attach to a model on the meta device, whose parameters come later, as new ones."""
    with torch.device("meta"):
        model = net()
    wrapped(kind, model, mesh)
    handle = gradcomp.fsdp.attach(model, spec)
    state = net().state_dict()
    shards = {n: distribute_tensor(state[n], each.device_mesh, each.placements) for n, each in model.named_parameters()}
    model.load_state_dict(shards, assign=True)
    loss(model, inputs(0)[dist.get_rank()]).backward()
    return whole_grads(model), by_hand(0), handle


def loaded_before(kind: str, mesh: Any, spec: str) -> Any:
    model = wrapped(kind, net(1), mesh)
    state = net().state_dict()
    shards = {n: distribute_tensor(state[n], each.device_mesh, each.placements) for n, each in model.named_parameters()}
    model.load_state_dict(shards, assign=True)
    return attached(model, spec)


def two_models(kind: str, mesh: Any, spec: str) -> Any:
    """Two models on one mesh are exchanged in one backward pass."""
    one, other = wrapped(kind, net(), mesh), wrapped(kind, net(3), mesh)
    handle, _ = gradcomp.fsdp.attach(one, spec), gradcomp.fsdp.attach(other, spec)
    batch = inputs(0)[dist.get_rank()]
    (loss(one, batch) + loss(other, batch)).backward()
    wanted = {f"one {n}": each for n, each in by_hand(0).items()} | {f"other {n}": g for n, g in by_hand(0, net(3)).items()}
    grads = {f"one {n}": each for n, each in whole_grads(one).items()}
    return grads | {f"other {n}": each for n, each in whole_grads(other).items()}, wanted, handle


EVERY = [
    reduced_in_bfloat16,
    reduced_in_float16,
    parameters_in_bfloat16,
    all_in_bfloat16,
    offloaded,
    sharded_by_columns,
    tied,
    two_layers_as_one_module,
    compiled_before,
    compiled_after,
    sums_forced,
    divided_by_five,
    loaded_after,
    loaded_before,
    two_models,
]


def models(kind: str) -> dict[str, Any]:
    join()
    return run_cases(EVERY, kind, SPECS[kind][0])


@once
def of_mesh(kind: str) -> list[dict[str, Any]]:
    return launch(models, RANKS, kind)


@pytest.mark.parametrize("case", [case.__name__ for case in EVERY])
@pytest.mark.parametrize("kind", SPECS)
def test_gradients_of_a_model(kind: str, case: str) -> None:
    """They are the mean by hand."""
    coarse = "float16" in case or case == "divided_by_five"
    for rank in of_mesh(kind):
        wrong, stats = rank[case]
        assert wrong < (COARSE if coarse else SPECS[kind][1])
        assert stats["steps"] == 1


def test_the_factor_of_a_reduction() -> None:
    """The mean times the factor is the reduction: NCCL multiplies by PREMUL_SUM's factor before it sums."""
    assert _scale(dist.ReduceOp.AVG, 4) == 1.0
    assert _scale(dist.ReduceOp.SUM, 4) == 4.0
    assert _scale(dist._make_nccl_premul_sum(0.2), 4) == pytest.approx(0.8)
