"""momentum=auto with Adam under Horovod: the ranks exchange directions."""

from __future__ import annotations

from typing import Any

import adam_twin
import doors
import horovod.torch as hvd
import pytest
import ranks
from adam_twin import SETTINGS
from sgd_twin import SPEC, STEPS, Two, gradients
from torch import Tensor

pytestmark = pytest.mark.slow

RANKS = 2
both_doors = pytest.mark.parametrize("door", doors.DOORS)


def train(door: str, case: str, prefix: str, **options: Any) -> tuple[list[Tensor], int]:
    model = Two()
    named = [(f"{prefix}.{name}", parameter) for name, parameter in model.named_parameters()]
    own = doors.wrapped(door, adam_twin.made(model, case), named, SPEC, **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(own, root_rank=0)
    for step in range(STEPS):
        own.zero_grad()
        model(gradients(hvd.rank(), step)).backward()
        own.step()
        if step == 2:
            hvd.broadcast_optimizer_state(own, root_rank=0)  # as after an elastic reset: no weight decay
    trained = [each.detach().clone() for each in model.parameters()]
    own.compression.change(f"{SPEC},momentum=0")  # and torch's own Adam goes on
    for step in range(2):
        own.zero_grad()
        model(gradients(hvd.rank(), step)).backward()
        own.step()
    return trained, len(own.state)


def program(door: str) -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {case: train(door, case, f"{door} {case}") for case in SETTINGS}
    found["sum"] = train(door, "adamw", f"{door} sum", op=hvd.Sum)
    return found


outcomes = ranks.once(lambda door: ranks.launch(program, RANKS, door))


@both_doors
@pytest.mark.parametrize("case", SETTINGS)
def test_training_is_by_the_mean_of_the_ranks_directions(door: str, case: str) -> None:
    for found in outcomes(door):
        adam_twin.check(found[case][0], case, RANKS, broadcasts=True)


@both_doors
def test_after_a_change_the_optimizer_has_moments_of_its_own(door: str) -> None:
    for found in outcomes(door):
        assert found["adamw"][1] == 2


@both_doors
def test_a_sum_of_updates_is_the_mean_of_directions(door: str) -> None:
    """Adam's step does not depend on the length of gradients: a sum must not move the weights further."""
    for found in outcomes(door):
        adam_twin.check(found["sum"][0], "adamw", RANKS, broadcasts=True)
