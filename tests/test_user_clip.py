"""Clips between backward() and step(), as usual loops have them: each rank cuts its own gradients, as without gradcomp."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import doors
import pytest
import ranks
import torch
import torch.distributed as dist
from clipping import ALL, BOUND, MADE, STEPS, Three, by_norm, equal, finish, gradients, sgd, spec_for, train
from doors import DDP, DOORS, EVERY, OWN, Training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

RANKS = 2
BOTH = ("sgd", "adamw")


# Changes of gradients between backward() and step().


def values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.05)


def third(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad /= 3


def largest(model: nn.Module) -> None:
    by_norm(model, 0.1, norm_type=float("inf"))


def counted(model: Any) -> None:
    """Divide by a number of tokens, which varies, and clip."""
    model.count = getattr(model, "count", 20) * 7 % 41 + 20
    for parameter in model.parameters():
        parameter.grad *= 20 / model.count
    by_norm(model)


def sometimes(model: Any) -> None:
    """Clip in two of three steps."""
    model.steps = getattr(model, "steps", 0) + 1
    if model.steps % 3:
        by_norm(model)


def of_layers(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.3)


def adaptive(model: nn.Module) -> None:
    """Clip by the norm of the weights."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        bound = 0.05 * float(parameter.detach().norm())
        parameter.grad *= min(1.0, bound / (float(parameter.grad.norm()) + 1e-6))


def signs(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.sign_()


CLIPS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (by_norm, values, third, largest, counted, sometimes, of_layers, adaptive, signs)
}


def by_hand(clip: Callable[..., Any]) -> list[Tensor]:
    """Train by SGD on the mean of gradients that each rank has clipped by itself."""
    model, own = Three(), [Three() for _ in range(RANKS)]
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        for rank, each in enumerate(own):
            each.load_state_dict(model.state_dict())
            each.zero_grad()
            each(gradients(step, rank)).backward()
            clip(each)
        for parameter, *parts in zip(model.parameters(), *(each.parameters() for each in own), strict=True):
            parameter.grad = torch.stack([part.grad for part in parts]).mean(0)  # type: ignore[misc]
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def unequal(door: str, clip: Callable[..., Any]) -> list[Tensor]:
    """Train by SGD on gradients of this rank's own."""
    return train(door, sgd, clip, given=lambda step: gradients(step, doors.rank(door)))


# Cases beside the usual loop, each with what torch alone does with equal gradients on all ranks.


def scaled(door: str | None, made: Any, *, told: bool = True) -> list[Tensor]:
    """Train under a GradScaler, with a scale that changes on the way. told: scaler= is passed."""
    model, scaler = Three(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    given = scaler if told else None
    run = None if door is None else Training(door, model, spec_for(made), inner=made(model.parameters()), scaler=given)
    optimizer = made(model.parameters()) if run is None else run.optimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale((model if run is None else run.whole)(gradients(step))).backward()
        if door in DOORS:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        by_norm(model)
        with optimizer.skip_synchronize() if door in DOORS else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
    return [each.detach().clone() for each in model.parameters()]


def accumulated(spec: str | None, made: Any, exchanges_all: bool) -> list[Tensor]:
    """Add up two gradients in each step."""
    model = Three()
    run = None if spec is None else Training(DDP, model, spec, inner=made(model.parameters()))
    optimizer = made(model.parameters()) if run is None else run.optimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        for last in (False, True):
            alone = last or exchanges_all or run is None
            with contextlib.nullcontext() if alone else run.whole.no_sync():
                (0.5 * (model if run is None else run.whole)(gradients(step))).backward()
        by_norm(model)
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def listed(spec: str | None) -> list[Tensor]:
    """Train with two optimizers under one clip."""
    model = Three()
    a, b, c = model.parameters()
    optimizers = [sgd([a, b], weight_decay=0.0), sgd([c], lr=0.01, momentum=0.5)]
    whole: Any = model
    if spec is not None:
        whole = DistributedDataParallel(model)
        gradcomp.ddp.attach(whole, spec, optimizer=optimizers)
    for step in range(STEPS):
        model.zero_grad()
        whole(gradients(step)).backward()
        by_norm(model)
        for each in optimizers:
            each.step()
    return [each.detach().clone() for each in model.parameters()]


def changed() -> list[Tensor]:
    """Go over from gradients to updates, and to others, under a clip."""
    model = Three()
    run = Training(DDP, model, "dense", inner=sgd(model.parameters()))
    later = {3: ALL, 6: "dense:feedback=true", 9: ALL}
    for step in range(STEPS):
        if step in later:
            run.handle.change(later[step])
        run.optimizer.zero_grad()
        run.whole(gradients(step)).backward()
        by_norm(model, foreach=step % 2 == 0)
        run.optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def summed() -> list[Tensor]:
    """Train by SGD on the sum of all ranks' clipped gradients, each its share of them."""
    import horovod.torch as hvd

    model = Three()
    run = Training(OWN, model, ALL, inner=sgd(model.parameters(), weight_decay=0.0), op=hvd.Sum)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.whole([each / RANKS for each in gradients(step)]).backward()
        finish(run, lambda: by_norm(model, BOUND / RANKS))
    return [each.detach().clone() for each in model.parameters()]


def resumed(made: Any, at: int | None) -> list[Tensor]:
    """Train on unequal gradients, from some step on with all that was saved there in a new process's place."""
    model, spec, losses = Three(), "topk:ratio=0.1", []
    run = Training(DDP, model, spec, inner=made(model.parameters()))
    for step in range(STEPS):
        if step == at:
            parts = copy.deepcopy([model.state_dict(), run.optimizer.state_dict(), run.handle.state_dict()])
            model = Three()
            run = Training(DDP, model, spec, inner=made(model.parameters()))
            for each, part in zip((model, run.optimizer, run.handle), parts, strict=True):
                each.load_state_dict(part)
        run.optimizer.zero_grad()
        loss = run.whole(gradients(step, dist.get_rank()))
        losses.append(loss.detach())
        loss.backward()
        by_norm(model)
        run.optimizer.step()
    return [torch.stack(losses), *(each.detach().clone() for each in model.parameters())]


def spiked(spec: str, made: Any, spike: float) -> list[Tensor]:
    """Train on gradients that differ between the ranks, one of them multiplied. Return the weights from before it on."""
    model, rank = Three(), dist.get_rank()
    run, found = Training(DDP, model, spec, inner=made(model.parameters())), []
    for step in range(2 * STEPS):
        run.optimizer.zero_grad()
        given = gradients(0, 100 * step + rank)
        factor = 1.0 if step < STEPS else spike if step == STEPS else 0.0
        run.whole([factor * each for each in given]).backward()
        by_norm(model)
        run.optimizer.step()
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    return found[STEPS - 1 :]


SENT_BY = {"topk": "topk:ratio=0.1", "levels": "orq", "left": "topk:ratio=0.1,momentum=0"}


def of_ddp() -> dict[Any, Any]:
    found: dict[Any, Any] = {
        ("accumulated", name, every): accumulated(spec_for(MADE[name]), MADE[name], every)
        for name in BOTH
        for every in (False, True)
    }
    found |= {"listed": listed(ALL), "changed": changed()}
    found |= {("auto", name): train(DDP, MADE[name], spec="auto") for name in BOTH}
    found |= {("resumed", name, at): resumed(MADE[name], at) for name in BOTH for at in (None, 1, 5)}
    found |= {
        ("spike", key, name): [spiked(spec, MADE[name], spike) for spike in (1e4, 64.0)]
        for key, spec in SENT_BY.items()
        for name in BOTH
    }
    return found


def program(door: str) -> dict[Any, Any]:
    """Train in every way. A warning of gradcomp's is an error: no clip is one that it does not understand."""
    doors.join(door)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradcomp")
        found: dict[Any, Any] = {("law", *key): train(door, MADE[key[0]], CLIPS[key[1]]) for key in cases()}
        found |= {("unequal", name): unequal(door, clip) for name, clip in CLIPS.items()}
        found |= {("scaled", name): scaled(door, MADE[name]) for name in BOTH}
        found["untold"] = scaled(door, sgd, told=False)
        if door == OWN:
            found["summed"] = summed()
        return found | (of_ddp() if door == DDP else {})


def cases() -> list[tuple[str, str]]:
    return [*((name, "by_norm") for name in MADE), *itertools.product(BOTH, [*CLIPS][1:])]


@ranks.once
def found(door: str) -> list[dict[Any, Any]]:
    return ranks.launch(program, RANKS, door)


@pytest.mark.parametrize("door", EVERY)
@pytest.mark.parametrize("name, clip", cases())
def test_with_everything_sent_and_equal_gradients_clip_and_optimizer_are_torchs(name: str, clip: str, door: str) -> None:
    wanted = train(None, MADE[name], CLIPS[clip])
    for own in found(door):
        # Signs of a gradient near zero, and roots of squares near zero, show the rounding of another order of sums.
        equal(own["law", name, clip], wanted, 1e-5)


@pytest.mark.parametrize("door", EVERY)
@pytest.mark.parametrize("clip", CLIPS)
def test_each_rank_clips_its_own_gradient(clip: str, door: str) -> None:
    wanted = by_hand(CLIPS[clip])
    for own in found(door):
        equal(own["unequal", clip], wanted, 1e-5)


@pytest.mark.parametrize("door", EVERY)
@pytest.mark.parametrize("name", BOTH)
def test_a_clip_under_a_loss_scale_is_torchs(name: str, door: str) -> None:
    """Whether gradcomp is told of the scaler or not."""
    for own in found(door):
        equal(own["scaled", name], scaled(None, MADE[name]), 1e-5)
        equal(own["untold"], scaled(None, sgd), 1e-5)


def test_a_clip_of_shares_of_a_sum_is_torchs() -> None:
    for own in found(OWN):
        equal(own["summed"], train(None, lambda parameters: sgd(parameters, weight_decay=0.0)), 1e-5)


@pytest.mark.parametrize("name", ["listed", "changed"])
def test_a_clip_by_several_optimizers_and_after_changes_is_torchs(name: str) -> None:
    for own in found(DDP):
        equal(own[name], listed(None) if name == "listed" else train(None, sgd), 1e-5)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_a_clip_of_accumulated_gradients_is_torchs(name: str, every: bool) -> None:
    for own in found(DDP):
        equal(own["accumulated", name, every], accumulated(None, MADE[name], every), 1e-5)


def far(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the distance of two results, as a share of the way to the second."""
    ours, torchs, begin = (torch.cat([each.detach().flatten() for each in of]) for of in (found, wanted, Three().parameters()))
    return float((ours - torchs).norm() / (torchs - begin).norm())


@pytest.mark.parametrize("name", BOTH)
def test_under_auto_a_clip_acts_as_without_gradcomp(name: str) -> None:
    for own in found(DDP):
        # It tries lossy candidates in these steps. A spike that is not clipped leads 9 times as far away with SGD.
        assert far(own["auto", name], train(None, MADE[name])) < 0.5


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("name", BOTH)
def test_a_training_with_a_clip_resumes_to_the_bit(name: str, at: int) -> None:
    for own in found(DDP):
        assert all(map(torch.equal, own["resumed", name, at], own["resumed", name, None]))


@pytest.mark.parametrize("key", SENT_BY)
@pytest.mark.parametrize("name", BOTH)
def test_a_spike_moves_weights_as_a_gradient_of_the_bounds_length_does(name: str, key: str) -> None:
    """One of 10^4 times, and one of 64 times the length: both are cut to the same gradient. Nothing of the rest comes back."""
    first, second = (own["spike", key, name] for own in found(DDP))
    for own, other in zip(first, second, strict=True):
        assert all(map(torch.equal, own, other)), "the replicas differ"
    for spiked, usual in zip(*first, strict=True):
        torch.testing.assert_close(spiked, usual, rtol=1e-3, atol=1e-3)
    if name == "sgd":
        moved = (first[0][-1] - first[0][0]).norm()
        assert 0 < moved < 3 * 0.05 * BOUND / (1 - 0.9), moved
