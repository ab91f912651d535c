"""momentum=auto under Horovod: with everything sent, training is that of torch's own SGD."""

from __future__ import annotations

from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import sgd_twin
from sgd_twin import SETTINGS, SPEC, STEPS, Two, gradients
from torch import Tensor

pytestmark = pytest.mark.slow

RANKS = 2
both_doors = pytest.mark.parametrize("door", doors.DOORS)


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
    named = [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]
    own = doors.wrapped(door, plain, named, SPEC, given=given, **({} if op is None else {"op": op}))
    after_step = sgd_twin.schedule(case, own)
    first = 0
    if resumed:
        weights, state = sgd_twin.alone(case, RANKS)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        own.load_state_dict(state)
        first = STEPS
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(own, root_rank=0)
    for step in range(first, first + STEPS):
        if leaves and step in (4, 7):
            own.compression.change(f"{SPEC},momentum=0" if step == 4 else SPEC)
        own.zero_grad()
        model(gradients(hvd.rank(), step)).backward()
        if apart:
            own.synchronize()
            with own.skip_synchronize():
                own.step()
        else:
            own.step()
        after_step()
        if step == first + 2:
            hvd.broadcast_optimizer_state(own, root_rank=0)  # as after an elastic reset
    groups = [{name: group[name] for name in ("momentum", "weight_decay")} for group in own.param_groups]
    assert all(group["momentum"] > 0 for group in groups), "the user's values are shown between steps"
    return [each.detach().clone() for each in model.parameters()]


def program(door: str) -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {case: train(door, case, f"{door} {case}") for case in SETTINGS}
    found["resumed, apart"] = train(door, "nesterov", f"{door} apart", resumed=True, apart=True)
    found["resumed"] = train(door, "nesterov", f"{door} resumed", resumed=True)
    found["not given"] = train(door, "nesterov", f"{door} not given", given=False)
    found["sum"] = train(door, "momentum and weight decay", f"{door} sum", op=hvd.Sum)
    found["left"] = train(door, "momentum alone", f"{door} left", leaves=True)
    found["left, sum"] = train(door, "momentum alone", f"{door} left, sum", op=hvd.Sum, leaves=True)
    return found


outcomes = ranks.once(lambda door: ranks.launch(program, RANKS, door))


@both_doors
@pytest.mark.parametrize("case", SETTINGS)
def test_training_is_torchs_own(door: str, case: str) -> None:
    for found in outcomes(door):
        sgd_twin.check(found[case], case, RANKS, broadcasts=True)


@both_doors
@pytest.mark.parametrize("case", ["resumed", "resumed, apart"])
def test_a_training_of_torch_goes_on_with_its_momentum(door: str, case: str) -> None:
    for found in outcomes(door):
        sgd_twin.check(found[case], "nesterov", RANKS, 2 * STEPS)


@both_doors
def test_horovods_optimizer_is_known_from_the_first_gradient_on(door: str) -> None:
    for found in outcomes(door):
        sgd_twin.check(found["not given"], "nesterov", RANKS, broadcasts=True)


@both_doors
@pytest.mark.parametrize("case", ["left", "left, sum"])
def test_a_change_hands_the_momentum_back_and_takes_it_again(door: str, case: str) -> None:
    for found in outcomes(door):
        sgd_twin.check(found[case], "momentum alone", RANKS, broadcasts=True)


@both_doors
def test_updates_that_are_sums(door: str) -> None:
    """With half the learning rate a sum over two ranks is the mean, but the weight decay must count once."""
    for found in outcomes(door):
        sgd_twin.check(found["sum"], "half the weight decay", RANKS, broadcasts=True)
