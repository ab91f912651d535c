"""Loss scaling under Horovod: whatever the scale does, what is applied and what waits are all gradients."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import doors
import horovod.torch as hvd
import known_gradients
import pytest
import ranks
import torch
from known_gradients import BUCKET_MB, Model

pytestmark = pytest.mark.slow

SPECS = {
    "topk:ratio=0.01": 0.0,
    "topk:ratio=0.01,route=tree": 0.0,
    "topk:ratio=0.02,route=split": 0.0,
    "sdagc:lam=2": 0.0,
    "gs_sgd": 0.0,
    "orq:sigmas=2.5,feedback=true": 0.0,
    "sign:momentum=0.5": 0.5,
}
# Both doors deliver in the same way. The slower one trains a few specs.
CASES = [(doors.OWN, spec) for spec in SPECS] + [(doors.COMPRESSION, spec) for spec in [*SPECS][::3]]
every_case = pytest.mark.parametrize("door,spec", CASES)
both_doors = pytest.mark.parametrize("door", doors.DOORS)
count = itertools.count()


def scaled(door: str, spec: str, interval: int, overflows: bool) -> dict[str, Any]:
    model, scaling = Model(hvd.rank()), known_gradients.scaler(interval)
    own = doors.sgd(door, model, spec, prefix=f"{next(count)}.", lr=1.0, bucket_mb=BUCKET_MB, scaler=scaling)

    def update() -> None:
        own.synchronize()
        scaling.unscale_(own)
        with own.skip_synchronize():
            scaling.step(own)
        scaling.update()

    known_gradients.train(model, model, scaling, overflows, update)
    residual = {name.partition(".")[2]: left for name, left in own.compression.residual().items()}
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"weights": weights, "residual": residual, "scale": scaling.get_scale()}


def all_specs(door: str) -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {}
    for spec in (spec for of_case, spec in CASES if of_case == door):
        found[f"{spec} growth"] = scaled(door, spec, 20, False)
        found[f"{spec} overflow"] = scaled(door, spec, 1000, True)
    return found


outcomes = ranks.once(lambda door: ranks.launch(all_specs, 2, door))


@every_case
def test_a_scale_that_grows_changes_nothing(door: str, spec: str) -> None:
    found = [own[f"{spec} growth"] for own in outcomes(door)]
    assert found[0]["scale"] == 2.0**19
    known_gradients.check(found, False, SPECS[spec])


@every_case
def test_a_skipped_step_waits_whole(door: str, spec: str) -> None:
    found = [own[f"{spec} overflow"] for own in outcomes(door)]
    assert found[0]["scale"] == 2.0**15
    known_gradients.check(found, True, SPECS[spec])


def unknown(door: str, given: bool) -> list[str]:
    hvd.init()
    model, scaling = Model(hvd.rank()), known_gradients.scaler(20)
    own = doors.sgd(door, model, "topk:ratio=0.01", lr=1.0, scaler=scaling if given else None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            model.zero_grad()
            scaling.scale(model(step)).backward()
            own.synchronize()
            with own.skip_synchronize():
                scaling.step(own)
            scaling.update()
    return [f"{Path(each.filename).name}: {each.message}" for each in said if "GradScaler" in str(each.message)]


@both_doors
def test_a_scaler_that_is_not_known_is_met_once(door: str) -> None:
    for said in ranks.launch(unknown, 2, door, False):
        assert len(said) == 1 and "Pass scaler=scaler to gradcomp.horovod.Compression" in said[0]
        assert said[0].startswith("test_loss_scaling.py: ")  # the line that calls the scaler's step()
    assert ranks.launch(unknown, 2, door, True) == [[], []]


def refusal() -> str:
    hvd.init()
    try:
        doors.sgd(doors.OWN, torch.nn.Linear(2, 2), "topk", scaler=65536.0)
    except TypeError as error:
        return str(error)
    return ""


def test_a_number_for_the_scaler_gets_a_sentence() -> None:
    assert ranks.launch(refusal, 1) == [
        "scaler= is a float, whose scale cannot be read; pass the training's torch.amp.GradScaler"
    ]
