"""momentum=auto: each rank keeps the moments of its gradients; with everything sent, training is torch's own."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam
from training import STEPS, Named, OptimizerOf, Training, draw

import gradcomp
from gradcomp.engine.stages.feedback import Feedback

# Specs that send everything.
EXACT = [
    "topk:ratio=1,wire=exact",
    "topk:ratio=1,wire=exact; *.bias=dense",
    "topk:ratio=1,wire=exact,route=split",
    "topk:ratio=1,route=tree",
    "dense:feedback=true",
]
OF_SGD: dict[str, OptimizerOf] = {
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "weight decay": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(SGD, lr=0.05, momentum=0.8, nesterov=True),
    "nesterov and weight decay": partial(SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    "maximize": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.1, maximize=True),
    "dampening": partial(SGD, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "no momentum": partial(SGD, lr=0.05, weight_decay=0.1),
}
OF_ADAM: dict[str, OptimizerOf] = {
    "adam": partial(Adam, lr=0.01),
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "betas": partial(AdamW, lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
    "maximizing adamw": partial(AdamW, lr=0.01, maximize=True),
    "amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "nadam": partial(NAdam, lr=0.01),
    "decay in the gradient": partial(Adam, lr=0.01, weight_decay=0.1),
    "maximizing decay in the gradient": partial(Adam, lr=0.01, weight_decay=0.1, maximize=True),
}
# These keep their moments themselves, and get gradients.
LEFT_TO_TORCH = ("dampening", "amsgrad", "nadam")
OPTIMIZERS = OF_SGD | OF_ADAM
several = pytest.mark.parametrize("case", ["weight decay", "adamw", "betas", "decay in the gradient"])


def pair(spec: str, case: str, ranks: int = 1, **options: Any) -> tuple[Training, Training]:
    """Return a training with the spec and torch's own, with the same weights."""
    ours, theirs = (Training(each, OPTIMIZERS[case], ranks=ranks, **options) for each in (spec, None))
    return ours, theirs


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_with_everything_sent_training_is_torchs_own(spec: str, case: str, ranks: int) -> None:
    ours, theirs = pair(spec, case, ranks)
    (before,) = copy.deepcopy(ours.optimizer.state_dict()["param_groups"])
    for training in (ours, theirs):
        training.train(alike=case in OF_ADAM)
    ours.ends_as(theirs)
    assert ours.optimizer.state_dict()["param_groups"] in ([before], [before | {"gradcomp": True}])  # the mark (Origin)
    if case in OF_ADAM:
        assert all(("second" in layers) == (case not in LEFT_TO_TORCH) for layers in ours.layers("adam"))
        assert bool(ours.optimizer.state) == (case in LEFT_TO_TORCH), "the optimizer keeps no moments beside the ranks' own"


@pytest.mark.parametrize(
    "spec", ["orq:levels=9", "orq:levels=9,momentum=auto,feedback=false", "topk:ratio=1,wire=exact; *=orq"]
)
def test_levels_have_the_momentum_in_the_mean(spec: str) -> None:
    """Random rounding has the right mean. Twelve steps of 40 trainings are within five standard errors of torch's."""
    every = [Training(spec, OF_SGD["weight decay"], ranks=3, seed=seed) for seed in range(40)]
    every.append(Training(None, OF_SGD["weight decay"], ranks=3))
    *ends, theirs = (
        torch.cat([each.detach().flatten() for each in training.train(alike=False).weights.values()]) for training in every
    )
    found = torch.stack(ends)
    assert ((found.mean(0) - theirs).abs() <= 5 * found.std(0) / 40**0.5 + 1e-6).all()


@pytest.mark.parametrize("spec", EXACT)
@several
def test_a_schedule_of_rate_and_momentum_is_followed(case: str, spec: str) -> None:
    seen: list[list[Any]] = []
    trainings = pair(spec, case, 3)
    for training in trainings:
        schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=STEPS + 1)
        (group,) = training.optimizer.param_groups
        seen.append([])
        for number in range(STEPS):
            training.train(1, number)
            seen[-1].append(group["momentum"] if case in OF_SGD else group["betas"])
            schedule.step()
    ours, theirs = trainings
    ours.ends_as(theirs)
    assert seen[0] == seen[1] and len({*seen[0]}) > 4


def test_weights_that_move_and_decays_that_change_are_followed() -> None:
    """The exchange keeps views of the weights. It copies those that lie in another order, in each step."""
    ours, theirs = pair(EXACT[0], "weight decay", 3)
    for training in (ours, theirs):
        first, rest = training.weights["0.weight"], iter([0.2, 0.0, 0.1])
        for number in range(STEPS):
            training.train(1, number)
            decay = training.optimizer.param_groups[0]["weight_decay"] = next(rest, 0.3)
            first.data = first.data.t().contiguous().t() if decay == 0.1 else first.data.clone()
    ours.ends_as(theirs)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_the_weight_decay_of_each_group_acts_on_it(kind: Any) -> None:
    def of_groups(weights: Any) -> Any:
        a, b, *rest = weights
        groups: Any = [{"params": [a], "weight_decay": 0.3}, {"params": [b], "lr": 0.1}, {"params": rest, "weight_decay": 0}]
        return kind(groups, lr=0.01)

    Training(EXACT[0], of_groups).train().ends_as(Training(None, of_groups).train())


def test_a_gradient_is_cut_before_a_weight_decays_into_it() -> None:
    clip, case = 0.5, "decay in the gradient"
    ours, theirs = pair(f"{EXACT[0]},clip={clip}", case)
    for number in range(STEPS):
        (grads,) = draw(number)
        ours.step([grads])
        theirs.step([{name: each * min(1.0, clip / (float(each.norm()) + 1e-6)) for name, each in grads.items()}])
    ours.ends_as(theirs)


class OnDevice(Tensor):
    """A rate on a GPU: nobody may wait for its value. As a part of other arithmetic it is an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (Tensor.__float__, Tensor.item, Tensor.__bool__), "this waits for the device"
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize("maximize", [False, True])
def test_a_rate_on_the_device_is_not_waited_for(maximize: bool) -> None:
    ours, theirs = (Training(spec, partial(AdamW, lr=0.02, weight_decay=0.1, maximize=maximize)) for spec in (EXACT[0], None))
    ours.optimizer.param_groups[0]["lr"] = torch.tensor(0.02).as_subclass(OnDevice)
    ours.train().ends_as(theirs.train())


@pytest.mark.parametrize("copies", [True, False])
def test_updates_may_be_set_as_gradients_or_copied(copies: bool) -> None:
    ours, theirs = pair(EXACT[0], "adamw")
    for number in range(STEPS):
        for name, update in ours.simulation.step(draw(number)).items():
            ours.weights[name].grad = update.clone() if copies else update
        ours.optimizer.step()
        ours.optimizer.zero_grad()
    assert not ours.optimizer.state
    ours.ends_as(theirs.train())


# Specs that send the large half of LAYERS in every step: with gentler steps at first, flushes, dense layers, bursts, sums.
HOT = [
    "topk:ratio=0.5,wire=exact",
    "topk:ratio=0.5,wire=exact,warmup=6",
    "topk:ratio=0.5,route=tree",
    "topk:ratio=0.5,wire=exact,route=split",
    "topk:ratio=0.5,wire=exact,by_host=true",
    "sdagc:lam=0.5,wire=exact,flush=4,cap=1",
    "sdagc:lam=0.5,wire=exact,small=none,cap=1",
    "sdagc:lam=0.5,wire=exact,warmup=6,cap=1",
    "gtopk:ratio=0.5",
    "gs_sgd:ratio=0.5",
    "sketched_sgd:ratio=0.5",
]
LAYERS = {"a": (40, 50), "b": (48,)}


@pytest.mark.parametrize("momentum", ["auto", "0.9", "adam"])
@pytest.mark.parametrize("spec", HOT)
def test_entries_that_never_wait_have_the_optimizers_momentum(spec: str, momentum: str) -> None:
    """The small half waits, and now and then a flush or a gentler step sends it. That must not disturb the large half."""
    plain = partial(SGD, lr=1.0, momentum=0.9)
    if momentum == "adam":  # its directions are as small as the gradients, by epsilon
        plain = partial(AdamW, lr=1.0, weight_decay=0, betas=(0.9, 0.95), eps=0.1)
    own = partial(SGD, lr=1.0) if momentum == "0.9" else plain
    ours = Training(f"{spec},momentum={momentum.replace('adam', 'auto')}", own, LAYERS, 4, 0, ranks_per_host=2)
    theirs = Training(None, plain, LAYERS, 4, 0)
    large = {name: torch.arange(math.prod(shape)).view(shape) % 2 == 0 for name, shape in LAYERS.items()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        grads = {name: 1 + torch.rand(shape, generator=generator) for name, shape in LAYERS.items()}
        grads = {name: torch.where(large[name], own, 1e-6 * own) for name, own in grads.items()}
        updates = ours.simulation.step([grads] * 4)
        for weight in theirs.weights.values():
            weight.data.zero_()
        theirs.step([grads])
        for name, hot in large.items():
            torch.testing.assert_close(updates[name][hot], -theirs.weights[name].detach()[hot], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("spec", ["lgc:dense=3,learn=3,first=dense", "lgc:dense=3,learn=3,first=dense,instance=server"])
def test_the_dense_layer_of_lgc_has_the_optimizers_momentum(spec: str) -> None:
    """It is sent in every step, and noted as sent."""
    shapes = {"first": (30,), "middle": (40, 50), "last": (20,)}
    ours, theirs = (Training(each, partial(AdamW, lr=1.0, weight_decay=0), shapes, 2, 0) for each in (spec, None))
    for number in range(10):
        grads = draw(number, shapes, 2, alike=True)
        theirs.weights["first"].data.zero_()
        theirs.step(grads)
        moved = theirs.weights["first"].detach()
        torch.testing.assert_close(ours.simulation.step(grads)["first"], -moved, rtol=1e-4, atol=1e-5)
        for share in ours.simulation.state_dict()["of_rank"].values():
            assert (share["buckets"][0]["stages"]["feedback"]["last_sent"][-30:] == number + 1).all()


@pytest.mark.parametrize("spec,masks", [("sign", False), ("topk:ratio=0.05", True)])
def test_residuals_velocities_and_updates_are_all_gradients(spec: str, masks: bool) -> None:
    """Without masking, a velocity u goes on to add m u + m^2 u + ..."""
    ranks, momentum = 3, 0.6
    ours = Training(spec, partial(SGD, lr=0.05, momentum=momentum), ranks=ranks, size=0)
    every = [draw(number, ranks=ranks) for number in range(40)]
    for grads in every:
        ours.step(grads)
    lost = 0.0
    for name, weight in ours.weights.items():
        waits = sum(ours.simulation.residual(rank)[name].double() for rank in range(ranks)) / ranks
        velocity = sum(layers["velocity"][name].double() for layers in ours.layers("sgd")).view_as(weight) / ranks
        given = sum(own[name].double() for grads in every for own in grads) / ranks / (1 - momentum)
        found = waits + velocity * momentum / (1 - momentum) - weight.detach().double() / 0.05
        lost = max(lost, float((found - given).abs().max()))
    assert (lost < 1e-3) == (not masks)


# --- States


@several
def test_training_goes_on_from_torchs_own_checkpoint(case: str) -> None:
    """The loaded moments seed the ranks'."""
    half = Training(None, OPTIMIZERS[case], ranks=3).train()
    ours, theirs = half.resumed(EXACT[0]), half.resumed(None)
    for training in (ours, theirs):
        training.train(first=STEPS)
    ours.ends_as(theirs)
    assert not any("momentum_buffer" in state for state in ours.optimizer.state.values())


@several
def test_a_checkpoint_holds_the_moments(case: str) -> None:
    first = Training("topk:ratio=0.2", OPTIMIZERS[case], ranks=2).train()
    second = first.resumed("topk:ratio=0.2")
    for training in (first, second):
        if case in OF_ADAM:
            training.optimizer.param_groups[0]["betas"] = (0.7, 0.99)
        training.train(first=STEPS)
    second.ends_as(first, 0, 0)
    if case in OF_SGD:
        assert all(layers["velocity"].keys() == first.weights.keys() for layers in first.layers("sgd"))


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("case", ["adamw", "betas"])
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(case: str, ranks: int) -> None:
    """New ranks go on from the mean of the others' moments, and not with the first steps of moments of zero."""
    ours, theirs = pair(EXACT[0], case, 2)
    again = ours.train().resumed(EXACT[0], ranks).train(first=STEPS)
    again.ends_as(theirs.train(2 * STEPS))


def uneven(number: int, ranks: int) -> list[Named]:
    """Draw gradients whose size differs from rank to rank."""
    return [{name: (rank + 1) * grad for name, grad in draw(number)[0].items()} for rank in range(ranks)]


def adamw(ranks: int) -> Training:
    return Training("topk:ratio=0.2", OF_ADAM["adamw"], ranks=ranks)


def trained(ranks: int) -> Training:
    training = adamw(ranks)
    for number in range(STEPS):
        training.simulation.step(uneven(number, ranks))
    return training


def test_a_new_rank_takes_the_mean_of_all_moments_and_no_residual() -> None:
    before, again = trained(3), adamw(4)
    again.simulation.load_state_dict(before.simulation.state_dict())
    *_, new = again.layers("adam")
    for array in ("first", "second"):
        for name, found in new[array].items():
            torch.testing.assert_close(found, torch.stack([layers[array][name] for layers in before.layers("adam")]).mean(0))
    assert not any(bool(each.any()) for each in again.layers("feedback")[3]["residual"].values())
    assert {*new["steps"].values()} == {STEPS}


def test_moments_that_have_seen_fewer_steps_are_left_out() -> None:
    """A rank that had just joined would count as one with all its moments."""
    state = trained(3).simulation.state_dict()
    shares = [state["of_rank"][rank]["layers"]["adam"] for rank in ("0", "1", "2")]
    young = shares[1]
    young["steps"] = dict.fromkeys(young["steps"], 2)
    for each in young["second"].values():
        each.mul_(0.01)

    def check(ranks: int) -> None:
        again = adamw(ranks)
        again.simulation.load_state_dict(copy.deepcopy(state))
        *_, found = again.layers("adam")
        for array in ("first", "second"):
            for name, each in found[array].items():
                torch.testing.assert_close(each, torch.stack([shares[rank][array][name] for rank in (0, 2)]).mean(0))
        assert {*found["steps"].values()} == {STEPS}

    check(4)
    check(1)
    del state["of_rank"]["1"]["layers"]["adam"]  # it saved before its first step
    check(1)


@pytest.mark.parametrize("array", ["first", "second"])
def test_half_of_a_moment_is_refused_by_name(array: str) -> None:
    state = trained(2).simulation.state_dict()
    del state["of_rank"]["1"]["layers"]["adam"][array]["0.weight"]
    with pytest.raises(ValueError, match=r"the state has only one of Adam's moments of '0\.weight': it is damaged"):
        adamw(3).simulation.load_state_dict(state)


def test_a_new_rank_has_no_velocity_of_sgd() -> None:
    """Velocities are kept as sums: the others' are scaled."""
    first = Training("topk:ratio=0.2", OF_SGD["momentum"], ranks=2).train()
    before, after = first.layers("sgd"), first.resumed("topk:ratio=0.2", 3).layers("sgd")
    assert not after[2]
    for name, each in after[0]["velocity"].items():
        torch.testing.assert_close(each, 1.5 * before[0]["velocity"][name])


def test_a_training_that_took_torchs_moments_over_is_resumed_to_the_bit() -> None:
    """The share of torch's own second moment in a rank's noise is saved, too."""
    half = Training(None, OF_ADAM["adamw"], ranks=2).train()
    first, second = half.resumed("topk:ratio=0.2"), half.resumed("topk:ratio=0.2")
    for number in range(20):
        if number == 14:  # behind the first comparison
            second.copy(first)
            second.simulation.load_state_dict(first.simulation.state_dict())
        for training in (first, second) if number >= 14 else (first,):
            training.step(uneven(number, 2))
    second.ends_as(first, 0, 0)


# --- Optimizers that leave the exchange's path


def test_directions_are_not_carried_over_as_gradients() -> None:
    ours = Training("topk:ratio=0.05", OF_ADAM["adamw"], ranks=2).train()
    for spec, waits in (("topk:ratio=0.2", True), ("topk:ratio=0.2,momentum=0", False)):
        ours.simulation.change(spec)
        assert any(bool(each.any()) for each in ours.simulation.residual(0).values()) == waits
    ours.train(1, 50)
    assert ours.optimizer.state, "the optimizer has its moments again"


def test_gradients_are_shown_again() -> None:
    ours = Training("topk:ratio=0.5", OF_ADAM["adamw"])
    updates = ours.simulation.step(draw(0))
    for name, weight in ours.weights.items():
        weight.grad = updates[name].clone()
    ours.optimizer.step()
    for name, weight in ours.weights.items():
        assert weight.grad is not None and torch.equal(weight.grad, updates[name])


def test_a_parameter_without_a_gradient_stays() -> None:
    ours = Training("topk:ratio=1", OF_ADAM["adamw"])
    before = [each.detach().clone() for each in ours.weights.values()]
    for name, update in ours.simulation.step(draw(0)).items():
        ours.weights[name].grad = None if name == "0.weight" else update.clone()
    ours.optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, ours.weights.values(), strict=True)]
    assert moved == [False, True, True, True]


@several
@pytest.mark.parametrize("changes", [False, True])
def test_a_simulation_beside_a_training_leaves_it_alone(case: str, changes: bool) -> None:
    """The optimizer steps with gradients that are not the simulation's updates: it keeps its moments, and uses them.

    A change of the spec hands no moments back to it.
    """
    ours, theirs = pair("topk:ratio=0.1", case, 2)
    for number in range(STEPS):
        ours.simulation.step(draw(1000 + number, ranks=2))
        ours.apply(draw(number)[0])
        if changes and number == STEPS // 2:
            ours.simulation.change("topk:ratio=1,wire=exact,momentum=0")
    assert ours.optimizer.state
    ours.ends_as(theirs.train(), 0, 0)


@pytest.mark.parametrize("case", ["adamw", "betas"])
@pytest.mark.parametrize("size", [1e15, 1e18, 1e20, 1e25, 3e38])
def test_one_huge_gradient_moves_no_weight_further_than_torch_does(case: str, size: float) -> None:
    """A gradient with an infinite square counts as 0. In torch it moves nothing either, and the entry stands still for ever."""
    ours, theirs = pair(EXACT[0], case)
    for number in range(STEPS):
        grads = draw(number)
        if number == STEPS // 2:
            grads[0]["0.weight"][1, 2] = size
        ours.step(grads)
        theirs.step(grads)
        for name, weight in ours.weights.items():
            apart = (weight - theirs.weights[name]).abs().detach()
            if name == "0.weight":
                assert apart[1, 2] <= 0.01 * STEPS  # the rate, in each step
                apart[1, 2] = 0
            assert apart.max() < 1e-4, (name, number)


def test_a_step_that_fails_leaves_the_users_settings() -> None:
    """A step that raises an error must not leave the optimizer without its momentum."""
    ours = Training("topk:ratio=0.1", OF_SGD["weight decay"])

    def fails(*args: Any) -> None:
        raise RuntimeError("out of memory")

    hook = ours.optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        ours.train(1)
    hook.remove()
    ours.simulation.step(draw(1))
    assert ours.optimizer.param_groups[0]["momentum"] == 0.9 and ours.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_momentum_in_a_spec_is_a_number_or_auto() -> None:
    assert gradcomp.make("topk:momentum=auto") == gradcomp.make("topk") != gradcomp.make("topk:momentum=0")
    assert str(gradcomp.make("topk:momentum=auto,ratio=0.1")) == "topk:ratio=0.1"
    with pytest.raises(ValueError, match=r"topk:momentum=own': momentum=own must be auto or a number"):
        gradcomp.make("topk:momentum=own")
    with pytest.raises(TypeError, match=r"momentum='own' must be auto or a number"):
        Feedback(gradcomp.make("dense"), momentum="own")
