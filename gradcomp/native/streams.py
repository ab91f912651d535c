"""Streams of a GPU with work on an array. The next kernel on another stream waits for them."""

from __future__ import annotations

from typing import Any

import torch

from gradcomp.native import extension


class Streams:
    """The streams of a device that have work on a bucket. A CPU has none: its callers do without.

    Autograd calls a hook on the stream of the layer's forward pass. The hook that fills a bucket, and step(), may have others.
    Mostly there is one, which its handle tells: torch's object of a stream costs ten times as much, and is made once.
    """

    def __init__(self, device: torch.device):
        self._device, self.has_streams = device, device.type == "cuda"
        self._busy: dict[int, Any] = {}
        self._known: dict[int, Any] = {}  # of all steps: torch's objects own no stream

    @property
    def are_captured(self) -> bool:
        """True while the current stream is captured as a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def note(self) -> None:
        """Note that the current stream has work on the bucket: it made a gradient."""
        handle = extension.current_stream(self._device.index)
        if handle not in self._busy:
            self._busy[handle] = self._know(handle)

    def join(self) -> None:
        """Make the current stream wait for the others. It alone then has work on the bucket."""
        handle = extension.current_stream(self._device.index)
        current = self._know(handle)
        for other, stream in self._busy.items():
            if other != handle:
                _follow(current, stream)
        self._busy = {handle: current}

    def clear(self) -> None:
        """Forget the streams after the bucket's step. Autograd and the caller of step() order all later work."""
        self._busy.clear()

    def _know(self, handle: int) -> Any:
        """Return torch's object of the current stream, which has this handle."""
        known = self._known.get(handle)
        if known is None:
            known = self._known[handle] = torch.cuda.current_stream(self._device)
        return known


def _follow(stream: Any, other: Any) -> None:
    """Make a stream wait for all work of another one.

    A captured graph cannot wait for streams outside it. The caller that begins the capture waits for them, as torch.cuda.graph
    does.
    """
    if _is_captured(other) or not _is_captured(stream):
        stream.wait_stream(other)


def _is_captured(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
