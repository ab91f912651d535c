"""Loss scaling by every door: whatever the scale does, the weights and the residual add up to the gradients of all steps."""

from __future__ import annotations

import warnings
from typing import Any

import choices
import doors
import pytest
import ranks
import torch
from doors import DDP, EVERY, OWN, Training
from torch import Tensor, nn

pytestmark = pytest.mark.slow

SHAPES = {"wide": (30, 40), "narrow": (70,), "last": (5, 9)}
# Small enough for three buckets.
BUCKET_MB = 0.0003
STEPS = 60
# The step in which rank 1's gradient overflows, and the entry of `narrow`.
OVERFLOW, BAD = 30, 7
# Specs with their momentum.
SPECS = {
    "topk:ratio=0.01": 0.0,
    "topk:ratio=0.01,route=tree": 0.0,
    "topk:ratio=0.02,route=split": 0.0,
    "sdagc:lam=2": 0.0,
    "gs_sgd": 0.0,
    "orq:sigmas=2.5,feedback=true": 0.0,
    "sign:momentum=0.5": 0.5,
    "blocks:feedback=true": 0.0,
}
# All doors deliver in the same way. The slower ones train a few specs.
CASES = [(OWN, spec) for spec in SPECS] + [(doors.COMPRESSION, spec) for spec in [*SPECS][::3]]
CASES += [(DDP, spec) for spec in ("topk:ratio=0.01", "sdagc:lam=2", "orq:sigmas=2.5,feedback=true", "blocks:feedback=true")]
# These have no residual.
WITHOUT_FEEDBACK = [(DDP, "dense"), (DDP, "topk:ratio=1,wire=exact,feedback=false")]
# The candidates that auto takes.
CHOSEN = {"growth": ("stock", "topk"), "back growth": ("topk", "stock"), "overflow": ("topk",)}
every_door = pytest.mark.parametrize("door", EVERY)


def gradient(name: str, rank: int, step: int) -> Tensor:
    """Return the gradient of a parameter, computed without any model."""
    seed = 1000 * step + 100 * rank + list(SHAPES).index(name)
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """Parameters that begin at 0, and a loss that has the known gradients."""

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, step: int) -> Tensor:
        return torch.stack([(self.get_parameter(name) * gradient(name, self.rank, step)).sum() for name in SHAPES]).sum()


def scaler(interval: int) -> Any:
    """Make a scaler that grows after so many good steps."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)


def train(run: Training, scaling: Any, overflows: bool) -> None:
    """Run the steps. overflows: an entry of rank 1 becomes infinite in one step, which nothing of it outlives."""
    model, before = run.model, dict[str, Tensor]()
    for step in range(STEPS):
        model.zero_grad()
        spoiled = None
        if overflows and step == OVERFLOW and model.rank == 1:
            spoiled = model.narrow.register_hook(lambda g: g.index_put((torch.tensor(BAD),), torch.tensor(float("inf"))))
        skipped = overflows and step == OVERFLOW
        before = state_of(run) if skipped else before
        scaling.scale(run.whole(step)).backward()
        run.apply(scaling)
        if spoiled is not None:
            spoiled.remove()
        if skipped and run.handle.stats()["exchanges"] == "updates":
            after = state_of(run)
            assert all(torch.equal(before[name], each) for name, each in after.items()), "the step was to leave no trace"


def state_of(run: Training) -> dict[str, Tensor]:
    """Copy the weights, the residual, and the number of exchanges."""
    copied = {f"{name} left": left for name, left in run.residual().items()}
    copied |= {name: each.clone() for name, each in weights(run.model).items()}
    return copied | {"steps": torch.tensor(run.handle.stats()["steps"])}


def wanted(world: int, overflows: bool, momentum: float = 0.0) -> dict[str, Tensor]:
    """Sum the mean gradients of all steps, each with its whole effect. A step that was skipped is none."""
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank in range(world):
        for step in range(STEPS):
            for name in SHAPES if not (overflows and step == OVERFLOW) else ():
                sums[name] += gradient(name, rank, step).double() / world / (1 - momentum)
    return sums


def check(found: list[dict[str, Any]], overflows: bool, momentum: float = 0.0) -> None:
    """Hold that what has moved the weights, and the mean of what waits, are all gradients. found: of each rank."""
    for name, sum_of_gradients in wanted(len(found), overflows, momentum).items():
        waits = torch.stack([own["residual"][name].double() for own in found]).mean(0)
        for own in found:
            assert torch.equal(own["weights"][name], found[0]["weights"][name])
            torch.testing.assert_close(waits - own["weights"][name].double(), sum_of_gradients, rtol=1e-4, atol=1e-4)


def scaled(door: str, spec: str, interval: int, overflows: bool, told: bool = True) -> dict[str, Any]:
    scaling = scaler(interval)
    given = scaling if told else None
    run = Training(door, Model(doors.rank(door)), spec, lr=1.0, bucket_mb=BUCKET_MB, scaler=given)
    train(run, scaling, overflows)
    return {"weights": weights(run.model), "residual": run.residual(), "scale": scaling.get_scale()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def all_specs(door: str) -> dict[str, Any]:
    doors.join(door)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for spec in (spec for of_case, spec in CASES + WITHOUT_FEEDBACK if of_case == door):
            found[f"{spec} growth"] = scaled(door, spec, 20, False)
            if (door, spec) in CASES:
                found[f"{spec} overflow"] = scaled(door, spec, 1000, True)
        for name, chosen in CHOSEN.items() if door == DDP else ():
            with choices.chosen(*chosen):
                overflows = name == "overflow"
                found[name] = scaled(door, "auto:loss=high", 1000 if overflows else 20, overflows)
        for name, told in {"told": True, "untold": False}.items():
            found[name] = scaled(door, "topk:ratio=0.01", 20, False, told)
    found["said"] = [str(each.message) for each in said if "caler" in str(each.message)]
    return found


outcomes = ranks.once(lambda door: ranks.launch(all_specs, 2, door))


@pytest.mark.parametrize("door, spec", CASES + WITHOUT_FEEDBACK)
def test_a_scale_that_grows_changes_nothing(door: str, spec: str) -> None:
    found = [own[f"{spec} growth"] for own in outcomes(door)]
    assert found[0]["scale"] == 2.0**19
    check(found, False, SPECS.get(spec, 0.0))


@pytest.mark.parametrize("door, spec", CASES)
def test_a_skipped_step_exchanges_nothing_and_changes_no_residual(door: str, spec: str) -> None:
    found = [own[f"{spec} overflow"] for own in outcomes(door)]
    assert found[0]["scale"] == 2.0**15
    check(found, True, SPECS[spec])


@pytest.mark.parametrize("name", CHOSEN)
def test_the_choice_of_auto_changes_nothing(name: str) -> None:
    """It goes to and fro while the scale grows; or has taken topk when a step is skipped."""
    check([own[name] for own in outcomes(DDP)], name == "overflow")


@every_door
def test_no_scaler_is_warned_about(door: str) -> None:
    assert all(own["said"] == [] for own in outcomes(door))


@every_door
def test_a_scaler_need_not_be_told(door: str) -> None:
    """The weights are the same to the bit."""
    for own in outcomes(door):
        assert all(torch.equal(each, own["untold"]["weights"][name]) for name, each in own["told"]["weights"].items())
