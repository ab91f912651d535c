"""Gradients that overflow on one of two ranks, where updates are exchanged: all leave the step out, as under DDP alone."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from doors import DDP, Training
from torch import Tensor, nn

pytestmark = pytest.mark.slow

EXACT = "topk:ratio=1,wire=exact"
# A fused optimizer steps in every step, by nothing where gradients overflow. A momentum in the residual would go on then.
FUSED = f"{EXACT},momentum=0"
SPECS = ("topk:ratio=0.05", "sign", "sdagc:lam=2", "orq", "gs_sgd:ratio=0.05")


def overflows(spec: str | None, fused: bool = False) -> dict[str, Any]:
    """Let gradients overflow on one rank at a time, under a scaler."""
    model = small_net.net()
    inner = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, fused=fused)
    run, scaler = Training(DDP, model, spec, inner=inner, bucket_mb=0.02), torch.amp.GradScaler("cpu", 64.0, growth_interval=2)
    scales, moved = list[float](), list[bool]()
    for step in range(10):
        run.optimizer.zero_grad()
        before, (x, y) = run.weights, next(run.data)
        loss = nn.functional.cross_entropy(run.whole(x), y)
        scaler.scale(loss * (float("inf") if (step, dist.get_rank()) in ((2, 0), (5, 1), (6, 1)) else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, run.weights))
    return {"scales": scales, "moved": moved, "weights": run.weights}


def guarded() -> tuple[list[bool], Tensor]:
    """Leave out steps by a guard of this rank's own gradients: what is not finite on one rank is so on all."""
    model = small_net.net()
    run, stepped = Training(DDP, model, "topk:ratio=0.05", inner=torch.optim.AdamW(model.parameters(), 0.003)), list[bool]()
    for step in range(6):
        run.optimizer.zero_grad()
        x, y = next(run.data)
        (nn.functional.cross_entropy(run.whole(x), y) * (float("nan") if (step, dist.get_rank()) == (3, 1) else 1.0)).backward()
        stepped.append(all(bool(each.grad.isfinite().all()) for each in run.model.parameters()))
        if stepped[-1]:
            run.optimizer.step()
    return stepped, run.weights


def program() -> dict[str, Any]:
    ranks.join()
    return {
        "overflows": {spec: overflows(spec) for spec in (None, EXACT, *SPECS)},
        "fused": [overflows(None, fused=True), overflows(FUSED, fused=True)],
        "guarded": guarded(),
    }


outcomes = ranks.once(lambda: ranks.launch(program, 2))


@pytest.mark.parametrize("spec", [EXACT, *SPECS])
def test_a_scaler_skips_a_step_on_all_ranks_where_one_overflows(spec: str) -> None:
    first, second = (own["overflows"] for own in outcomes())
    wanted = first[None]
    for own in (first, second):
        assert own[spec]["scales"] == wanted["scales"] and own[spec]["moved"] == wanted["moved"]
        assert wanted["moved"] == [step not in (2, 5, 6) for step in range(10)]
        assert own[spec]["weights"].isfinite().all()
    assert torch.equal(first[spec]["weights"], second[spec]["weights"])
    if spec == EXACT:
        torch.testing.assert_close(first[spec]["weights"], wanted["weights"], rtol=1e-4, atol=1e-5)


def test_a_fused_optimizer_skips_it_too() -> None:
    for own in outcomes():
        wanted, ours = own["fused"]
        assert ours["scales"] == wanted["scales"] and ours["moved"] == wanted["moved"]
        torch.testing.assert_close(ours["weights"], wanted["weights"], rtol=1e-4, atol=1e-5)


def test_a_guard_against_gradients_that_are_not_finite_decides_alike_on_all_ranks() -> None:
    first, second = (own["guarded"] for own in outcomes())
    assert first[0] == second[0] == [step != 3 for step in range(6)]
    assert torch.equal(first[1], second[1])
