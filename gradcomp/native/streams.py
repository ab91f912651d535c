"""Streams of a GPU: those with work on an array, which the next kernel on another stream waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The handle of a device's current stream, by the device's number. Torch for CPUs has no such function.
_handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Streams:
    """The streams of a device that have work on a bucket. A CPU has none.

    Autograd calls a hook on the stream of the layer's forward pass. The hook that fills a bucket, and step(), may have others.
    """

    def __init__(self, device: torch.device):
        self._device, self._has_streams = device, device.type == "cuda"
        self._busy: dict[int, Any] = {}

    def note(self) -> None:
        """Note that the current stream has work on the bucket: it made a gradient."""
        if not self._has_streams:
            return
        handle = _handle_of_current(self._device)
        if handle not in self._busy:
            self._busy[handle] = torch.cuda.current_stream(self._device)

    def join(self) -> None:
        """Make the current stream wait for the others. It alone then has work on the bucket."""
        if not self._has_streams:
            return
        current = torch.cuda.current_stream(self._device)
        for stream in self._busy.values():
            follow(current, stream)
        self._busy = {current.cuda_stream: current}

    def clear(self) -> None:
        """Forget the streams after the bucket's step. Autograd, and whoever calls step(), order all that follows."""
        self._busy.clear()


def _handle_of_current(device: torch.device) -> int:
    """Find the handle of a device's current stream, many times as fast as the stream where torch has a way."""
    if _handle is None or device.index is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return _handle(device.index)


def follow(stream: Any, other: Any) -> None:
    """Make a stream wait for all work of another one.

    A graph that is captured cannot wait for streams outside it. Whoever begins the capture waits for them, as torch.cuda.graph
    does.
    """
    if stream != other and (_is_captured(other) or not _is_captured(stream)):
        stream.wait_stream(other)


def _is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
