"""The clock of a rank's steps: host seconds for compressing, for waiting and on the wire, added up."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field


@dataclass
class Seconds:
    """Host seconds of some steps. On a GPU, kernels run on while the host goes ahead.

    steps: how many. encoding: compressing and decompressing; backward_encoding: as much of it as came before the last gradient.
    waiting: for other ranks and the network. wire: some request was under way. backward: from a step's first gradient to its
    last. exposed: from a step's last gradient to its updates. total: from one step's end to the next one's.
    """

    steps: int = 0
    encoding: float = 0.0
    backward_encoding: float = 0.0
    waiting: float = 0.0
    wire: float = 0.0
    backward: float = 0.0
    exposed: float = 0.0
    total: float = 0.0

    def less(self, before: Seconds) -> Seconds:
        """Return the seconds since an earlier copy."""
        return Seconds(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    def by_step(self) -> dict[str, float]:
        """Return the mean of each."""
        named = {name: value for name, value in asdict(self).items() if name != "steps"}
        return {name: value / max(1, self.steps) for name, value in named.items()}


@dataclass
class StepClock:
    """The clock of one reducer."""

    seconds: Seconds = field(default_factory=Seconds)
    _requests: int = 0
    _wire_since: float = 0.0
    _first_gradient: float | None = None
    _last_gradient: float | None = None
    _ended: float | None = None
    _encoded: float = 0.0
    _full: int = 0

    def note_gradient(self) -> None:
        """Note a gradient; the first one begins a step."""
        if self._first_gradient is None:
            self._first_gradient, self._encoded = time.perf_counter(), self.seconds.encoding

    def note_last_gradient(self) -> None:
        """Note that all gradients of the step are there. Only the first call in a step acts."""
        if self._last_gradient is not None:
            return
        self._last_gradient = time.perf_counter()
        self.seconds.backward_encoding += self.seconds.encoding - self._encoded
        self.seconds.backward += self._last_gradient - (self._first_gradient or self._last_gradient)

    def note_full_bucket(self, buckets: int) -> None:
        """Note that all gradients of one of the buckets are there."""
        self._full += 1
        if self._full == buckets:
            self.note_last_gradient()

    def note_encoded(self, began: float) -> float:
        """Note that encoding began then and ends now. Return now."""
        now = time.perf_counter()
        self.seconds.encoding += now - began
        return now

    def note_request(self) -> None:
        """Note a request that begins."""
        if self._requests == 0:
            self._wire_since = time.perf_counter()
        self._requests += 1

    def note_reply(self, began: float) -> float:
        """Note a reply that this rank has waited for since then. Return now."""
        now = time.perf_counter()
        self.seconds.waiting += now - began
        self._requests -= 1
        if self._requests == 0:
            self.seconds.wire += now - self._wire_since
        return now

    def note_end(self) -> None:
        """Note the end of a step."""
        now = time.perf_counter()
        if self._last_gradient is not None:
            self.seconds.exposed += now - self._last_gradient
        if self._ended is not None:
            self.seconds.total += now - self._ended
            self.seconds.steps += 1
        else:  # there is no step before to count from
            self.seconds = Seconds()
        self._ended, self._requests, self._full = now, 0, 0
        self._first_gradient = self._last_gradient = None

    def restart(self) -> None:
        """Leave out the time since the last step's end."""
        if self._ended is not None:
            self._ended = time.perf_counter()
