"""A gradient that changes between backward() and step() is found before weights change, and the advice is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
from doors import ALONE, DOORS, Training
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.slow

LIMIT = 0.01
# The warnings of a layer's gradient that is removed, by spec.
REMOVED = {"topk:ratio=0.05": 1, "topk:ratio=0.05,momentum=0": 1, "half": 0}


def clip(run: Training, scaler: Any) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), LIMIT)
    run.optimizer.step()


def replace(run: Training, scaler: Any) -> None:
    for parameter in run.model.parameters():
        parameter.grad = parameter.grad.clone()
    run.optimizer.step()


def unscale(run: Training, scaler: Any) -> None:
    scaler.step(run.optimizer)


def advised(run: Training, scaler: Any) -> None:
    """Do what the message says."""
    run.optimizer.synchronize()
    scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.model.parameters(), LIMIT)
    with run.optimizer.skip_synchronize():
        scaler.step(run.optimizer)
    scaler.update()


def train(door: str, habit: Callable[..., None], steps: int = 1) -> Tensor:
    run, scaler = Training(door, spec="dense"), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(steps):
        run.optimizer.zero_grad()
        x, y = next(run.data)
        scaler.scale(functional.cross_entropy(run.model(x), y)).backward()
        habit(run, scaler)
    return run.weights


def cut_short(door: str) -> list[str]:
    """Fail outside of gradcomp between backward() and step(), begin anew as Horovod's elastic recovery does, and go on."""
    run = Training(door, spec="topk:ratio=0.05")
    run.train(3)
    state = run.optimizer.state_dict()
    run.optimizer.zero_grad()
    run.backward()
    hvd.barrier()
    ranks.start_anew()
    run.optimizer.load_state_dict(state)
    return [small_net.refused(lambda: run.train(1)) for _ in range(2)]


def removing(door: str, spec: str) -> list[tuple[str, bool]]:
    """Remove a layer's gradient after its exchange. Return the warnings, each with whether it is at this file's line."""
    run = Training(door, spec=spec)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(4):
            run.optimizer.zero_grad()
            run.backward()
            run.optimizer.synchronize()
            if step:
                run.model.part.weight.grad = None
            with run.optimizer.skip_synchronize():
                run.optimizer.step()
    return [(str(each.message), each.filename == __file__) for each in seen]


def hooked(door: str) -> Tensor:
    """Train with a tenth of the odd columns' gradients, by a hook."""
    run = Training(door, spec="topk:ratio=1,wire=exact", momentum=0.9)
    for each in run.model.parameters():
        each.register_hook(lambda grad: grad * (torch.arange(grad.shape[-1]) % 2 * -0.9 + 1))
    return run.train(4)


def skip_late(door: str) -> list[str]:
    """Drop updates that synchronize() has exchanged, for the first time after the state was copied for the last time."""
    run, said = Training(door, spec="topk:ratio=0.05"), []
    for step in range(16):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")  # Horovod warns, too: of a step() after a synchronize() that no step() followed
            run.optimizer.zero_grad()
            run.backward()
            if step in (11, 13):
                run.optimizer.synchronize()
            else:
                run.optimizer.step()
        said += [f"{step}: {each.message}" for each in seen if "applied" in str(each.message)]
    return said


def program() -> dict[Any, Any]:
    hvd.init()
    found: dict[Any, Any] = {("advised", door): train(door, advised, 4) for door in (ALONE, *DOORS)}
    found |= {("hooked", door): hooked(door) for door in (ALONE, *DOORS)}
    for door in DOORS:
        for habit in (clip, replace, unscale):
            found[habit.__name__, door] = small_net.refused(lambda d=door, h=habit: train(d, h))  # type: ignore[misc]
    found |= {("removed", door, spec): removing(door, spec) for door in DOORS for spec in REMOVED}
    found |= {("skip late", door): skip_late(door) for door in DOORS}
    hvd.barrier()
    ranks.start_anew()
    return found | {("cut short", door): cut_short(door) for door in DOORS}


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2, anew=3)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["clip", "replace", "unscale"])
def test_a_change_that_would_be_lost_is_refused_with_the_right_lines(name: str, door: str) -> None:
    for own in found():
        said = own[name, door]
        assert said.startswith("RuntimeError: the gradient of '") and "between backward() and step()" in said, said
        for line in ("optimizer.synchronize()", "scaler.unscale_(optimizer)", "with optimizer.skip_synchronize():"):
            assert line in said


@pytest.mark.parametrize("door", DOORS)
def test_a_hook_changes_gradients_before_their_exchange(door: str) -> None:
    for own in found():
        torch.testing.assert_close(own["hooked", door], own["hooked", ALONE], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("door", DOORS)
def test_the_lines_it_names_train_as_horovod_alone_does(door: str) -> None:
    """Rounding: Horovod's sums of two float32 gradients, and ours, divided and scaled in another order."""
    for own in found():
        torch.testing.assert_close(own["advised", door], own["advised", ALONE], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("door", DOORS)
def test_a_step_that_was_cut_short_is_forgotten(door: str) -> None:
    for own in found():
        assert own["cut short", door] == ["nothing was raised"] * 2


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("spec", REMOVED)
def test_a_gradient_that_is_removed_after_its_exchange_is_warned_of_where_something_is_lost(spec: str, door: str) -> None:
    for own in found():
        said = [each for each in own["removed", door, spec] if "part.weight' was set to None between its exchange" in each[0]]
        assert len(said) == REMOVED[spec] and all(here for _, here in said), own["removed", door, spec]


@pytest.mark.parametrize("door", DOORS)
def test_an_update_that_is_dropped_late_is_warned_of_once(door: str) -> None:
    for rank, own in enumerate(found()):
        said, words = own["skip late", door], "12: no optimizer.step() applied the update of exchange 12. This once"
        assert [each.startswith(words) for each in said] == [True] * (rank == 0), said
