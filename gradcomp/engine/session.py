"""What a door has behind it: a model's gradients in, updates in their place, once all ranks have found that they agree."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp import _version
from gradcomp.engine import agreement, checkpoint
from gradcomp.engine.parameters import Parameters, Slot, check_momentum, rates_of
from gradcomp.engine.reducer import Reducer
from gradcomp.messages.payload import whole
from gradcomp.networks import Connection
from gradcomp.protocol import Compressor
from gradcomp.requests import Gather


@dataclass(frozen=True)
class Options:
    """What a door hands through from its user. optimizer: checks a momentum in the spec, and tells learning rates."""

    optimizer: torch.optim.Optimizer | None
    bucket_mb: float
    seed: int


class Session:
    """One model's exchanges on one rank. unknown: what the door says of a gradient that belongs to none of the parameters."""

    def __init__(self, compressor: Compressor, parameters: Parameters, network: Connection, options: Options, unknown: str):
        self.parameters, self.network = parameters, network
        self._options, self._unknown = options, unknown
        self._met: object = None
        self._under_way = False
        self._held: dict[str, Slot] = {}
        self._reducer = self._made(compressor)
        self.spec = str(compressor)

    @property
    def has_met(self) -> bool:
        """Whether the ranks have found that they agree, since the network was last initialised."""
        return self._met is self.network.generation

    def slot(self, parameter: Tensor) -> Slot:
        """The slot of a parameter."""
        slot = self.parameters.slot(parameter)
        if slot is None:
            raise ValueError(self._unknown)
        return slot

    def mark_ready(self, slot: Slot, grad: Tensor | None = None, hold: bool = False) -> None:
        """Note that a parameter's gradient is complete; the last one of a bucket sets the bucket's exchange going.

        grad: where it is, in the order of the parameter's own memory, if it is not the parameter's own.
        hold: not before the ranks have met, for which they wait for one another; finish_step() makes up for it.
        """
        self._under_way = True
        if hold and not self.has_met:
            self._held[slot.name] = slot
            return
        with self._guarded():
            self.meet()
            self._reducer.mark_ready(slot.name, slot.open() if grad is None else grad)

    def finish_step(self, scale: float = 1.0) -> None:
        """Bring the step to its end: all gradients are then scale times the mean update. Only a step's first call counts."""
        if not self._under_way:
            return
        held, self._held = self._held, {}
        for slot in held.values():
            self.mark_ready(slot)
        self._under_way = False
        with self._guarded():
            self._reducer.finish_step(scale)
        for slot in self.parameters.slots:
            slot.close()

    @property
    def steps_done(self) -> int:
        return self._reducer.steps_done

    def stats(self) -> dict[str, Any]:
        """Give figures of the last step on this rank."""
        return self._reducer.stats()

    def residual(self) -> dict[str, Tensor]:
        """Copy what this rank has not sent yet, by name, in the parameters' shapes."""
        kept = checkpoint.residual(self._reducer)
        return {slot.name: slot.shaped(kept[slot.name]) for slot in self.parameters.slots}

    def change(self, compressor: Compressor) -> None:
        """Continue with another compressor, carrying over what waits. Where the ranks have met they do so again, at once."""
        if self._under_way and self.has_met:
            raise RuntimeError(
                "change() came in the middle of a step: call it after optimizer.step(), before the next backward"
            )
        meet, chosen = self.has_met, checkpoint.carrying(compressor, self._reducer)
        changed = self._made(chosen)
        checkpoint.carry(self._reducer, changed)
        self._reducer, self.spec, self._met = changed, str(chosen), None
        if meet:
            self.meet()

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank's next step depends on."""
        return checkpoint.stamped(self.spec, rank=checkpoint.save(self._reducer))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what state_dict() gave on this rank."""
        checkpoint.check_stamp(state, self.spec)
        checkpoint.load(self._reducer, state["rank"])
        self._met = None

    def meet(self) -> None:
        """Before the first exchange, and after every re-initialisation of the network: find out whether all ranks agree.

        This waits for the other ranks.
        """
        if self.has_met:
            return
        self._reducer.abort()
        generation = self.network.generation
        self.network.prepare()
        terms = {
            "gradcomp's version": _version.VERSION,
            "spec": self.spec,
            "seed": str(self._options.seed),
            "bucket_mb": str(self._options.bucket_mb),
            **self.parameters.terms(),
            "compressor's state": self._reducer.alike(),
        }
        agreement.check(terms, self._gather(agreement.record(terms), "agreement"))
        host = hashlib.blake2b(self.network.host.encode(), digest_size=8).digest()
        hosts = self._gather(torch.frombuffer(bytearray(host), dtype=torch.int64), "hosts")
        self.network.hosts = tuple(map(int, hosts))
        self._met = generation

    def _made(self, compressor: Compressor) -> Reducer:
        optimizer = self._options.optimizer
        if warning := check_momentum(compressor, optimizer):
            warnings.warn(warning, stacklevel=4)
        named = [(slot.name, slot.parameter) for slot in self.parameters.slots]
        rates = None if optimizer is None else rates_of(optimizer, named)
        layers, options = self.parameters.layers, self._options
        return Reducer(compressor, layers, self.network, options.bucket_mb, options.seed, rates=rates)

    def _gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        replies = self.network.start(Gather(whole(tensor.to(self.network.device))), name)()
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
