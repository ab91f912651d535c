"""momentum=auto: the optimizer's momentum, kept locally. With everything sent, training is that of torch's own SGD."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradcomp

RANKS, STEPS = 3, 12
# Specs that send everything.
EXACT = [
    "topk:ratio=1,wire=exact",
    "topk:ratio=1,wire=exact; *.bias=dense",
    "topk:ratio=1,wire=exact,route=split",
    "topk:ratio=1,route=tree",
    "dense:feedback=true",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "weight decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "nesterov and weight decay": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "no momentum": {"weight_decay": 0.1},
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def gradients(step: int, model: nn.Module) -> list[dict[str, Tensor]]:
    torch.manual_seed(100 + step)
    return [{name: torch.randn_like(each) for name, each in model.named_parameters()} for _ in range(RANKS)]


Prepare = Callable[[SGD], Any]


def train(
    spec: str | None, prepare: Prepare, steps: int = STEPS, seed: int = 0
) -> tuple[nn.Module, SGD, gradcomp.Simulation | None]:
    """Train with known gradients, with the simulator or without."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    after_step = prepare(optimizer) or (lambda: None)
    named = dict(model.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    simulation = None
    if spec is not None:
        simulation = gradcomp.Simulation(spec, shapes, RANKS, seed, optimizer=optimizer, named_parameters=named.items())
    for step in range(steps):
        grads = gradients(step, model)
        mean = {name: torch.stack([own[name] for own in grads]).mean(0) for name in named}
        for name, update in (mean if simulation is None else simulation.step(grads)).items():
            named[name].grad = update.clone()
        optimizer.step()
        after_step()
    return model, optimizer, simulation


@pytest.mark.parametrize(
    "spec", ["orq:levels=9", "orq:levels=9,momentum=auto,feedback=false", "topk:ratio=1,wire=exact; *=orq"]
)
def test_levels_have_the_momentum_in_the_mean(spec: str) -> None:
    """Random rounding has the right mean. Twelve steps of 40 trainings are within five standard errors of torch's."""
    prepare = with_settings({"momentum": 0.9, "weight_decay": 0.1})
    theirs = torch.cat([each.detach().flatten() for each in train(None, prepare)[0].parameters()])
    ends = []
    for seed in range(40):
        ours, _, _ = train(spec, prepare, seed=seed)
        ends.append(torch.cat([each.detach().flatten() for each in ours.parameters()]))
    found = torch.stack(ends)
    error = found.std(0) / 40**0.5
    assert ((found.mean(0) - theirs).abs() <= 5 * error + 1e-6).all()


def with_settings(settings: dict[str, Any]) -> Prepare:
    def prepare(optimizer: SGD) -> None:
        for group in optimizer.param_groups:
            group.update(settings)

    return prepare


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("settings", SETTINGS)
def test_with_everything_sent_training_is_torchs_own(spec: str, settings: str) -> None:
    prepare = with_settings(SETTINGS[settings])
    ours, optimizer, _ = train(spec, prepare)
    theirs, _, _ = train(None, prepare)
    same(ours, theirs)
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in SETTINGS[settings]} == SETTINGS[settings]


# Specs that send the large half of SHAPES in every step: with gentler steps at first, flushes, dense layers, bursts, sums.
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
SHAPES = {"a": (40, 50), "b": (48,)}


@pytest.mark.parametrize("momentum", ["auto", "0.9", "adam"])
@pytest.mark.parametrize("spec", HOT)
def test_entries_that_never_wait_have_the_optimizers_momentum(spec: str, momentum: str) -> None:
    """The small half waits, and now and then a flush or a gentler step sends it. That must not disturb the large half."""

    def made(weights: dict[str, nn.Parameter], momentum: float) -> torch.optim.Optimizer:
        if adam:  # whose directions are as small as the gradients, by epsilon
            return torch.optim.AdamW(weights.values(), lr=1.0, weight_decay=0, betas=(0.9, 0.95), eps=0.1)
        return SGD(weights.values(), lr=1.0, momentum=momentum)

    adam, momentum = momentum == "adam", momentum.replace("adam", "auto")
    weights, plain = ({name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()} for _ in range(2))
    optimizer, theirs = made(weights, 0.9 if momentum == "auto" else 0.0), made(plain, 0.9)
    options: dict[str, Any] = {"optimizer": optimizer, "named_parameters": weights.items(), "ranks_per_host": 2}
    simulation = gradcomp.Simulation(f"{spec},momentum={momentum}", SHAPES, 4, **options)
    large = {name: torch.arange(math.prod(shape)).view(shape) % 2 == 0 for name, shape in SHAPES.items()}
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        grads = {name: 1 + torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
        grads = {name: torch.where(large[name], own, 1e-6 * own) for name, own in grads.items()}
        updates = simulation.step([grads] * 4)
        for name, each in plain.items():
            each.data.zero_()
            each.grad = grads[name]
        theirs.step()
        for name, hot in large.items():
            torch.testing.assert_close(updates[name][hot], -plain[name].detach()[hot], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("spec", ["lgc:dense=3,learn=3,first=dense", "lgc:dense=3,learn=3,first=dense,instance=server"])
def test_the_dense_layer_of_lgc_has_the_optimizers_momentum(spec: str) -> None:
    """It is sent in every step, and noted as sent."""
    shapes = {"first": (30,), "middle": (40, 50), "last": (20,)}
    weights, plain = ({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()} for _ in range(2))
    optimizer, theirs = (torch.optim.AdamW(each.values(), lr=1.0, weight_decay=0) for each in (weights, plain))
    simulation = gradcomp.Simulation(spec, shapes, 2, optimizer=optimizer, named_parameters=weights.items())
    for step in range(10):
        torch.manual_seed(step)
        grads = {name: torch.randn(shape) for name, shape in shapes.items()}
        plain["first"].data.zero_()
        plain["first"].grad = grads["first"]
        theirs.step()
        torch.testing.assert_close(simulation.step([grads] * 2)["first"], -plain["first"].detach(), rtol=1e-4, atol=1e-5)
        sent_in = [
            share["buckets"][0]["stages"]["feedback"]["last_sent"] for share in simulation.state_dict()["of_rank"].values()
        ]
        assert all((each[-30:] == step + 1).all() for each in sent_in)


@pytest.mark.parametrize("spec", EXACT)
def test_a_schedule_of_the_momentum_is_followed(spec: str) -> None:
    seen: list[list[float]] = [[], []]

    def prepare(optimizer: SGD, into: list[float]) -> Any:
        optimizer.param_groups[0].update(momentum=0.9, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)

        def after_step() -> None:
            into.append(optimizer.param_groups[0]["momentum"])
            schedule.step()

        return after_step

    ours, _, _ = train(spec, lambda optimizer: prepare(optimizer, seen[0]))
    theirs, _, _ = train(None, lambda optimizer: prepare(optimizer, seen[1]))
    same(ours, theirs)
    assert seen[0] == seen[1] and len({*seen[0]}) > 4


def test_weights_that_move_and_decays_that_change_are_followed() -> None:
    """The exchange keeps views of the weights. It copies those that lie in another order, in each step."""

    def prepare(optimizer: SGD) -> Any:
        optimizer.param_groups[0].update(momentum=0.9, weight_decay=0.05)
        first, *_ = optimizer.param_groups[0]["params"]
        rest = iter([0.2, 0.0, 0.1])

        def after_step() -> None:
            optimizer.param_groups[0]["weight_decay"] = next(rest, 0.3)
            transposed = optimizer.param_groups[0]["weight_decay"] == 0.1
            first.data = first.data.t().contiguous().t() if transposed else first.data.clone()

        return after_step

    same(train(EXACT[0], prepare)[0], train(None, prepare)[0])


def test_a_loaded_buffer_seeds_the_velocity() -> None:
    """Torch's training goes on with gradcomp from torch's own checkpoint."""
    prepare = with_settings({"momentum": 0.9, "weight_decay": 0.1})
    whole, _, _ = train(None, prepare, 2 * STEPS)
    half, optimizer, _ = train(None, prepare)
    loaded = copy.deepcopy(optimizer.state_dict())
    model = net()
    model.load_state_dict(half.state_dict())
    own = SGD(model.parameters(), lr=0.05, momentum=0.9)
    own.load_state_dict(loaded)
    named = dict(model.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    simulation = gradcomp.Simulation(EXACT[0], shapes, RANKS, optimizer=own, named_parameters=named.items())
    for step in range(STEPS, 2 * STEPS):
        for name, update in simulation.step(gradients(step, model)).items():
            named[name].grad = update.clone()
        own.step()
    same(model, whole)
    assert not any("momentum_buffer" in state for state in own.state.values())


def test_a_checkpoint_holds_the_velocity() -> None:
    prepare = with_settings({"momentum": 0.9, "weight_decay": 0.1})
    spec = "topk:ratio=0.2"
    _, _, simulation = train(spec, prepare)
    assert simulation is not None
    state = simulation.state_dict()
    model, _, again = train(spec, prepare, 0)
    assert again is not None
    again.load_state_dict(state)
    grads = gradients(99, model)
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    first, second = simulation.step(grads), again.step(grads)
    for name, each in weights.items():  # the two models' weights differ, and so do their weight decays
        assert first[name].shape == second[name].shape == each.shape
    assert all(share["layers"]["sgd"]["velocity"].keys() == weights.keys() for share in state["of_rank"].values())


@pytest.mark.parametrize("spec,masks", [("sign", False), ("topk:ratio=0.05", True)])
def test_what_waits_and_what_came_are_all_gradients(spec: str, masks: bool) -> None:
    """Without masking, a velocity u goes on to add m u + m^2 u + ..."""
    momentum = 0.6
    model, _, simulation = train(spec, with_settings({"momentum": momentum}), 40)
    assert simulation is not None
    steps = [gradients(step, model) for step in range(40)]
    shares = simulation.state_dict()["of_rank"].values()
    lost = 0.0
    for name, parameter in model.named_parameters():
        came = (dict(net().named_parameters())[name] - parameter).detach().double() / 0.05
        waits = sum(simulation.residual(rank)[name].double() for rank in range(RANKS)) / RANKS
        velocity = sum(share["layers"]["sgd"]["velocity"][name].double() for share in shares).view_as(parameter) / RANKS
        waits = waits + velocity * momentum / (1 - momentum)
        given = sum(own[name].double() for grads in steps for own in grads) / RANKS / (1 - momentum)
        lost = max(lost, float((came + waits - given).abs().max()))
    assert (lost < 1e-3) == (not masks)


def test_numbers_and_words_in_a_spec() -> None:
    assert gradcomp.make("topk:momentum=auto") == gradcomp.make("topk") != gradcomp.make("topk:momentum=0")
    assert str(gradcomp.make("topk:momentum=auto,ratio=0.1")) == "topk:ratio=0.1"
    with pytest.raises(ValueError, match=r"topk:momentum=own': momentum=own must be auto or a number"):
        gradcomp.make("topk:momentum=own")
    with pytest.raises(TypeError, match=r"momentum='own' must be auto or a number"):
        gradcomp.engine.stages.feedback.Feedback(gradcomp.make("dense"), momentum="own")


def test_errors_leave_the_users_values() -> None:
    """A step that raises an error must not leave the optimizer without its momentum."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    named = dict(model.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    simulation = gradcomp.Simulation("topk:ratio=0.1", shapes, RANKS, optimizer=optimizer, named_parameters=named.items())
    for name, update in simulation.step(gradients(0, model)).items():
        named[name].grad = update.clone()

    def fails(*args: Any) -> None:
        raise RuntimeError("out of memory")

    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    hook.remove()
    simulation.step(gradients(1, model))
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.1
