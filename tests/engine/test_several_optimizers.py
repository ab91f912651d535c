"""Several optimizers of one model, passed as a list: each trains its own layers as it does without an exchange."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from small_net import Net, backward, examples, net, weights
from torch import Tensor, optim
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make

EVERYTHING = "topk:ratio=1,wire=exact"
STEPS = 10
Optimizers = Sequence[optim.Optimizer]


def sgd_and_adamw(model: Net) -> list[optim.Optimizer]:
    first = [*model.first.parameters(), *model.last.parameters()]
    rest = [*model.second.parameters(), *model.part.parameters()]
    return [
        optim.SGD(first, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
        optim.AdamW(rest, lr=0.003, weight_decay=0.1),
    ]


def two_sgd(model: Net) -> list[optim.Optimizer]:
    rest = [*model.second.parameters(), *model.part.parameters(), *model.last.parameters()]
    return [optim.SGD(model.first.parameters(), lr=0.05, momentum=0.5), optim.SGD(rest, lr=0.02, momentum=0.9)]


def adagrad_and_adamw(model: Net) -> list[optim.Optimizer]:
    rest = [*model.second.parameters(), *model.part.parameters(), *model.last.parameters()]
    return [optim.Adagrad(model.first.parameters(), lr=0.02), optim.AdamW(rest, lr=0.003)]


def scheduler_of(optimizer: optim.Optimizer) -> Any:
    """Make a scheduler, which changes the momentum too if there is one."""
    if isinstance(optimizer, optim.Adagrad):
        return optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * STEPS)
    return optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=3 * STEPS)


class Run:
    """A model and its optimizers, on one rank, with an exchange or without."""

    def __init__(self, optimizers_of: Callable[[Net], list[optim.Optimizer]], spec: str = "", scaler: Any = None):
        self.model = net()
        self.optimizers = optimizers_of(self.model)
        self.schedulers = [*map(scheduler_of, self.optimizers)]
        self.scaler, self.data = scaler, examples(0)
        self.session = self.of(spec) if spec else None

    def of(self, spec: str) -> Session:
        network, parameters = MemoryNetwork(Board(1), 0, 1), Parameters(self.model.named_parameters())
        return Session(make(spec), parameters, network, Options(self.optimizers, self.scaler), Door())

    def exchange(self) -> None:
        if self.session is not None:
            self.session.begin()
            for slot in self.session.slots.slots:
                if slot.parameter is not None and slot.parameter.requires_grad:
                    self.session.ready(slot)
            self.session.finish()

    def backward(self) -> None:
        self.model.zero_grad()
        backward(self.model, next(self.data))
        self.exchange()

    def train(self, steps: int = STEPS) -> Tensor:
        for _ in range(steps):
            self.backward()
            for each in self.optimizers:
                each.step()
            for scheduler in self.schedulers:
                scheduler.step()
        return weights(self.model)


def close(one: Tensor, other: Tensor) -> bool:
    """Compare weights that have moved by a hundredth and more."""
    return torch.allclose(one, other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("optimizers_of", [sgd_and_adamw, two_sgd, adagrad_and_adamw])
def test_with_everything_sent_each_optimizer_steps_as_alone(optimizers_of: Any) -> None:
    plain, ours = Run(optimizers_of), Run(optimizers_of, EVERYTHING)
    assert close(ours.train(), plain.train())
    ours.session.replace(make(f"{EVERYTHING},momentum=0"))  # the optimizers get their moments back
    assert close(ours.train(), plain.train())
    assert [len(each.state) for each in ours.optimizers] == [len(each.state) for each in plain.optimizers]
    ours.session.replace(make(EVERYTHING))
    assert close(ours.train(), plain.train())


def test_an_optimizer_need_not_step_while_its_layers_are_frozen() -> None:
    plain, ours = Run(two_sgd), Run(two_sgd, EVERYTHING)
    for run in (plain, ours):
        for step in range(12):
            frozen = step // 3 - 1  # from the fourth step on the first one, then the second one, then none
            for number, each in enumerate(run.optimizers):
                for parameter in each.param_groups[0]["params"]:
                    parameter.requires_grad_(number != frozen)
            run.backward()
            for number, each in enumerate(run.optimizers):
                if number != frozen:
                    each.step()
            if run.session is not None:
                run.session.refuse("change()")  # no update waits
    assert close(weights(ours.model), weights(plain.model))


def test_a_state_goes_on_to_the_bit() -> None:
    run = Run(sgd_and_adamw, "topk:ratio=0.1")
    run.train()
    again = Run(sgd_and_adamw, "topk:ratio=0.1")
    again.model.load_state_dict(run.model.state_dict())
    for kind in ("optimizers", "schedulers"):
        for one, other in zip(getattr(again, kind), getattr(run, kind), strict=True):
            one.load_state_dict(copy.deepcopy(other.state_dict()))
    again.session.load_state_dict(run.session.state_dict())
    batches = [next(run.data) for _ in range(STEPS)]
    run.data, again.data = iter(batches), iter(batches)
    assert torch.equal(again.train(), run.train())


def test_layers_of_two_optimizers_share_no_bucket_and_have_their_rates() -> None:
    run = Run(sgd_and_adamw, "topk")
    assert [sorted({name.split(".")[0] for name in each.layout.names}) for each in run.session.reducer.buckets] == [
        ["first", "last"],
        ["part", "second"],
    ]
    rates = run.session.view.rates()
    assert rates["first.weight"] == run.optimizers[0].param_groups[0]["lr"] != rates["part.bias"]
    text = run.session.reducer.stats()["exchanges"]
    assert text == ("SGD's velocities (momentum taken over), in 4 layers; AdamW's directions (moments taken over), in 4 layers")


def test_a_scaler_may_skip_one_of_them() -> None:
    """The other one's update has been applied, and is not sent again."""
    runs = [Run(sgd_and_adamw, spec, torch.amp.GradScaler("cpu", init_scale=4.0)) for spec in ("", EVERYTHING)]
    for run in runs:
        for step in range(STEPS):
            run.model.zero_grad()
            x, y = next(run.data)
            run.scaler.scale(torch.nn.functional.cross_entropy(run.model(x), y)).backward()
            if step == STEPS - 3:
                run.model.second.weight.grad[0, 0] = torch.inf
            run.exchange()
            for each in run.optimizers:
                run.scaler.step(each)
            run.scaler.update()
            for each in run.schedulers:
                each.step()
        run.first = run.model.first.weight.detach()
    assert torch.allclose(runs[0].first, runs[1].first, rtol=1e-2, atol=1e-3)
    assert not runs[1].session.residual()["first.weight"].any()


def test_an_update_that_one_of_them_has_not_applied_is_noticed() -> None:
    run = Run(sgd_and_adamw, EVERYTHING)
    run.train(2)
    run.backward()
    run.optimizers[0].step()
    with pytest.raises(RuntimeError, match="AdamW has not stepped since the last exchange, but another optimizer of the model"):
        run.backward()


def test_a_spec_of_the_whole_model_exchanges_gradients() -> None:
    run = Run(sgd_and_adamw, "topk:ratio=1,wire=exact,clip=100,clip_by=model")
    assert run.session.reducer.missed is not None
    assert close(run.train(), Run(sgd_and_adamw).train())
    assert run.session.reducer.exchanges == "gradients, since its only bucket has layers of several optimizers"


def test_lists_that_cannot_be() -> None:
    model = net()
    two = sgd_and_adamw(model)
    with pytest.raises(ValueError, match=r"optimizer= has two optimizers of 'first\.weight'; let one of them train it"):
        Run(lambda model: [*sgd_and_adamw(model), optim.SGD(model.first.parameters(), 0.1)], "topk")
    with pytest.raises(TypeError, match="the optimizer is a str"):
        Session(make("topk"), Parameters(model.named_parameters()), MemoryNetwork(Board(1), 0, 1), Options([*two, "x"]), Door())
    with pytest.raises(ValueError, match="none of the model's parameters"):
        Run(lambda model: [*sgd_and_adamw(model), optim.SGD(net().parameters(), 0.1)], "topk")
    with pytest.raises(ValueError, match="optimizer= is an empty list"):
        Run(lambda model: [], "topk")
    with pytest.warns(UserWarning, match=r"optimizer= has no optimizer of 'last\.weight', 'last\.bias': ") as caught:
        Run(lambda model: [optim.SGD(each.parameters(), 0.1) for each in (model.first, model.second, model.part)], "topk")
    assert caught[0].filename == __file__


def program() -> dict[str, Any]:
    """Train with two optimizers under DDP, passed as a list, and without gradcomp, with different gradients on each rank."""
    ranks.join()
    found: dict[str, Any] = {}
    for spec in ("", EVERYTHING, "topk", "auto"):
        model = net()
        optimizers, data = two_sgd(model), examples(dist.get_rank())
        whole = DistributedDataParallel(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handle = gradcomp.ddp.attach(whole, spec, optimizer=optimizers) if spec else None
            for _ in range(STEPS):
                for each in optimizers:
                    each.zero_grad()
                backward(whole, next(data))
                for each in optimizers:
                    each.step()
        found[spec] = weights(model)
        if handle is not None:
            handle.load_state_dict(handle.state_dict())
    return found


@pytest.mark.slow
def test_under_ddp() -> None:
    one, other = ranks.launch(program, 2)
    assert close(one[""], one[EVERYTHING])
    assert all(torch.equal(one[spec], other[spec]) for spec in one)


def horovod_program() -> dict[str, Any]:
    """Train with two optimizers under Horovod, each with an exchange of its own layers."""
    import horovod.torch as hvd

    hvd.init()
    found: dict[str, Any] = {}
    for spec in ("", EVERYTHING):
        model, data = net(), examples(hvd.rank())
        named = [*model.named_parameters()]
        if not spec:
            optimizers = [hvd.DistributedOptimizer(each, named[i:j]) for each, (i, j) in parts_of(two_sgd(model))]
        else:
            optimizers = [
                gradcomp.horovod.DistributedOptimizer(each, named[i:j], spec) for each, (i, j) in parts_of(two_sgd(model))
            ]
        for _ in range(STEPS):
            model.zero_grad()
            backward(model, next(data))
            for each in optimizers:
                each.step()
        found[spec] = weights(model)
    try:
        gradcomp.horovod.Compression("topk", named, optimizer=[*two_sgd(model)])
    except TypeError as error:
        found["list"] = str(error)
    return found


def parts_of(optimizers: list[optim.Optimizer]) -> list[tuple[optim.Optimizer, tuple[int, int]]]:
    """Pair two_sgd() with the numbers of their layers: a weight and a bias, and all others."""
    return [*zip(optimizers, ((0, 2), (2, 8)), strict=True)]


@pytest.mark.slow
def test_under_horovod_each_has_an_exchange_of_its_own() -> None:
    for found in ranks.launch(horovod_program, 2):
        assert close(found[""], found[EVERYTHING])
        assert found["list"].startswith("optimizer= is a list; under Horovod each optimizer has its own")
