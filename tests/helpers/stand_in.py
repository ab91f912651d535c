"""A GPU that is none: tensors in main memory that say they are on one, and the emulator's kernels. It notes waits and sums.

It knows only the calls of torch by which a step waited once, or may. tests/test_cuda.py asks torch on a GPU, which CI has not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradcomp.native import extension

GPU = torch.device("cuda", 0)
# Calls that wait for the GPU: they read a tensor on the host, or their result is as long as the values say.
WAITS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "cpu", "equal", "allclose")
WAITS += ("nonzero", "argwhere", "masked_select", "unique", "bincount")
# Calls that add floats by atomics on a GPU: in any order, and with 0 in place of subnormal numbers.
ADDS = ("index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_")


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = GPU  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]


class StandIn(TorchFunctionMode):
    """A mode in which device="cuda" makes tensors that say they are there.

    waits, sums: noted calls. calls: counts those of torch.cuda, and copies to main memory. is_capturing: a graph is captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.sums: list[str] = []
        self.calls: Counter[str] = Counter()
        self.is_capturing = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, named = func.__name__, dict(kwargs or {})
        from_gpu = any(isinstance(each, OnGpu) for each in _tensors((args, named)))
        target = named.get("device")
        if name == "to" and isinstance(args[1], str | torch.device):
            target, args = args[1], (args[0], torch.device("cpu"), *args[2:])
        elif name == "cpu":
            target = name
        elif target is not None:
            named["device"] = torch.device("cpu")
        self.calls["pinned memory"] += named.pop("pin_memory", False)
        to_gpu = from_gpu if target is None else torch.device(target).type == "cuda"
        if from_gpu:
            self._note(name, args, named)
        if name in ("to", "tensor", "as_tensor") and from_gpu != to_gpu and not named.get("non_blocking"):
            self.waits.append(f"{name} between CPU and GPU")
        result = func(*args, **named)
        if from_gpu and _sums_floats(name, args, named):
            self.sums.append(name)
            _flush(result, args)
        if target is None or not isinstance(result, Tensor):
            return result
        return result.as_subclass(OnGpu if to_gpu else Tensor)

    def _note(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (
            name in WAITS
            or (name == "where" and len(args) == 1)
            or (name == "repeat_interleave" and "output_size" not in named)
        ):
            self.waits.append(name)
        if name == "copy_" and type(args[0]) is not type(args[1]):
            self.calls["copy"] += 1
            if not named.get("non_blocking"):
                self.waits.append("copy_ between CPU and GPU")
        if name in ("__getitem__", "__setitem__"):
            indices = list(_tensors(args[1]))
            masks = any(each.dtype == torch.bool for each in indices)
            elsewhere = any(not isinstance(each, OnGpu) or each.dim() == 0 for each in indices)
            number = name == "__setitem__" and indices and not isinstance(args[2], Tensor)  # it travels there as a tensor
            if masks or elsewhere or number:
                self.waits.append(name)


class Kernels:
    """The emulator's kernels. They get the tensors as what they are."""

    def __init__(self, emulator: Any):
        self._emulator = emulator

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._emulator, name)
        if not callable(found) or name.endswith("_scratch"):
            return found
        return lambda *arguments, stream, threads: found(*_plain(arguments), stream=0, threads=threads)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.as_subclass(Tensor) if isinstance(value, OnGpu) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for each in value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ():
        yield from _tensors(each)


def _sums_floats(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return (
        name in ADDS and args[0].is_floating_point() and ("put" not in name or named.get("accumulate") or args[3:] == (True,))
    )


def _flush(result: Tensor, args: tuple[Any, ...]) -> None:
    """Make 0 of the subnormal numbers among the entries that were added to."""
    flat, added_to = _plain(result).view(-1), next(_plain(each) for each in _tensors(args[1:]) if not each.is_floating_point())
    flat[added_to] = torch.where(flat[added_to].abs() < torch.finfo(torch.float32).tiny, 0.0, flat[added_to])


@contextlib.contextmanager
def stand_in(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Stand in for a GPU."""
    mode = StandIn()

    def noted(name: str, answer: Callable[[], Any] = lambda: None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            mode.calls[name] += 1
            return answer()

        return call

    stream = SimpleNamespace(cuda_stream=7, wait_stream=noted("wait_stream"))
    event = SimpleNamespace(record=noted("record"), synchronize=noted("synchronize"))
    with monkeypatch.context() as patch, mode:
        patch.setattr(extension, "native", Kernels(emulator))
        patch.setattr(extension, "current_stream", lambda index: [stream.cuda_stream][index])  # as torch's, it takes no None
        patch.setattr(torch.cuda, "current_device", lambda: GPU.index)
        patch.setattr(torch.cuda, "current_stream", noted("current_stream", lambda: stream))
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "Event", noted("Event", lambda: event))
        patch.setattr(torch.cuda, "is_current_stream_capturing", noted("is_capturing", lambda: mode.is_capturing))
        yield mode
