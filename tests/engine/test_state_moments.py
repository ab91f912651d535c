"""States of Adam's moments: what a checkpoint holds of them, and what ranks take that were not there when it was saved."""

from __future__ import annotations

import copy

import pytest
import torch
from adam_cases import EXACT, STEPS, gradient, made, net, same, simulation_of, step, train
from torch.optim import SGD

import gradcomp


@pytest.mark.parametrize("case", ["adamw", "betas"])
def test_a_checkpoint_holds_the_moments(case: str) -> None:
    spec = "topk:ratio=0.2"
    whole, optimizer, simulation = train(spec, case, ranks=2)
    model = copy.deepcopy(whole)
    own = made(case, model)
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again = simulation_of(spec, model, own, 2)
    assert simulation is not None
    again.load_state_dict(simulation.state_dict())
    for each in (optimizer, own):
        each.param_groups[0]["betas"] = (0.7, 0.99)
    for number in range(STEPS, 2 * STEPS):
        step(whole, optimizer, simulation, number, 2)
        step(model, own, again, number, 2)
    for a, b in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("case", ["adamw", "betas"])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(case: str, ranks: int) -> None:
    """New ranks go on from the mean of the others' moments, and not with the first steps of moments of zero."""
    ours, trained, simulation = train(EXACT[0], case, ranks=2)
    assert simulation is not None
    optimizer = made(case, ours)
    optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    again = simulation_of(EXACT[0], ours, optimizer, ranks)
    again.load_state_dict(simulation.state_dict())
    theirs, plain, _ = train(None, case)
    for number in range(STEPS, 2 * STEPS):
        step(ours, optimizer, again, number, ranks)
        step(theirs, plain, None, number)
    same(ours, theirs)


def test_a_new_rank_takes_the_mean_of_all_moments_and_no_residual() -> None:
    model = net()
    simulation = simulation_of("topk:ratio=0.2", model, made("adamw", model), 3)
    for number in range(STEPS):
        grads = [{name: (rank + 1) * each for name, each in gradient(number, model).items()} for rank in range(3)]
        simulation.step(grads)
    before = [simulation.state_dict()["of_rank"][str(rank)]["layers"] for rank in range(3)]
    again = simulation_of("topk:ratio=0.2", model, made("adamw", model), 4)
    again.load_state_dict(simulation.state_dict())
    new = again.state_dict()["of_rank"]["3"]["layers"]
    for array in ("first", "second"):
        for name, found in new["adam"][array].items():
            torch.testing.assert_close(found, torch.stack([share["adam"][array][name] for share in before]).mean(0))
    assert not any(bool(each.any()) for each in new["feedback"]["residual"].values())
    assert {*new["adam"]["steps"].values()} == {STEPS}


def drawn(number: int, ranks: int, model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    return [{name: (rank + 1) * each for name, each in gradient(number, model).items()} for rank in range(ranks)]


def saved(ranks: int) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Return the shares of ranks with gradients of different sizes."""
    model = net()
    simulation = simulation_of("topk:ratio=0.2", model, made("adamw", model), ranks)
    for number in range(STEPS):
        simulation.step(drawn(number, ranks, model))
    return simulation.state_dict()


def loaded(state: dict, ranks: int) -> dict:
    model = net()
    simulation = simulation_of("topk:ratio=0.2", model, made("adamw", model), ranks)
    simulation.load_state_dict(state)
    return simulation.state_dict()["of_rank"]


def test_moments_that_have_seen_fewer_steps_are_left_out() -> None:
    """A rank that had just joined would count as one with all its moments."""
    state = saved(3)
    shares = {rank: share["layers"]["adam"] for rank, share in state["of_rank"].items()}
    young = shares["1"]
    young["steps"] = dict.fromkeys(young["steps"], 2)
    for each in young["second"].values():
        each.mul_(0.01)

    def mean(array: str, name: str) -> torch.Tensor:
        return torch.stack([shares[rank][array][name] for rank in ("0", "2")]).mean(0)

    for ranks, here in ((4, "3"), (1, "0")):
        found = loaded(copy.deepcopy(state), ranks)[here]["layers"]["adam"]
        for array in ("first", "second"):
            for name, each in found[array].items():
                torch.testing.assert_close(each, mean(array, name))
        assert {*found["steps"].values()} == {STEPS}
    del state["of_rank"]["1"]["layers"]["adam"]  # it saved before its first step
    for name, each in loaded(state, 1)["0"]["layers"]["adam"]["second"].items():
        torch.testing.assert_close(each, mean("second", name))


@pytest.mark.parametrize("array", ["first", "second"])
def test_half_of_a_moment_is_refused_by_name(array: str) -> None:
    state = saved(2)
    moments = state["of_rank"]["1"]["layers"]["adam"][array]
    name = next(iter(moments))
    del moments[name]
    with pytest.raises(ValueError, match=f"the state has only one of Adam's moments of '{name}': it is damaged"):
        loaded(state, 3)


def test_a_new_rank_has_no_velocity_of_sgd() -> None:
    """Velocities are kept as sums: the others' are scaled."""

    def simulation(ranks: int) -> gradcomp.Simulation:
        model = net()
        return simulation_of("topk:ratio=0.2", model, SGD(model.parameters(), 0.1, momentum=0.9), ranks)

    first, second = simulation(2), simulation(3)
    for number in range(3):
        first.step(drawn(number, 2, net()))
    second.load_state_dict(first.state_dict())
    before, after = (each.state_dict()["of_rank"] for each in (first, second))
    assert "sgd" not in after["2"]["layers"]
    for name, each in after["0"]["layers"]["sgd"]["velocity"].items():
        torch.testing.assert_close(each, 1.5 * before["0"]["layers"]["sgd"]["velocity"][name])


def test_a_training_that_took_torchs_moments_over_is_resumed_to_the_bit() -> None:
    """The share of torch's own second moment in a rank's noise is saved, too."""
    spec, half, trained = "topk:ratio=0.2", *train(None, "adamw")[:2]
    made_of = []
    for _ in range(2):
        model = copy.deepcopy(half)
        optimizer = made("adamw", model)
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        made_of.append((model, optimizer, simulation_of(spec, model, optimizer, 2)))
    (model, optimizer, first), (other, again, second) = made_of
    for number in range(20):
        if number == 14:  # behind the first comparison
            other.load_state_dict(model.state_dict())
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            second.load_state_dict(first.state_dict())
        for own, by, simulation in ((model, optimizer, first), (other, again, second))[: 1 + (number >= 14)]:
            for name, update in simulation.step(drawn(number, 2, own)).items():
                own.get_parameter(name).grad = update.clone()
            by.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
