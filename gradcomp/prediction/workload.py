"""The work of a training: the shapes of its parameters, and the times of a step without any exchange."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.engine.plan import MOST_ENTRIES
from gradcomp.prediction.link import Work
from gradcomp.prediction.recording_network import wait

Shapes = dict[str, tuple[int, ...]]

# Steps before those that count, and steps that count.
WARM_UP, COUNTED = 2, 8


def shapes_of(model: nn.Module | Mapping[str, Sequence[int]]) -> Shapes:
    """Return the shapes of the parameters that are trained."""
    if isinstance(model, nn.Module):
        found = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    else:
        found = {name: tuple(shape) for name, shape in model.items()}
        for name, shape in found.items():
            if not all(hasattr(size, "__index__") and not isinstance(size, bool) and size >= 0 for size in shape):
                raise ValueError(f"the shape {list(shape)} of {name!r} must be whole numbers that are not negative")
            if math.prod(shape) > MOST_ENTRIES:
                raise ValueError(f"{name!r} has {math.prod(shape)} entries, but a layer must have fewer than 2^31; divide it")
    if not any(torch.Size(shape).numel() for shape in found.values()):
        raise ValueError("the model has no parameter to train; pass the model, or {name: shape}")
    return found


def device_for(model: object, device: str | torch.device | None = None) -> torch.device:
    """Return the device that is named; or the model's, which is the CPU for shapes, and for a model without memory."""
    if device is None:
        first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        return torch.device("cpu") if first is None or first.is_meta else first.device
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError):  # AssertionError: torch without CUDA
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not here or has no kernels of gradcomp; write cpu, cuda or cuda:0")
    return found


def work_of(
    model: nn.Module | Mapping[str, Sequence[int]],
    shapes: Shapes,
    forward: float | None,
    backward: float | None,
    optimizer: torch.optim.Optimizer | float,
    loss: Callable[[], Tensor] | None,
) -> Work:
    """Return the computing of a step, given or measured. Given, backward takes as long for each layer as the layer is large."""
    if loss is not None:
        own = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        if forward is not None or backward is not None or (own is None and optimizer):
            raise ValueError(
                "with loss=, all times are measured: leave forward= and backward= out, and pass the optimizer itself"
            )
        if not isinstance(model, nn.Module):
            raise TypeError("loss= trains the model for some steps; pass the model, not its shapes")
        return measured(model, loss, own)
    if forward is None or backward is None:
        raise ValueError("pass forward= and backward= in seconds, or loss=, with which they are measured here")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("the step of optimizer= is measured with loss= only; with forward= and backward=, pass its seconds")
    for name, each in (("forward", forward), ("backward", backward), ("optimizer", optimizer)):
        if not (isinstance(each, (int, float)) and 0 <= each < math.inf):
            raise ValueError(f"{name}={each!r} must be a time in seconds")
    if not (forward or backward or optimizer):
        raise ValueError(
            "forward=0 and backward=0: with nothing to compute there is nothing to compare with; give a microsecond"
        )
    behind = list(itertools.accumulate(math.prod(shape) for shape in reversed(shapes.values())))
    return Work(
        forward, backward, {name: part / behind[-1] for name, part in zip(reversed(shapes), behind, strict=True)}, optimizer
    )


def measured(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None) -> Work:
    """Measure a model's steps here. loss: computes the loss of a batch."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(parameters.values())).device
    at: dict[str, float] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: at.__setitem__(name, time.perf_counter()))
        for name, parameter in parameters.items()
    ]
    times, shares = list[tuple[float, float, float]](), list[dict[str, float]]()

    def now() -> float:
        wait(device)
        return time.perf_counter()

    try:
        for _ in range(WARM_UP + COUNTED):
            model.zero_grad(set_to_none=True)
            began = now()
            found = loss()
            turned = now()
            found.backward()
            done = now()
            if optimizer is not None:
                optimizer.step()
            times.append((turned - began, done - turned, now() - done if optimizer is not None else 0.0))
            shares.append({name: min(1.0, (when - turned) / (done - turned)) for name, when in at.items()})
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    if missing := parameters.keys() - at.keys():
        raise ValueError(
            f"loss() gave no gradient to {min(missing)!r}; freeze layers that are not trained, or compute the whole loss"
        )
    forward, backward, stepping = (statistics.fmean(found) for found in zip(*times[WARM_UP:], strict=True))
    ready = {name: statistics.median(each[name] for each in shares[WARM_UP:]) for name in parameters}
    return Work(forward, backward, ready, stepping)


def load(text: str) -> nn.Module | Shapes:
    """Read a JSON file of {name: shape}, or make the model, without memory, that package.module:function returns."""
    if text.endswith(".json"):
        try:
            content: Any = json.loads(Path(text).read_text())
            return shapes_of({str(name): list(shape) for name, shape in content.items()})
        except (OSError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f'{text} holds no shapes ({error}); write {{"name": [rows, columns], ...}} into it') from None
    module, _, function = text.partition(":")
    try:
        with torch.device("meta"):
            made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"model {text!r} is neither a .json file nor a function here that needs no arguments ({error}); write for example "
            "torchvision.models:resnet50"
        ) from None
    if not isinstance(made, nn.Module):
        raise ValueError(f"{text} returns a {type(made).__name__}; name a function that returns the model")
    return made
