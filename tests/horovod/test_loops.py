"""Training loops under Horovod: clips, scalers, hooks, ops and accumulation, wherever they stand before step()."""

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

STEPS, LIMIT, SCALE = 5, 0.5, 1024.0
WHOLE = "topk:ratio=1,wire=exact"
both_doors = pytest.mark.parametrize("door", DOORS)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def at_once(run: Training, scaler: Any) -> None:
    """Clip before Horovod has waited: an exchange of updates leaves gradients alone."""
    clip(run.model)
    run.optimizer.step()


def replaced(run: Training, scaler: Any) -> None:
    clip(run.model)
    for parameter in run.model.parameters():
        parameter.grad = parameter.grad.clone()
    run.optimizer.step()


def waited(run: Training, scaler: Any) -> None:
    run.optimizer.synchronize()
    clip(run.model)
    with run.optimizer.skip_synchronize():
        run.optimizer.step()


def scaled(run: Training, scaler: Any) -> None:
    """Do as Horovod's documentation says."""
    run.optimizer.synchronize()
    scaler.unscale_(run.optimizer)
    clip(run.model)
    with run.optimizer.skip_synchronize():
        scaler.step(run.optimizer)
    scaler.update()


HABITS: dict[str, Callable[..., None]] = {each.__name__: each for each in (at_once, replaced, waited, scaled)}


def train(door: str, habit: Callable[..., None], spec: str, **options: Any) -> Tensor:
    run, scaler = Training(door, spec=spec, **options), torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=habit is scaled)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        x, y = next(run.data)
        scaler.scale(functional.cross_entropy(run.model(x), y)).backward()
        habit(run, scaler)
    return run.weights


def expected() -> Tensor:
    """Train in one process: each rank's gradient is clipped, and the mean is SGD's."""
    model, data = small_net.net(), [small_net.examples(rank) for rank in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    for _ in range(STEPS):
        of_rank = []
        for own in data:
            model.zero_grad()
            small_net.backward(model, next(own))
            clip(model)
            of_rank.append([each.grad for each in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *of_rank, strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        optimizer.step()
    return small_net.weights(model)


def overflowing(door: str, spec: str, scales: bool) -> dict[str, Any]:
    """Give rank 1 alone a gradient that is not finite."""
    run, scaler = Training(door, spec=spec, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scales)
    for step in range(4):
        run.optimizer.zero_grad()
        x, y = next(run.data)
        loss = functional.cross_entropy(run.model(x), y)
        scaler.scale(loss * (float("inf") if step == 2 and hvd.rank() else 1.0)).backward()
        if scales:
            run.apply(scaler)
        else:
            run.optimizer.step()
    return {
        "weights": run.weights,
        "scale": scaler.get_scale(),
        "residual": torch.cat([*map(torch.flatten, run.residual().values())]),
    }


def hooked(door: str) -> Tensor:
    """Train with a tenth of the odd columns' gradients, by a hook."""
    run = Training(door, spec=WHOLE, momentum=0.9)
    for each in run.model.parameters():
        each.register_hook(lambda grad: grad * (torch.arange(grad.shape[-1]) % 2 * -0.9 + 1))
    return run.train(4)


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


def removing(door: str) -> tuple[Tensor, list[str]]:
    """Remove a layer's gradient before the step. Return the weights, and the warnings."""
    run = Training(door, spec="topk:ratio=0.05", momentum=0.9)
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
    return run.weights, [str(each.message) for each in seen]


def adding(door: str, spec: str | None, passes: int = 1, **options: Any) -> Tensor:
    run = Training(door, spec=spec, backward_passes_per_step=passes, momentum=0.9, lr=0.01, **options)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        for _ in range(passes):
            run.backward()
        run.optimizer.step()
    return run.weights


def refusals(door: str) -> dict[str, str]:
    def adam() -> None:
        model = small_net.net()
        Training(door, model, "topk", inner=torch.optim.AdamW(model.parameters()), op=hvd.Sum).train(1)

    found = {"Adam": small_net.refused(adam)}
    for op in ("Min", "Adasum"):
        found[op] = small_net.refused(lambda op=op: Training(door, spec="topk", op=getattr(hvd, op)).train(1))  # type: ignore[misc]
        hvd.barrier()
    return found


def program() -> dict[Any, Any]:
    hvd.init()
    found: dict[Any, Any] = {("dense", door): train(door, scaled, "dense") for door in (ALONE, *DOORS)}
    found |= {(name, door): train(door, habit, WHOLE, momentum=0.9) for door in DOORS for name, habit in HABITS.items()}
    found["expected"] = expected()
    found |= {("hooked", door): hooked(door) for door in (ALONE, *DOORS)}
    for door in DOORS:
        for scales in (True, False):
            found |= {
                ("overflow", door, spec, scales): overflowing(door, spec, scales) for spec in ("topk:ratio=0.05", "blocks")
            }
        found["removed", door] = removing(door)
        found["refused", door] = refusals(door)
    for door in (ALONE, *DOORS):
        spec = None if door == ALONE else WHOLE
        found["sum", door], found["passes", door] = adding(door, spec, op=hvd.Sum), adding(door, spec, passes=3)
        found["both", door] = adding(door, spec, passes=2, op=hvd.Sum)
    hvd.barrier()
    ranks.start_anew()
    return found | {("cut short", door): cut_short(door) for door in DOORS}


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2, anew=3)


@both_doors
@pytest.mark.parametrize("name", HABITS)
def test_a_clip_acts_on_each_ranks_own_gradient_wherever_it_stands(name: str, door: str) -> None:
    for own in found():
        torch.testing.assert_close(own[name, door], own["expected"], rtol=1e-4, atol=1e-6)


@both_doors
def test_horovods_own_lines_train_as_horovod_alone_does(door: str) -> None:
    """Rounding: Horovod's sums of two float32 gradients, and ours, divided and scaled in another order."""
    for own in found():
        torch.testing.assert_close(own["dense", door], own["dense", ALONE], rtol=1e-5, atol=1e-7)


@both_doors
@pytest.mark.parametrize("kind", ["hooked", "sum", "passes", "both"])
def test_hooks_ops_and_accumulation_train_as_horovod_alone_does(kind: str, door: str) -> None:
    for own in found():
        torch.testing.assert_close(own[kind, door], own[kind, ALONE], rtol=1e-4, atol=1e-6)


@both_doors
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "blocks"])
def test_an_overflow_of_one_rank_skips_the_step_of_all(spec: str, door: str) -> None:
    first, second = (own["overflow", door, spec, True] for own in found())
    assert torch.equal(first["weights"], second["weights"]) and first["weights"].isfinite().all()
    for own in (first, second):
        assert own["scale"] == SCALE / 2 and own["residual"].isfinite().all()


@both_doors
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "blocks"])
def test_without_a_scaler_it_reaches_the_weights_of_all(spec: str, door: str) -> None:
    for own in found():
        kept = own["overflow", door, spec, False]
        assert not kept["weights"].isfinite().all() and kept["residual"].isfinite().all()


@both_doors
def test_a_step_that_was_cut_short_is_forgotten(door: str) -> None:
    for own in found():
        assert own["cut short", door] == ["nothing was raised"] * 2


@both_doors
def test_a_gradient_that_is_removed_is_not_missed(door: str) -> None:
    (first, said), (second, _) = (own["removed", door] for own in found())
    assert torch.equal(first, second) and first.isfinite().all() and not said


@both_doors
def test_what_cannot_be_compressed_is_refused(door: str) -> None:
    for own in found():
        said = own["refused", door]
        assert said["Adam"].startswith("ValueError: op=Sum ") and '"blocks"' in said["Adam"], said
        for op in ("Min", "Adasum"):
            assert said[op].startswith(f"ValueError: op={op} ") and "use op=Average or op=Sum" in said[op], said
