"""Local steps: wrong arguments, and a training on one rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import join, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradcomp


def made(model: Any = None, spec: str = "topk", **options: Any) -> gradcomp.local.LocalSteps:
    model = nn.Linear(3, 2) if model is None else model
    return gradcomp.local.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), spec, **options)


def test_without_ranks_the_remedy_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group\(\), or horovod"):
        made()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    "options,said",
    [
        ({"every": 0}, "every=0 must be a whole number, 1 or more"),
        ({"every": 2.5}, "every=2.5 must be a whole number"),
        ({"rounds": 0}, "rounds=0 must be a whole number, 1 or more"),
        ({"fragments": 0}, "fragments=0 must be a whole number"),
        ({"fragments": 4}, "fragments=4 must divide every=30, and be at most 2, the parameters"),
        ({"fragments": 3}, "fragments=3 must divide every=30, and be at most 2, the parameters"),
        ({"outer_lr": -1}, "outer_lr=-1 must be a number that is not negative"),
        ({"outer_momentum": "half"}, "outer_momentum='half' must be a number"),
        ({"outer_momentum": 1}, "outer_momentum=1 must be below 1"),
        ({"spec": "auto"}, "auto chooses by the time of a step"),
        ({"spec": "topk:ratio=2"}, "ratio=2"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**options)


@pytest.mark.usefixtures("group_of_one")
def test_a_spec_that_sends_an_entry_too_seldom_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"in 250 synchronizations .* sends an entry 2\.5 times .* a share of 0\.04 or more, or sign"
    ):
        made(spec="topk:ratio=0.01", rounds=250)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec, rounds in (("topk:ratio=0.04", 250), ("topk:ratio=0.01", None), ("sign", 1), ("dense", 1)):
            made(spec=spec, rounds=rounds)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("spec", ["topk:momentum=0.9", "sign; *bias=topk:momentum=0.5", "topk:clip=0.5", "sdagc:sam=0.5"])
def test_a_momentum_or_a_clip_for_gradients_is_refused(spec: str) -> None:
    """A momentum would make all progress ten times as large, and what is clipped would be lost."""
    with pytest.raises(ValueError, match=r"has a momentum, or clip=, .* write outer_momentum="):
        made(spec=spec)
    made(spec="topk:momentum=0")


@pytest.mark.usefixtures("group_of_one")
def test_a_wrapped_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pass the model inside it, model\.module"):
        made(DistributedDataParallel(nn.Linear(3, 2)))


@pytest.mark.usefixtures("group_of_one")
def test_a_model_whose_updates_are_exchanged_is_refused_until_that_ends() -> None:
    model = nn.Linear(3, 2)
    handle = gradcomp.ddp.attach(DistributedDataParallel(model), "topk")
    with pytest.raises(RuntimeError, match=r"exchanged in every step already, .* handle\.remove\(\) first"):
        made(model)
    handle.remove()
    made(model)


@pytest.mark.usefixtures("group_of_one")
def test_a_synchronization_is_refused_of_a_model_whose_updates_are_exchanged_since() -> None:
    model = nn.Linear(3, 2)
    local = made(model, every=1)
    wrapped = DistributedDataParallel(model)
    handle = gradcomp.ddp.attach(wrapped, "topk")
    wrapped(torch.ones(3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"exchanged in every step already, .* handle\.remove\(\) first"):
        local.step()
    handle.remove()
    local.step()


@pytest.mark.usefixtures("group_of_one")
def test_steps_after_a_flush_are_no_fault() -> None:
    """A program goes on under DDP, with the local steps still in a variable."""
    model = nn.Linear(3, 2)
    local = made(model, "dense")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            local.zero_grad()
            model.weight.sum().backward()
            local._optimizer.step() if 2 < step < 8 else local.step()
            if step == 2:
                local.flush()
        assert not caught
        for _ in range(3):
            local._optimizer.step()
        assert len(caught) == 1
        local = made(model, "dense")
        local.flush()  # before a first evaluation, and no step of its own follows
        for _ in range(3):
            local._optimizer.step()
    assert len(caught) == 2


@pytest.mark.usefixtures("group_of_one")
def test_a_model_in_shards_is_refused() -> None:
    model = nn.Linear(3, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(TypeError, match=r"takes a model that is whole on each rank"):
        made(model)


@pytest.mark.usefixtures("group_of_one")
def test_one_rank_takes_the_outer_step_alone() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    start = model.weight.detach().clone()
    local = made(model, "dense", every=2, outer_lr=0.5, outer_momentum=0.0)
    for _ in range(2):
        local.zero_grad()
        model.weight.sum().backward()
        local.step()
    torch.testing.assert_close(model.weight.detach(), start - 0.5 * 0.2)


@pytest.mark.usefixtures("group_of_one")
def test_a_layer_that_rests_after_a_flush_stays_where_that_left_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 5)
    local = made(model, "topk:ratio=0.1", every=2)
    for step in range(6):
        local.zero_grad()
        model(torch.randn(3, 40)).square().mean().backward()
        if step >= 3:
            model.weight.grad = None
        local.step()
        if step == 2:
            local.flush()
            before = model.weight.detach().clone()
            assert local._fragments[0].session.resume.residual()["weight"].any()
    assert torch.equal(model.weight, before)


@pytest.mark.usefixtures("group_of_one")
def test_a_grad_scaler_steps_it() -> None:
    model = nn.Linear(3, 2, bias=False)
    start, scaler = model.weight.detach().clone(), torch.amp.GradScaler("cpu", init_scale=8.0)
    local = made(model, "dense")
    scaler.scale(model.weight.sum()).backward()
    scaler.step(local)
    torch.testing.assert_close(model.weight.detach(), start - 0.1)


@pytest.mark.usefixtures("group_of_one")
def test_a_foreign_state_is_refused() -> None:
    local, other = made(), made(nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match="no state of LocalSteps"):
        local.load_state_dict({"counts": {}})
    with pytest.raises(ValueError, match="other parameters"):
        local.load_state_dict(other.state_dict())


def with_own_specs() -> str:
    join()
    try:
        made(spec=["topk", "blocks"][dist.get_rank()])
    except ValueError as error:
        return str(error)
    return ""


def other_ranks(states: list[Any]) -> tuple[list[float], float]:
    """Go on from the states of two ranks on this many."""
    join()
    model = nn.Linear(40, 5)
    local = made(model, "topk:ratio=0.1,momentum=0", every=3)
    local.load_state_dict(states)
    residual = local._fragments[0].session.resume.residual()
    local.step()
    return model.weight.detach().flatten()[:3].tolist(), float(residual["weight"].sum())


def two_ranks() -> Any:
    join()
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(40, 5)
    local = made(model, "topk:ratio=0.1,momentum=0", every=3)
    for step in range(4):
        local.zero_grad()
        (model(torch.randn(8, 40)) - step).square().mean().backward()
        local.step()
    residual = local._fragments[0].session.resume.residual()["weight"]
    return local.state_dict(), float(residual.sum()), (model.weight.detach() + residual).flatten()[:3].tolist()


def test_ranks_with_different_specs_are_told() -> None:
    for said in launch(with_own_specs, 2):
        assert "make these equal on all ranks: spec" in said


def test_the_states_of_two_ranks_serve_three() -> None:
    """The mean of the residuals stays the same, and weights go on without them. The third rank begins at the common start."""
    saved = launch(two_ranks, 2)
    states, sums = [state for state, _, _ in saved], [total for _, total, _ in saved]
    found = launch(other_ranks, 3, states)
    assert sum(total for _, total in found) / 3 == pytest.approx(sum(sums) / 2, rel=1e-4)
    starts = states[0]["fragments"][0]["starts"]["weight"].flatten()[:3].tolist()
    for (weights, _), own in zip(found, [*(whole for _, _, whole in saved), starts], strict=True):
        assert weights == pytest.approx(own, abs=1e-6)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("part", ["_outer.step", "_move", "session.gradients.begin"])
def test_after_a_synchronization_that_failed_further_ones_are_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that caught the error would go on from another start than the others, which may have moved theirs."""
    local = made(every=2)
    *way, name = part.split(".")
    owner: Any = local._fragments[0]
    for each in way:
        owner = getattr(owner, each)

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def step() -> None:
        for group in local.param_groups:
            for each in group["params"]:
                each.grad = torch.ones_like(each)
        local.step()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, fail)
        for _ in range(2):
            step()
    with pytest.raises(RuntimeError, match=r"refuses further steps on this rank, since a step failed .*KeyboardInterrupt"):
        for _ in range(2):
            step()
