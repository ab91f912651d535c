"""What is kept between steps, and the ways of calling the optimizer that Horovod's users know."""

from __future__ import annotations

import io
import itertools
from typing import Any

import horovod.torch as hvd
import ranks
import torch
import training
from torch import Tensor, nn

hvd.init()
SPARSE = "topk:ratio=0.05"
MOMENTUM = "topk:ratio=0.05,momentum=0.9"
EXACT = "topk:ratio=1,wire=exact"
found: dict[Any, Any] = {}
count = itertools.count()


def optimizer(route: str, model: nn.Module, spec: str = SPARSE, **options: Any) -> Any:
    return training.sgd(route, model, spec, **({"bucket_mb": 0.015, "prefix": f"{next(count)}."} | options))


def passed_on(state: Any) -> Any:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def resumed(route: str, spec: str) -> tuple[Tensor, Tensor]:
    whole = training.net()
    expected = training.train(whole, optimizer(route, whole, spec), training.batches(), 20)
    first, data = training.net(), training.batches()
    own = optimizer(route, first, spec, prefix="saved.")
    training.train(first, own, data, 10)
    saved = passed_on((first.state_dict(), own.state_dict(), own.compression.state_dict()))
    second = training.net(seed=2)
    again = optimizer(route, second, spec, prefix="saved.")
    for part, state in zip((second, again, again.compression), saved, strict=True):
        part.load_state_dict(state)
    return expected, training.train(second, again, data, 10)


def stock_state(route: str) -> dict[str, Any]:
    """The optimizer's own state_dict, before and after Horovod broadcasts it."""
    model = training.net()
    own = optimizer(route, model, momentum=0.9)
    training.train(model, own, training.batches(), 3)
    residual = own.compression.state_dict()["rank"]["residual"]
    before = own.state_dict()
    plain = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    hvd.broadcast_optimizer_state(own, 0)
    kept = own.compression.state_dict()["rank"]["residual"]
    return {
        "keys": {key for entry in before["state"].values() for key in entry},
        "groups": [sorted(group) for group in before["param_groups"]],
        "plain groups": [sorted(group) for group in plain.state_dict()["param_groups"]],
        "buffers": [entry["momentum_buffer"] for entry in own.state_dict()["state"].values()],
        "residual kept": all(torch.equal(kept[name], residual[name]) for name in residual),
        "residual": torch.cat(list(residual.values())),
        "weights": training.train(model, own, training.batches(1), 3),
        "stats": own.compression.stats(),
    }


def fresh_broadcast(route: str) -> Tensor:
    """As scripts do at the start: broadcast parameters and a state that is not there yet."""
    model = training.net(seed=5 + hvd.rank())
    own = optimizer(route, model, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(own, 0)
    return training.train(model, own, training.batches(), 3)


def adversaries(route: str, spec: str) -> Tensor:
    """Two optimizers in turn; in the second one's steps the first one's layers only pass gradients on."""
    judge, maker = training.net(3), training.net(4)
    judging, making = optimizer(route, judge, spec), optimizer(route, maker, spec)
    data = training.batches()
    for _ in range(8):
        x, y = next(data)
        judging.zero_grad()
        training.backward(judge, (torch.cat([x[:, :10], maker(x).detach()], 1), y))
        judging.step()
        making.zero_grad()
        judge.requires_grad_(False)
        training.backward(judge, (torch.cat([x[:, :10], maker(x)], 1), y))
        judge.requires_grad_(True)
        making.step()
    return torch.cat([training.weights(judge), training.weights(maker)])


def together(route: str, spec: str, left_out: int = 0) -> Tensor:
    """Two optimizers of one model, in one backward; in one step one rank leaves out all layers of the second."""
    model = training.net()
    of_part = [(name, p) for name, p in training.named(model) if name.startswith("part")]
    of_rest = [(name, p) for name, p in training.named(model) if not name.startswith("part")]
    number = next(count)
    both = [
        training.wrapped(
            route, torch.optim.SGD([p for _, p in layers], 0.02), [(f"{number}.{name}", p) for name, p in layers], spec
        )
        for layers in (of_rest, of_part)
    ]
    data = training.batches()
    for turn in range(6):
        for own in both:
            own.zero_grad()
        training.backward(model, next(data), skip=turn == left_out and hvd.rank() == 1)
        for own in both:
            own.step()
    return training.weights(model)


def together_later(route: str, spec: str) -> Tensor:
    return together(route, spec, left_out=2)


def clipped(route: str, spec: str) -> Tensor:
    model, data = training.net(), training.batches()
    own = optimizer(route, model, spec)
    for _ in range(8):
        own.zero_grad()
        training.backward(model, next(data))
        own.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with own.skip_synchronize():
            own.step()
    return training.weights(model)


def with_closure(route: str, spec: str) -> Tensor:
    """LBFGS asks for the gradient as often as it likes, on all ranks alike since all see the same."""
    model, data = training.net(width=20), training.batches()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    own = training.wrapped(route, lbfgs, training.named(model, f"{next(count)}."), spec)
    for _ in range(3):
        batch = next(data)

        def closure(batch: Any = batch) -> Tensor:
            own.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            own.synchronize()
            return hvd.allreduce(loss.detach(), name="loss")

        with own.skip_synchronize():
            own.step(closure)
    return training.weights(model)


def zeroed(route: str, spec: str) -> Tensor:
    """Gradients set to None, gradients set to zero, and in turn."""
    model, data = training.net(), training.batches()
    own = optimizer(route, model, spec)
    for turn in range(9):
        (own.zero_grad, model.zero_grad, lambda: model.zero_grad(set_to_none=False))[turn % 3]()
        training.backward(model, next(data), skip=turn in (4, 5))
        own.step()
    return training.weights(model)


def scaled(route: str, spec: str) -> Tensor:
    """A GradScaler in the order Horovod's documentation gives; no gradient overflows."""
    model, data = training.net(), training.batches()
    own = optimizer(route, model, spec)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(8):
        own.zero_grad()
        x, y = next(data)
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        own.synchronize()
        scaler.unscale_(own)
        with own.skip_synchronize():
            scaler.step(own)
        scaler.update()
    return training.weights(model)


def overflow(route: str, spec: str, value: float) -> dict[str, Any]:
    """In the fourth step one entry of one gradient on rank 1 is not finite; the step is skipped, as a GradScaler does."""
    model, data = training.net(), training.batches()
    own = optimizer(route, model, spec)
    training.train(model, own, data, 3)
    spoiled = model.last.weight.register_hook(lambda g: g.index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(value)))
    if hvd.rank() != 1:
        spoiled.remove()
    own.zero_grad()
    training.backward(model, next(data))
    own.synchronize()
    spoiled.remove()
    finite = {name: bool(p.grad.isfinite().all()) for name, p in model.named_parameters() if p.grad is not None}
    state = own.compression.state_dict()["rank"]
    own._synchronized = False  # what an optimizer.step() that the scaler left out would have done
    kept = [*state["residual"].values(), *state["velocity"].values()]
    return {
        "finite": finite,
        "kept finite": all(bool(part.isfinite().all()) for part in kept),
        "weights": training.train(model, own, data, 3),
    }


for route in training.ROUTES:
    for spec in (SPARSE, MOMENTUM, "dense"):
        found["resumed", route, spec] = resumed(route, spec)
    found["state", route] = stock_state(route)
    found["fresh", route] = fresh_broadcast(route)
    for spec in (SPARSE, MOMENTUM, "dense"):
        for value in (float("inf"), float("nan")):
            found["overflow", route, spec, str(value)] = overflow(route, spec, value)
for name, way in {
    "adversaries": adversaries,
    "together": together,  # not along route A: there the ranks compare in the first backward, and in the same order
    "together later": together_later,
    "clipped": clipped,
    "closure": with_closure,
    "zeroed": zeroed,
    "scaled": scaled,
}.items():
    found[name, training.STOCK] = way(training.STOCK, "")
    for route in training.ROUTES:
        for spec in (EXACT, SPARSE):
            if (name, route) != ("together", training.COMPRESSION):
                found[name, route, spec] = way(route, spec)
ranks.report(found)
hvd.barrier()
