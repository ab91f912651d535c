"""Loss scaling under DDP: whatever the scale does, what is applied and what waits are all gradients."""

from __future__ import annotations

import warnings
from typing import Any

import choices
import known_gradients
import pytest
import ranks
import torch
import torch.distributed as dist
from known_gradients import BUCKET_MB, Model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.slow

SPECS = ["topk:ratio=0.01", "sdagc:lam=2", "orq:sigmas=2.5,feedback=true"]
# Nothing waits with these, and a skipped step is lost, as in DDP alone.
WITHOUT_FEEDBACK = ["dense", "topk:ratio=1,wire=exact,feedback=false"]
# What auto takes.
CHOSEN = {"growth": ("stock", "topk"), "back growth": ("topk", "stock"), "overflow": ("topk",)}
every_type = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def scaled(spec: str, interval: int, overflows: bool) -> dict[str, Any]:
    model, scaling = Model(dist.get_rank()), known_gradients.scaler(interval)
    whole = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    handle = gradcomp.ddp.attach(whole, spec, optimizer=optimizer, scaler=scaling, bucket_mb=BUCKET_MB)

    def update() -> None:
        scaling.step(optimizer)
        scaling.update()

    known_gradients.train(model, whole, scaling, overflows, update)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"weights": weights, "residual": handle.residual(), "scale": scaling.get_scale()}


def all_specs() -> dict[str, Any]:
    ranks.join()
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for spec in SPECS:
            found[f"{spec} growth"] = scaled(spec, 20, False)
            found[f"{spec} overflow"] = scaled(spec, 1000, True)
        for spec in WITHOUT_FEEDBACK:
            found[f"{spec} growth"] = scaled(spec, 20, False)
        for name, chosen in CHOSEN.items():
            with choices.chosen(*chosen):
                found[name] = scaled("auto:loss=high", 20 if name.endswith("growth") else 1000, name.endswith("overflow"))
    found["said"] = [str(each.message) for each in said if "GradScaler" in str(each.message)]
    return found


outcomes = ranks.once(lambda: ranks.launch(all_specs, 2))


@pytest.mark.parametrize("spec", [*SPECS, *WITHOUT_FEEDBACK])
def test_a_scale_that_grows_changes_nothing(spec: str) -> None:
    found = [own[f"{spec} growth"] for own in outcomes()]
    assert found[0]["scale"] == 2.0**19
    known_gradients.check(found, False)


@pytest.mark.parametrize("spec", SPECS)
def test_a_skipped_step_waits_whole(spec: str) -> None:
    found = [own[f"{spec} overflow"] for own in outcomes()]
    assert found[0]["scale"] == 2.0**15
    known_gradients.check(found, True)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_choice_of_auto_changes_nothing(name: str) -> None:
    """It goes to and fro while the scale grows; or has taken topk when a step is skipped."""
    known_gradients.check([own[name] for own in outcomes()], name == "overflow")


def test_a_scaler_that_is_known_is_not_warned_about() -> None:
    assert all(own["said"] == [] for own in outcomes())


def unknown(spec: str, momentum: float = 0.0) -> list[str]:
    ranks.join()
    model, scaling = Model(dist.get_rank()), known_gradients.scaler(20)
    whole = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum)
    gradcomp.ddp.attach(whole, spec, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(3):
            model.zero_grad()
            scaling.scale(whole(step)).backward()
            scaling.step(optimizer)
            scaling.update()
    return [str(each.message) for each in said if "GradScaler" in str(each.message)]


def test_a_scaler_that_is_not_known_is_met_once_where_entries_wait() -> None:
    for said in ranks.launch(unknown, 2, "topk:ratio=0.01"):
        assert len(said) == 1 and "Pass scaler=scaler to" in said[0] and "gradcomp.ddp.attach" in said[0]
    assert ranks.launch(unknown, 2, "orq") == [[], []]
    for said in ranks.launch(unknown, 2, "orq", 0.9):  # rounded is the velocity, which stays
        assert sum("does not know its scale" in each for each in said) == 1


def in_16_bits(dtype: torch.dtype) -> dict[str, Any]:
    """Sum the updates that a model in 16 bits is given, in float64: the weights themselves are too coarse."""
    ranks.join()
    plain, scaling = nn.Linear(40, 30).to(dtype), torch.amp.GradScaler("cpu", init_scale=8.0)
    whole = DistributedDataParallel(plain)
    handle = gradcomp.ddp.attach(whole, "topk:ratio=0.02", scaler=scaling)
    given = torch.zeros(30, 40, dtype=torch.float64)
    sums = torch.zeros(30, 40, dtype=torch.float64)
    for step in range(40):
        whole.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).to(dtype)
        # The gradient of a sum of outputs: x summed over the batch, the same for each output.
        scaling.scale(whole(x).sum()).backward()
        mine = torch.autograd.grad(nn.functional.linear(x, plain.weight).sum(), plain.weight)[0].double()
        assert plain.weight.grad is not None
        given += plain.weight.grad.double() / 8
        sums += mine
    return {"given": given, "sums": sums, "waits": handle.residual()["weight"].double()}


@every_type
def test_rounding_to_16_bits_loses_nothing(dtype: torch.dtype) -> None:
    found = ranks.launch(in_16_bits, 2, dtype)
    for own in found:
        waits = torch.stack([each["waits"] for each in found]).mean(0)
        sums = torch.stack([each["sums"] for each in found]).mean(0)
        torch.testing.assert_close(own["given"] + waits, sums, rtol=1e-5, atol=1e-4)
