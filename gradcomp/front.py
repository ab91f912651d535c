"""What every front end has behind it: a model's gradients in, updates in their place, once all ranks agree on what they do."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

import gradcomp
from gradcomp import agreement, checkpoint, kernels, reducer, wire
from gradcomp.compressors import make
from gradcomp.core import Compressor, Gather
from gradcomp.slot import Slot, check_momentum, rates_of, slots

UNKNOWN = (
    "a gradient came of a parameter that gradcomp does not know: it is not among the named_parameters that Compression was "
    "given, or was frozen when Compression was made"
)


class Network(reducer.Network, Protocol):
    """What a front end brings along."""

    hosts: tuple[int, ...] | None
    """A number for each rank's host, once the ranks have met."""

    device: torch.device
    """Where the tensors lie by which they meet."""

    @property
    def session(self) -> object:
        """What is another one once the connections were made anew."""

    @property
    def host(self) -> str:
        """The same on all ranks of a host, and on no others."""

    def enter(self) -> None:
        """Called before a session's first operation."""


class Front:
    """One model's exchange with the other ranks.

    optimizer: lets a momentum in the spec be checked against the optimizer's own, and tells learning rates to what needs them.
    """

    def __init__(
        self,
        spec: str | Compressor,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        network: Network,
        optimizer: torch.optim.Optimizer | None,
        bucket_mb: float,
        seed: int,
    ):
        self.spec, self.network = str(spec), network
        self.slots = slots(named_parameters)
        self._by_name = {slot.name: slot for slot in self.slots}
        self._by_id = {id(slot.parameter): slot for slot in self.slots}
        self._optimizer = optimizer
        layers = {slot.name: slot.layer for slot in self.slots}
        rates = None if optimizer is None else rates_of(optimizer, self.slots)
        self._options = layers, network, self._deliver, bucket_mb, seed, rates
        self._reducer = reducer.Reducer(self._made(spec), *self._options)
        self._scale = 1.0
        self._met: object = None
        self.terms = {
            "gradcomp's version": gradcomp.__version__,
            "spec": self.spec,
            "seed": str(seed),
            "bucket_mb": str(bucket_mb),
            "parameter names": f"{len(self.slots)}: " + ", ".join(self._by_name),
            "parameter shapes": f"{sum(layer.size for layer in layers.values())} entries: "
            + ", ".join(slot.describe() for slot in self.slots),
        }

    @property
    def has_met(self) -> bool:
        """Whether the ranks have found that they agree, in this session."""
        return self._met is self.network.session

    def knows(self, parameter: Tensor) -> bool:
        return id(parameter) in self._by_id

    def slot(self, parameter: Tensor) -> Slot:
        """The slot of a parameter."""
        if not self.knows(parameter):
            raise ValueError(UNKNOWN)
        return self._by_id[id(parameter)]

    def put(self, slot: Slot, grad: Tensor | None = None) -> None:
        """Notes that this parameter's gradient is complete; the last one of a bucket sets the bucket's exchange going.

        grad: where it is, in the order of the parameter's own memory, if it is not the parameter's own.
        """
        with self._guarded():
            self.meet()
            self._reducer.put(slot.name, slot.open() if grad is None else grad)

    def finish(self, scale: float = 1.0) -> None:
        """Brings the step to its end: all gradients are then scale times the mean update."""
        self._scale = scale
        with self._guarded():
            self._reducer.finish()

    @property
    def steps_done(self) -> int:
        return self._reducer.steps_done

    def stats(self) -> dict[str, Any]:
        """Figures of the last step on this rank."""
        return self._reducer.stats()

    def change(self, spec: str | Compressor) -> None:
        """Continues with another spec, between two steps and on all ranks; what has not been sent yet is carried over.

        Where the ranks have met they do so again, at once.
        """
        meet = self.has_met
        changed = reducer.Reducer(checkpoint.carrying(self._made(spec), self._reducer), *self._options)
        checkpoint.carry(self._reducer, changed)
        self._reducer, self.spec, self._met = changed, str(spec), None
        self.terms["spec"] = self.spec
        if meet:
            self.meet()

    def state_dict(self) -> dict[str, Any]:
        """What this rank's next step depends on. Every rank has its own: save one for each."""
        return {"spec": self.spec, "rank": checkpoint.save(self._reducer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what state_dict() gave on this rank."""
        checkpoint.same_spec(state["spec"], self.spec)
        checkpoint.load(self._reducer, state["rank"])
        self._met = None

    def _made(self, spec: str | Compressor) -> Compressor:
        compressor = make(spec)
        if warning := check_momentum(compressor, self._optimizer):
            warnings.warn(warning, stacklevel=4)
        return compressor

    def meet(self) -> None:
        """Before the first exchange, and again after the connections were made anew: do all ranks agree?

        This waits for the other ranks.
        """
        if self.has_met:
            return
        self._reducer.abort()
        session = self.network.session
        self.network.enter()
        terms = {**self.terms, "compressor's state": self._reducer.alike()}
        agreement.check(terms, self._gather(agreement.record(terms), "agreement"))
        host = hashlib.blake2b(self.network.host.encode(), digest_size=8).digest()
        hosts = self._gather(torch.frombuffer(bytearray(host), dtype=torch.int64), "hosts")
        self.network.hosts = tuple(map(int, hosts))
        self._met = session

    def _gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        request = Gather(wire.whole(tensor.to(self.network.device)))
        replies = self.network.finish(self.network.start(request, name))
        assert isinstance(replies, list)
        return [reply["bytes"].cpu() for reply in replies]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """After any failure the step under way is forgotten, and the next one begins with a meeting."""
        try:
            yield
        except BaseException:
            self._met = None
            raise

    def _deliver(self, bucket: reducer.Bucket, update: Tensor) -> None:
        members = [self._by_name[name] for name in bucket.layout.names]
        kernels.spread(update, [bucket.grads[slot.name] for slot in members], self._scale)
        for slot in members:
            slot.close()
