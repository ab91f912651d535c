"""momentum=auto under Horovod: with everything sent, training is torch's own with SGD, and the mean of directions with Adam."""

from __future__ import annotations

from typing import Any

import adam_twin
import doors
import horovod.torch as hvd
import pytest
import ranks
import sgd_twin
import torch
from sgd_twin import SPEC, STEPS, Two, gradients
from torch import Tensor

pytestmark = pytest.mark.slow

RANKS = 2
both_doors = pytest.mark.parametrize("door", doors.DOORS)


def started(door: str, plain: torch.optim.Optimizer, model: Two, prefix: str, **options: Any) -> Any:
    """Wrap an optimizer."""
    named = [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]
    return doors.wrapped(door, plain, named, SPEC, **options)


def broadcast(model: Two, own: Any) -> None:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(own, root_rank=0)


def step_once(model: Two, own: Any, step: int) -> None:
    own.zero_grad()
    model(gradients(hvd.rank(), step)).backward()
    own.step()


def weights(model: Two) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def train(
    door: str,
    case: str,
    prefix: str,
    *,
    op: Any = None,
    resumed: bool = False,
    apart: bool = False,
    given: bool = True,
    leaves: bool = False,
) -> list[Tensor]:
    """Train with known gradients, from the start or from the middle of torch's own training.

    apart: end each exchange by synchronize(), before the step. given: pass optimizer=. leaves: leave the momentum to the
    optimizer from the middle on, for three steps.
    """
    model = Two()
    plain = sgd_twin.sgd(model, case, 0.05 if op is None else 0.05 / RANKS)
    own = started(door, plain, model, prefix, given=given, **({} if op is None else {"op": op}))
    after_step = sgd_twin.schedule(case, own)
    first = 0
    if resumed:
        trained, state = sgd_twin.alone(case, RANKS)
        for parameter, weight in zip(model.parameters(), trained, strict=True):
            parameter.data.copy_(weight)
        own.load_state_dict(state)
        first = STEPS
    broadcast(model, own)
    for step in range(first, first + STEPS):
        if leaves and step in (4, 7):
            own.compression.change(f"{SPEC},momentum=0" if step == 4 else SPEC)
        if apart:
            own.zero_grad()
            model(gradients(hvd.rank(), step)).backward()
            own.synchronize()
            with own.skip_synchronize():
                own.step()
        else:
            step_once(model, own, step)
        after_step()
        if step == first + 2:
            hvd.broadcast_optimizer_state(own, root_rank=0)  # as after an elastic reset
    groups = [{name: group[name] for name in ("momentum", "weight_decay")} for group in own.param_groups]
    assert all(group["momentum"] > 0 for group in groups), "the user's values are shown between steps"
    return weights(model)


def train_adam(door: str, case: str, prefix: str, **options: Any) -> tuple[list[Tensor], int]:
    """Train with Adam; then leave the moments to it. Return the weights before that, and the number of its states."""
    model = Two()
    own = started(door, adam_twin.made(model, case), model, prefix, **options)
    broadcast(model, own)
    for step in range(STEPS):
        step_once(model, own, step)
        if step == 2:
            hvd.broadcast_optimizer_state(own, root_rank=0)  # as after an elastic reset: no weight decay
    trained = weights(model)
    own.compression.change(f"{SPEC},momentum=0")  # and torch's own Adam goes on
    for step in range(2):
        step_once(model, own, step)
    return trained, len(own.state)


def program(door: str) -> dict[Any, Any]:
    hvd.init()
    found: dict[Any, Any] = {case: train(door, case, f"{door} {case}") for case in sgd_twin.SETTINGS}
    found["resumed, apart"] = train(door, "nesterov", f"{door} apart", resumed=True, apart=True)
    found["resumed"] = train(door, "nesterov", f"{door} resumed", resumed=True)
    found["not given"] = train(door, "nesterov", f"{door} not given", given=False)
    found["sum"] = train(door, "momentum and weight decay", f"{door} sum", op=hvd.Sum)
    found["left"] = train(door, "momentum alone", f"{door} left", leaves=True)
    found["left, sum"] = train(door, "momentum alone", f"{door} left, sum", op=hvd.Sum, leaves=True)
    found |= {("adam", case): train_adam(door, case, f"{door} adam {case}") for case in adam_twin.SETTINGS}
    found["adam", "sum"] = train_adam(door, "adamw", f"{door} adam sum", op=hvd.Sum)
    return found


outcomes = ranks.once(lambda door: ranks.launch(program, RANKS, door))

# By what was trained: the case of torch's own training that it must equal, and its steps.
EQUAL = {
    **{case: (case, STEPS) for case in sgd_twin.SETTINGS},
    "resumed": ("nesterov", 2 * STEPS),
    "resumed, apart": ("nesterov", 2 * STEPS),
    "not given": ("nesterov", STEPS),
    "left": ("momentum alone", STEPS),
    "left, sum": ("momentum alone", STEPS),
    "sum": ("half the weight decay", STEPS),  # with half the rate a sum over two ranks is the mean; the decay counts once
}


@both_doors
@pytest.mark.parametrize("name", EQUAL)
def test_training_is_torchs_own(door: str, name: str) -> None:
    """From its start or its middle, with an optimizer that is given or not, and where the momentum is left for some steps."""
    case, steps = EQUAL[name]
    for found in outcomes(door):
        sgd_twin.check(found[name], case, RANKS, steps, broadcasts="resumed" not in name)


@both_doors
@pytest.mark.parametrize("case", [*adam_twin.SETTINGS, "sum"])
def test_training_with_adam_is_by_the_mean_of_the_ranks_directions(door: str, case: str) -> None:
    """Adam's step does not depend on the length of gradients: a sum must not move the weights further."""
    for found in outcomes(door):
        adam_twin.check(found["adam", case][0], "adamw" if case == "sum" else case, RANKS, broadcasts=True)


@both_doors
def test_after_a_change_adam_has_moments_of_its_own(door: str) -> None:
    for found in outcomes(door):
        assert found["adam", "adamw"][1] == 2
