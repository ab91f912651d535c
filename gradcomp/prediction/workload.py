"""The work of a training: the shapes of its parameters, and the times of a step without any exchange."""

from __future__ import annotations

import importlib
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
from gradcomp.prediction.measure import device_wait
from gradcomp.prediction.timeline import Work

Shapes = dict[str, tuple[int, ...]]

# The types of gradients by layer; float32 where a layer is missing.
Types = Mapping[str, torch.dtype]

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


def types_of(model: object) -> Types:
    """Return the types of the parameters that are trained; none for shapes."""
    return {name: p.dtype for name, p in model.named_parameters() if p.requires_grad} if isinstance(model, nn.Module) else {}


def device_of(model: object) -> torch.device:
    """Return the device of a model's parameters; the CPU for shapes, and for a model without memory."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if first is None or first.is_meta else first.device


def device_named(device: str | torch.device) -> torch.device:
    """Check that gradients can lie on a device: the CPU, or a GPU that is here."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {str(device)!r} is unknown; write cpu, cuda or cuda:0") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} has no kernels of gradcomp; write cpu, cuda or cuda:0")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r} is not here; torch sees {torch.cuda.device_count()} GPUs")
    return found


def check_times(**seconds: float) -> None:
    """Check that times are finite and not negative, and that there is something to compute."""
    for name, each in seconds.items():
        if not (isinstance(each, (int, float)) and 0 <= each < math.inf):
            raise ValueError(f"{name}={each!r} must be a time in seconds")
    if not any(seconds.values()):
        raise ValueError(
            "forward=0 and backward=0: with nothing to compute there is nothing to compare with; give a microsecond"
        )


def given(shapes: Shapes, forward: float, backward: float, optimizer: float) -> Work:
    """Make the work of a step whose times are known. Backward takes as long for each layer as the layer is large."""
    total, behind, ready = sum(map(_size, shapes.values())), 0, {}
    for name in reversed(list(shapes)):
        behind += _size(shapes[name])
        ready[name] = behind / total
    return Work(forward, backward, ready, optimizer)


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def measured(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None) -> Work:
    """Measure a model's steps here. loss: computes the loss of a batch."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next(iter(parameters.values())).device
    wait, hooks = device_wait(device), []
    at: dict[str, float] = {}
    for name, parameter in parameters.items():
        hooks.append(
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: at.__setitem__(name, time.perf_counter()))
        )
    steps: list[tuple[list[float], dict[str, float]]] = []
    try:
        for _ in range(WARM_UP + COUNTED):
            model.zero_grad(set_to_none=True)
            wait()
            began = time.perf_counter()
            found = loss()
            wait()
            turned = time.perf_counter()
            found.backward()
            wait()
            done = time.perf_counter()
            if optimizer is not None:
                optimizer.step()
                wait()
            backward = done - turned
            shares = {name: min(1.0, (when - turned) / backward) for name, when in at.items()}
            steps.append(([turned - began, backward, time.perf_counter() - done], shares))
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    counted = steps[WARM_UP:]
    forward, backward, stepping = (statistics.fmean(times[i] for times, _ in counted) for i in range(3))
    if missing := parameters.keys() - counted[0][1].keys():
        raise ValueError(
            f"loss() gave no gradient to {min(missing)!r}; freeze layers that are not trained, or compute the whole loss"
        )
    ready = {name: statistics.median(shares[name] for _, shares in counted) for name in parameters}
    return Work(forward, backward, ready, stepping if optimizer is not None else 0.0)


def load(text: str) -> nn.Module | Shapes:
    """Read a JSON file of {name: shape}, or make the model, without memory, that package.module:function returns."""
    if text.endswith(".json"):
        try:
            content: Any = json.loads(Path(text).read_text())
            return shapes_of({str(name): list(shape) for name, shape in content.items()})
        except (OSError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f'{text} holds no shapes ({error}); write {{"name": [rows, columns], ...}} into it') from None
    module, colon, function = text.partition(":")
    if not colon:
        raise ValueError(
            f"model {text!r} is neither a .json file nor package.module:function, like torchvision.models:resnet50"
        )
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {text!r} is not found here ({error}); is its package installed?") from None
    try:
        with torch.device("meta"):
            made = make()
    except TypeError as error:
        raise ValueError(f"{text} cannot be called without arguments ({error}); name a function that can") from None
    if not isinstance(made, nn.Module):
        raise ValueError(f"{text} returns a {type(made).__name__}; name a function that returns the model")
    return made
