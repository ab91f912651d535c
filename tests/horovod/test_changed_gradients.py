"""A gradient that changes between backward() and step() is found before weights change, and the advice is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.slow

LIMIT = 0.01


def clip(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()


def clip_one_layer(model: Any, optimizer: Any, scaler: Any) -> None:
    nn.utils.clip_grad_norm_(model.part.parameters(), LIMIT)
    optimizer.step()


def scale_by_hand(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]
    optimizer.step()


def replace(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]
    optimizer.step()


def unscale(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    scaler.step(optimizer)


WRONG: dict[str, Callable[..., None]] = {
    "clip": clip,
    "clip one layer": clip_one_layer,
    "scale by hand": scale_by_hand,
    "replace": replace,
    "unscale": unscale,
}


def advised(model: nn.Module, optimizer: Any, scaler: Any) -> None:
    """Do what the message says."""
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def run(door: str, way: Callable[..., None], steps: int, name: str) -> Tensor:
    """Train for so many steps; return the weights."""
    model = small_net.net()
    optimizer = doors.sgd(door, model, "dense" if door != doors.ALONE else None, prefix=f"{name}.")
    scaler, data = torch.amp.GradScaler("cpu", init_scale=1024.0), doors.batches()
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = next(data)
        scaler.scale(functional.cross_entropy(model(x), y)).backward()
        way(model, optimizer, scaler)
    return small_net.weights(model)


def program() -> dict[Any, Any]:
    hvd.init()
    found: dict[Any, Any] = {}
    for door in doors.DOORS:
        for name, way in WRONG.items():
            # One layer in a large model may be looked at a few steps later.
            steps = 4 if name == "clip one layer" else 1
            found[name, door] = small_net.refused(lambda d=door, w=way, n=name, s=steps: run(d, w, s, f"{n}/{d}"))  # type: ignore[misc]
        found["advised", door] = run(door, advised, 4, f"advised/{door}")
    found["advised", doors.ALONE] = run(doors.ALONE, advised, 4, "advised/alone")
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("door", doors.DOORS)
@pytest.mark.parametrize("name", WRONG)
def test_a_change_that_would_be_lost_is_refused_with_the_right_lines(name: str, door: str) -> None:
    for own in found():
        said = own[name, door]
        assert said.startswith("RuntimeError: the gradient of '"), said
        assert "between backward() and step()" in said
        for line in ("optimizer.synchronize()", "scaler.unscale_(optimizer)", "with optimizer.skip_synchronize():"):
            assert line in said


@pytest.mark.parametrize("door", doors.DOORS)
def test_the_lines_it_names_train_as_horovod_alone_does(door: str) -> None:
    """Rounding: Horovod's sums of two float32 gradients, and ours, divided and scaled in another order."""
    for own in found():
        torch.testing.assert_close(own["advised", door], own["advised", doors.ALONE], rtol=1e-5, atol=1e-7)


def cut_short(door: str) -> list[str]:
    """Fail outside of gradcomp between backward() and step(), begin anew as Horovod's elastic recovery does, and go on."""
    hvd.init()
    model, data = small_net.net(), doors.batches()
    optimizer = doors.sgd(door, model, "topk:ratio=0.05")
    small_net.train(model, optimizer, data, 3)
    state = optimizer.state_dict()
    optimizer.zero_grad()
    small_net.backward(model, next(data))
    hvd.barrier()
    ranks.start_anew()
    optimizer.load_state_dict(state)
    return [small_net.refused(lambda: small_net.train(model, optimizer, data, 1)) for _ in range(2)]


@pytest.mark.parametrize("door", doors.DOORS)
def test_a_step_that_was_cut_short_is_forgotten(door: str) -> None:
    for said in ranks.launch(cut_short, 2, door, anew=1):
        assert said == ["nothing was raised"] * 2, said
