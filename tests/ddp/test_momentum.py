"""momentum=auto under DDP: with everything sent, training is torch's own with SGD, and the mean of directions with Adam."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import adam_twin
import pytest
import ranks
import sgd_twin
import torch
import torch.distributed as dist
from sgd_twin import SPEC, STEPS, Two, gradients
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

RANKS = 2


def prepared(optimizer_of: Any, spec: str = SPEC, **options: Any) -> tuple[Two, DistributedDataParallel, torch.optim.Optimizer]:
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer, **options)
    return model, wrapped, optimizer


def train_sgd(case: str, leaves: bool = False) -> list[Tensor]:
    """Train with known gradients. leaves: leave the momentum to the optimizer from the middle on, for three steps."""
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd_twin.sgd(model, case)
    handle = gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer)
    after_step = sgd_twin.schedule(case, optimizer)
    for step in range(STEPS):
        if leaves and step in (4, 7):
            handle.change(f"{SPEC},momentum=0" if step == 4 else SPEC)
        optimizer.zero_grad()
        wrapped(gradients(dist.get_rank(), step)).backward()
        optimizer.step()
        after_step()
    return [each.detach().clone() for each in model.parameters()]


def uneven(spec: str | None) -> list[Tensor]:
    """One rank has more batches than the other, which goes on exchanging without a step of its own."""
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd_twin.sgd(model, "momentum alone")
    if spec is not None:
        gradcomp.ddp.attach(wrapped, spec, optimizer=optimizer)
    with wrapped.join():
        for step in range(6 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            wrapped(gradients(dist.get_rank(), step)).backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def train(case: str) -> list[Tensor]:
    model, wrapped, optimizer = prepared(lambda model: adam_twin.made(model, case))
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(gradients(dist.get_rank(), step)).backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def train_scaled() -> list[Tensor]:
    """Train with a loss scale that doubles on the way."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    model, wrapped, optimizer = prepared(lambda model: adam_twin.made(model, "adamw"), scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(wrapped(gradients(dist.get_rank(), step))).backward()
        scaler.step(optimizer)
        scaler.update()
    return [each.detach().clone() for each in model.parameters()]


def train_found() -> tuple[list[Tensor], list[Tensor]]:
    """Train with an optimizer that attach() was not given: it is known after its first step."""
    model, plain = Two(), Two()
    wrapped = DistributedDataParallel(model)
    handle = gradcomp.ddp.attach(wrapped, SPEC)
    optimizer, other = adam_twin.made(model, "adamw"), adam_twin.made(plain, "adamw")
    for step in range(STEPS):  # with the same gradient on all ranks, the mean of directions is Adam's of the mean
        for forward, by in ((wrapped, optimizer), (plain, other)):
            by.zero_grad()
            forward(gradients(0, step)).backward()
            by.step()
    assert all(
        bool(each.any()) for each in handle.state_dict()["of_rank"][str(dist.get_rank())]["layers"]["adam"]["second"].values()
    )
    return list(model.parameters()), list(plain.parameters())


def train_left() -> list[Tensor]:
    """Leave the moments to the optimizer from the middle on: it begins with their means over the ranks."""
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = adam_twin.made(model, "adamw")
    handle = gradcomp.ddp.attach(wrapped, SPEC, optimizer=optimizer)
    for step in range(STEPS):
        if step == 5:
            own = handle.state_dict()["of_rank"][str(dist.get_rank())]["layers"]["adam"]
            handle.change(f"{SPEC},momentum=0")
            for (name, parameter), (key, array) in itertools.product(
                model.named_parameters(), {"exp_avg": "first", "exp_avg_sq": "second"}.items()
            ):
                mean = own[array][name] / RANKS
                dist.all_reduce(mean)
                torch.testing.assert_close(optimizer.state[parameter][key].flatten(), mean)
                assert optimizer.state[parameter]["step"] == 5
        optimizer.zero_grad()
        wrapped(gradients(dist.get_rank(), step)).backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def clipped(optimizer_of: Any, longest: float, spec: str = SPEC) -> list[str]:
    """Clip after the exchange. Return the text of the error, or of all warnings."""
    model, wrapped, optimizer = prepared(optimizer_of, spec)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            wrapped(gradients(dist.get_rank(), step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), longest)
            try:
                optimizer.step()
            except RuntimeError as error:
                return [str(error)]
    return [str(each.message) for each in seen]


def program() -> dict[Any, Any]:
    ranks.join()
    found: dict[Any, Any] = {("adam", case): train(case) for case in adam_twin.SETTINGS}
    found |= {("sgd", case): train_sgd(case) for case in sgd_twin.SETTINGS}
    found["sgd", "left"], found["uneven"] = train_sgd("nesterov", leaves=True), (uneven(SPEC), uneven(None))
    found["adam", "scaled"], found["found"], found["left"] = train_scaled(), train_found(), train_left()
    adam, sgd = (lambda model: adam_twin.made(model, "adamw")), (lambda model: sgd_twin.sgd(model, "nesterov"))
    found["clips"] = {
        "adam": clipped(adam, 1.0),
        "adam, sparse": clipped(adam, 0.01, "topk:ratio=0.01"),
        "adam, longer than any": clipped(adam, 1e9),
        "adam, gradients": clipped(adam, 1.0, f"{SPEC},momentum=0"),
        "sgd": clipped(sgd, 1.0),
        "sgd, longer than any": clipped(sgd, 1e9),
    }
    return found


outcomes = ranks.once(lambda: ranks.launch(program, RANKS))


@pytest.mark.parametrize("case", [*sgd_twin.SETTINGS, "left"])
def test_training_with_sgd_is_torchs_own(case: str) -> None:
    """Also where the momentum is left to the optimizer for some steps."""
    for found in outcomes():
        sgd_twin.check(found["sgd", case], "nesterov" if case == "left" else case, RANKS)


def test_a_rank_without_batches_exchanges_on() -> None:
    for found in outcomes():
        for own, wanted in zip(*found["uneven"], strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [*adam_twin.SETTINGS, "scaled"])
def test_training_with_adam_is_by_the_mean_of_the_ranks_directions(case: str) -> None:
    for found in outcomes():
        adam_twin.check(found["adam", case], "adamw" if case == "scaled" else case, RANKS)


def test_an_optimizer_that_was_not_given_is_found() -> None:
    for found in outcomes():
        for own, wanted in zip(*found["found"], strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def test_the_optimizer_gets_the_means_of_the_ranks_moments() -> None:
    first, *others = (found["left"] for found in outcomes())
    for other in others:
        assert all(map(torch.equal, first, other)), "the replicas differ"


@pytest.mark.parametrize("case", ["adam", "adam, sparse"])
def test_a_clip_of_directions_is_refused(case: str) -> None:
    for found in outcomes():
        (text,) = found["clips"][case]
        assert "changed between their exchange and step(), as clip_grad_norm_() does" in text
        assert (
            "Adam's directions" in text
            and "clip=C,clip_by=model with C = the norm x sqrt(ranks)" in text
            and "momentum=0" in text
        )


def test_a_clip_of_velocities_is_warned_of_once() -> None:
    for found in outcomes():
        (text,) = found["clips"]["sgd"]
        assert "SGD's velocity" in text and "clip=C,clip_by=model" in text


@pytest.mark.parametrize("case", ["adam, longer than any", "adam, gradients", "sgd, longer than any"])
def test_a_clip_that_changes_nothing_or_gradients_is_fine(case: str) -> None:
    for found in outcomes():
        assert found["clips"][case] == []


def joined_alone() -> list[Tensor]:
    """A rank without any batch never steps, and never finds the optimizer: it must ask for nothing else than the others."""
    ranks.join()
    model = Two()
    wrapped = DistributedDataParallel(model)
    optimizer = adam_twin.made(model, "adamw")
    gradcomp.ddp.attach(wrapped, SPEC)
    with wrapped.join():
        for step in range(20 if dist.get_rank() == 0 else 0):
            optimizer.zero_grad()
            wrapped(gradients(0, step)).backward()
            optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def test_a_rank_without_any_batch_asks_for_what_the_others_ask() -> None:
    first, second = ranks.launch(joined_alone, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
