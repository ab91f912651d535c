"""Clips of some layers, and one clip over several models or optimizers, after the exchange: understood, each told of once."""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import doors
import pytest
import ranks
import torch
from clipping import ALL, MADE, NORMS, STEPS, Three, by_norm, equal, finish, gradients, said, sgd, train
from doors import DDP, OWN, Training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine.user_clip import CONTENTS, Comparison, UserClips

pytestmark = pytest.mark.slow


def drawn(step: int) -> list[Tensor]:
    """Draw gradients of which the first are shorter than the bounds, and updates are longer: so clips are seen early."""
    return [NORMS[step % 8] / 4 * own / own.norm() for own in gradients(max(0, step - 2))]


def groups(model: Any) -> None:
    nn.utils.clip_grad_norm_([model.a], 0.75)
    nn.utils.clip_grad_norm_([model.b, model.c], 1.05)


def each(model: nn.Module) -> None:
    for bound, parameter in zip((0.75, 0.72, 0.78), model.parameters(), strict=True):
        nn.utils.clip_grad_norm_(parameter, bound)


def some(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.b, 0.75)


CLIPS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (groups, each, some)}


def constant(step: int) -> list[Tensor]:
    """Draw gradients of one norm in each layer, with other directions in each step."""
    return [grad / grad.norm() for grad in gradients(step)]


def two_models(door: str | None, made: Any, bound: float = 0.4, spec: str = ALL) -> list[Tensor]:
    """Train two models, each with its optimizer, under one clip of both. Gradients have one norm."""
    models = Three(), Three()
    runs: Any = [None, None]
    if door is not None:
        runs = [
            Training(door, model, spec, prefix=f"{number}.", inner=made(model.parameters()))
            for number, model in enumerate(models)
        ]
    optimizers = [made(m.parameters()) if run is None else run.optimizer for m, run in zip(models, runs, strict=True)]
    for step in range(STEPS):
        for number, (model, run) in enumerate(zip(models, runs, strict=True)):
            optimizers[number].zero_grad()
            given = [(0.3 + number) * each for each in constant(step)]
            (model if run is None else run.whole)(given).backward()
        if door == OWN:
            for optimizer in optimizers:
                optimizer.synchronize()
        nn.utils.clip_grad_norm_([each for model in models for each in model.parameters()], bound)
        for optimizer in optimizers:
            with optimizer.skip_synchronize() if door == OWN else contextlib.nullcontext():
                optimizer.step()
    return [each.detach().clone() for model in models for each in model.parameters()]


def one_optimizer(spec: str | None) -> list[Tensor]:
    """Train two models with one optimizer under one clip, whose parts have norms that leap."""
    models = Three(), Three()
    optimizer = sgd([each for model in models for each in model.parameters()])
    wholes: Any = models if spec is None else [DistributedDataParallel(model) for model in models]
    for whole in wholes if spec else ():
        gradcomp.ddp.attach(whole, spec, optimizer=optimizer)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        for number, whole in enumerate(wholes):
            whole(gradients(step + 3 * number)).backward()
        nn.utils.clip_grad_norm_([each for model in models for each in model.parameters()], 0.4)
        optimizer.step()
    return [each.detach().clone() for model in models for each in model.parameters()]


def sparse(made: Any) -> Any:
    """Train under clips of two groups of which updates show little: some layers have none in the first steps."""
    model = Three()
    run = Training(DDP, model, "topk:ratio=0.02", inner=made(model.parameters()))
    for step in range(3 * STEPS):
        run.optimizer.zero_grad()
        run.whole(constant(step)).backward()
        finish(run, lambda: (nn.utils.clip_grad_norm_([model.a], 0.3), nn.utils.clip_grad_norm_([model.b, model.c], 0.2)))
    return [(clip.bound, sorted(names)) for clip, names in run.handle._session.view.bounds()]


def program(door: str) -> dict[Any, Any]:
    doors.join(door)
    found: dict[Any, Any] = {
        ("models", name): said(lambda m=MADE[name]: two_models(door, m))  # type: ignore[misc]
        for name in ("nesterov", "adamw")
    }
    if door == DDP:
        found |= {
            (clip.__name__, name): said(lambda c=clip, m=MADE[name]: train(DDP, m, c, given=drawn))  # type: ignore[misc]
            for clip in CLIPS.values()
            for name in ("sgd", "adamw")
        }
        found["one optimizer"] = said(lambda: one_optimizer(ALL))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "gradcomp: the gradients were clipped")
            found |= {("sparse", name): sparse(MADE[name]) for name in ("sgd", "adamw")}
    return found


@ranks.once
def found(door: str) -> list[dict[Any, Any]]:
    return ranks.launch(program, 2, door)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", CLIPS)
def test_with_everything_sent_clips_of_some_layers_are_torchs(clip: str, name: str) -> None:
    for rank, own in enumerate(found(DDP)):
        weights, warned = own[clip, name]
        equal(weights, train(None, MADE[name], CLIPS[clip], given=drawn), 1e-5)  # weights move by tens
        assert ["the gradients were clipped to " in text and " of 3 layers)" in text for text, _ in warned] == [True] * (
            rank == 0
        )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_layers_find_the_clip_of_theirs_where_few_entries_are_sent(name: str) -> None:
    for own in found(DDP):
        bounds = {layer: bound for bound, names in own["sparse", name] for layer in names}
        assert bounds["a"] == pytest.approx(0.3, rel=1e-4)
        # Where both have an entry, each has its part of the norm, and they are cut together.
        assert all(0.2 / 2**0.5 <= bounds[layer] * 1.0001 <= 0.2001 for layer in "bc") and len(bounds) == 3


@pytest.mark.parametrize("door", [DDP, OWN])
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_one_clip_of_two_models_is_one(name: str, door: str) -> None:
    begin = torch.cat([each.detach().flatten() for _ in range(2) for each in Three().parameters()])
    for rank, own in enumerate(found(door)):
        weights, warned = own["models", name]
        ours, torchs = (torch.cat([each.flatten() for each in of]) for of in (weights, two_models(None, MADE[name])))
        assert (ours - torchs).norm() < 1e-4 * (torchs - begin).norm()
        assert [text.partition(" between")[0] for text, _ in warned] == [
            "gradcomp: the gradients were clipped to a norm of 0.4"
        ] * (rank == 0)


def test_one_clip_of_two_models_with_one_optimizer_warns_once_of_each_fact() -> None:
    for rank, own in enumerate(found(DDP)):
        _, warned = own["one optimizer"]
        texts = [text for text, _ in warned]
        assert sum("clipped to a norm of 0.4" in text for text in texts) == (rank == 0)
        assert not any("multiplied by one factor" in text for text in texts) and len(texts) <= 3, texts


def test_the_clips_of_groups_are_of_one_norm_where_torch_has_one() -> None:
    """A guard of this file's gradients: the clips act, and one over all layers would train otherwise."""
    for name in ("sgd", "adamw"):
        grouped = train(None, MADE[name], groups, given=drawn)
        with pytest.raises(AssertionError):
            equal(grouped, train(None, MADE[name], by_norm, given=drawn), 1e-2)


def test_layers_that_share_a_factor_by_chance_are_no_leap(recwarn: pytest.WarningsRecorder) -> None:
    """They go to and fro between clips, whose bounds leap then. Layers of one size do so under Adam."""
    for seed in range(20):
        draw, clips = random.Random(seed), UserClips(4)
        for _ in range(24):
            drawn = [draw.uniform(1, 3) for _ in range(4)]
            squares = [draw.choice(drawn[:3]) ** 2 for _ in range(4)], [0.01] * 4
            old, new = map(sum, squares)
            step = Comparison(1, 1, len({*squares[0]}) == 1, 1, math.sqrt(new / old), math.sqrt(old), 1e-6, squares)
            clips.note(step, CONTENTS["direction"], is_whole=True)
            clips.end_step()
    assert not any("multiplied by one factor" in str(each.message) for each in recwarn)
