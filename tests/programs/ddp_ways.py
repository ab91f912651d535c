"""The ways of using DDP that its users know, each with DDP alone, with all that was compressed there, and with less."""

from __future__ import annotations

import copy
import io
import linecache
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import model
import odd_models
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

ALONE, EXACT, SPARSE = None, "topk:ratio=1,wire=exact", "topk:ratio=0.05"
BUCKET_MB = 0.02
ranks.join()
me, size = dist.get_rank(), dist.get_world_size()
pair = dist.new_group([0, 2]) if size > 2 else None


class Run:
    """A model in DDP, with a handle where there is a spec."""

    def __init__(self, spec: str | None, plain: nn.Module | None = None, lr: float = 0.02, **options: Any):
        self.plain = model.net() if plain is None else plain
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr)
        self.whole = DistributedDataParallel(self.plain, bucket_cap_mb=BUCKET_MB, **options)
        if spec is not None:
            self.handle = gradcomp.ddp.attach(self.whole, spec, optimizer=self.optimizer, bucket_mb=BUCKET_MB)
        self.data = model.examples(me)

    def backward(self, **options: Any) -> None:
        model.backward(self.whole, next(self.data), **options)

    def train(self, steps: int, skip: Callable[[int], bool] = lambda step: False) -> Tensor:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward(**({"skip": True} if skip(step) else {}))
            self.optimizer.step()
        return self.weights

    @property
    def weights(self) -> Tensor:
        return model.weights(self.plain)


def ordinary(spec: str | None) -> Tensor:
    return Run(spec).train(10)


def views(spec: str | None) -> Tensor:
    """Gradients are views of DDP's buckets."""
    return Run(spec, gradient_as_bucket_view=True).train(10)


def static(spec: str | None) -> Tensor:
    return Run(spec, static_graph=True).train(10)


def unused_here(spec: str | None) -> Tensor:
    """A layer that one rank leaves out, now and then."""
    return Run(spec, find_unused_parameters=True).train(10, lambda step: step % 4 == 3 and me == 0)


def accumulated(spec: str | None) -> Tensor:
    """Three backward passes a step, of which the last one exchanges."""
    run = Run(spec)
    for _ in range(5):
        run.optimizer.zero_grad()
        for last in (False, False, True):
            with nullcontext() if last else run.whole.no_sync():
                run.backward()
        run.optimizer.step()
    return run.weights


def clipped(spec: str | None) -> Tensor:
    run = Run(spec)
    for _ in range(8):
        run.optimizer.zero_grad()
        run.backward()
        nn.utils.clip_grad_norm_(run.plain.parameters(), 0.1)
        run.optimizer.step()
    return run.weights


def uneven(spec: str | None) -> Tensor:
    """One rank has more batches than the others: the others' part in it is zero."""
    run = Run(spec)
    with run.whole.join():
        run.train(6 + 3 * (me == 1))
    return run.weights


def some(spec: str | None) -> Tensor:
    """In a group of two of the ranks."""
    return torch.zeros(0) if me == 1 else Run(spec, process_group=pair).train(8)


def made_of(name: str) -> Callable[[str | None], Tensor]:
    def trained(spec: str | None) -> Tensor:
        run = Run(spec, odd_models.make(name), 0.1)
        for turn in range(4):
            run.optimizer.zero_grad()
            odd_models.step(run.whole, turn, me)
            run.optimizer.step()
        return run.weights

    return trained


def waiting(name: str) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """After one pass, by parameter: what this rank has not sent, its own gradient, and the update."""
    alone, run = odd_models.make(name), Run(SPARSE, odd_models.make(name))
    odd_models.step(alone, 0, me)
    odd_models.step(run.whole, 0, me)
    local, updated, kept = dict(alone.named_parameters()), dict(run.plain.named_parameters()), run.handle.residual()
    return {n: (kept[n], local[n].grad, updated[n].grad) for n in kept}  # type: ignore[misc]


def resumed(spec: str) -> tuple[Tensor, Tensor]:
    """20 steps; and 10, saved, loaded into new objects, and 10 more."""
    whole, first = Run(spec), Run(spec)
    whole.train(20)
    first.train(10)
    file = io.BytesIO()
    torch.save((first.plain.state_dict(), first.handle.state_dict()), file)
    file.seek(0)
    second = Run(spec, model.net(seed=2))
    for part, state in zip((second.plain, second.handle), torch.load(file), strict=True):
        part.load_state_dict(state)
    second.data = first.data
    return whole.weights, second.train(10)


def changed() -> dict[str, Any]:
    run = Run("topk:ratio=0.01")
    run.train(5)
    before = run.handle.state_dict()["rank"]["residual"]
    refused = model.refused(lambda: run.handle.change("sign" if me == 1 else "dense"))
    run.handle.change("sdagc:lam=2")
    after = run.handle.state_dict()["rank"]["residual"]
    carried = all(torch.equal(before[name], after[name]) for name in before)
    return {"refused": refused, "carried": carried, "weights": run.train(5), "spec": run.handle._session.spec}


def unused_everywhere() -> tuple[Tensor, Tensor]:
    """A layer that no rank uses in a step goes on with what was left of it: what it came to, and what it would have had to."""
    run = Run("topk:ratio=0.05,wire=exact", find_unused_parameters=True)
    run.train(3)
    left = copy.deepcopy(run.handle.state_dict()["rank"]["residual"]["part.weight"])
    before = run.plain.part.weight.detach().clone()
    for step in range(4):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        run.backward(skip=True)
        run.optimizer.step()
    kept = run.handle.state_dict()["rank"]["residual"]["part.weight"].view_as(before)
    went = left.view_as(before) - kept
    dist.all_reduce(went)
    return (before - run.plain.part.weight.detach()) / 0.02, went / size


def overflow(value: float) -> dict[str, Any]:
    """In one step a gradient of rank 1 is not finite: all ranks see it, and skip the step."""
    run = Run(SPARSE)
    run.train(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = run.weights
    spoiled = run.plain.last.weight.register_hook(lambda g: g * (value if me == 1 else 1))
    run.optimizer.zero_grad()
    x, y = next(run.data)
    scaler.scale(nn.functional.cross_entropy(run.whole(x), y)).backward()
    scaler.step(run.optimizer)
    scaler.update()
    spoiled.remove()
    kept = run.handle.state_dict()["rank"]["residual"].values()
    return {
        "skipped": torch.equal(weights, run.weights),
        "kept finite": all(bool(part.isfinite().all()) for part in kept),
        "scale": scaler.get_scale(),
        "weights": run.train(3),
    }


def disagreement() -> tuple[str, Tensor]:
    """Whoever sees that it cannot be attached can attach something else."""
    run = Run(ALONE)
    refused = model.refused(lambda: gradcomp.ddp.attach(run.whole, "topk:ratio=0.1" if me == 1 else SPARSE))
    gradcomp.ddp.attach(run.whole, SPARSE)
    return refused, run.train(5)


def embedded() -> str:
    layers = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))
    run = Run(SPARSE, layers)
    return model.refused(lambda: run.whole(torch.tensor([me, 3])).sum().backward())


def without_ddp() -> str:
    return model.refused(lambda: gradcomp.ddp.attach(model.net(), SPARSE))  # type: ignore[arg-type]


def twice() -> str:
    run = Run(SPARSE)
    return model.refused(lambda: gradcomp.ddp.attach(run.whole, SPARSE))


def unknown_momentum() -> str:
    """Without the optimizer a momentum cannot be checked; with it, two are refused."""
    whole = DistributedDataParallel(model.net())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gradcomp.ddp.attach(whole, "topk:momentum=0.9")
    assert said[0].filename == __file__
    assert "gradcomp.ddp.attach(whole, " in linecache.getline(said[0].filename, said[0].lineno)
    optimizer = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    again = DistributedDataParallel(model.net())
    refused = model.refused(lambda: gradcomp.ddp.attach(again, "topk:momentum=0.9", optimizer=optimizer))
    return f"{said[0].message} {refused}"


WAYS = (ordinary, views, static, unused_here, accumulated, clipped, uneven, *((some,) if pair else ()))
found: dict[Any, Any] = {}
for name, way in {
    **{way.__name__: way for way in WAYS},
    **({} if pair else {name: made_of(name) for name in odd_models.MODELS}),
}.items():
    for spec in (ALONE, EXACT, SPARSE):
        found[name, spec] = way(spec)
for spec in (SPARSE, "topk:ratio=0.05,momentum=0.9", "lgc:dense=2,learn=4,ratio=0.02", "dense"):
    found["resumed", spec] = resumed(spec)
for name in [] if pair else odd_models.KEPT:
    found["waiting", name] = waiting(name)
for value in (float("inf"), float("nan")):
    found["overflow", str(value)] = overflow(value)
for case in (changed, unused_everywhere, disagreement, embedded, without_ddp, twice, unknown_momentum):
    found[case.__name__] = case()
ranks.report(found)
dist.destroy_process_group()
