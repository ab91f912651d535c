"""Sessions: one model's exchanges behind a door. Before the first exchange the ranks meet and check that they agree."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp import _version
from gradcomp.engine import agreement, checkpoint
from gradcomp.engine.kept_entries import KeptEntries
from gradcomp.engine.loss_scale import LossScale, UnknownScaler
from gradcomp.engine.optimizers import OptimizerCheck, check_momentum
from gradcomp.engine.parameters import Parameters, Slot
from gradcomp.engine.reducer import Reducer
from gradcomp.messages.payload import wrap
from gradcomp.networks import Connection
from gradcomp.protocol import Compressor
from gradcomp.requests import Gather


@dataclass(frozen=True)
class Options:
    """The options that a door passes on from its user.

    optimizer: the source of learning rates; its momentum is checked against the spec's. scaler: the GradScaler of the loss.
    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes. seed: the seed of random draws.
    """

    optimizer: torch.optim.Optimizer | None
    scaler: Any
    bucket_mb: float
    seed: int


class Session:
    """One model's exchanges on one rank.

    unknown_message: the door's error message for a gradient that belongs to no known parameter, with {shape} for its shape.
    """

    def __init__(
        self, compressor: Compressor, parameters: Parameters, network: Connection, options: Options, unknown_message: str
    ):
        self.parameters, self.network = parameters, network
        self._options, self._unknown_message = options, unknown_message
        self._met_in: object = None  # the network's generation in which the ranks met last
        self._step_began = False
        self._held: dict[str, Slot] = {}
        self._kept_entries = KeptEntries(len(parameters.slots))
        self._compressor = compressor
        self._loss_scale = None if options.scaler is None else LossScale(options.scaler)
        self._unknown_scaler = UnknownScaler(options.scaler)
        own = weakref.proxy(self)  # so that a session ends with its last user
        self._optimizer_check = OptimizerCheck(
            parameters,
            options.optimizer,
            lambda found: check_momentum(own._compressor, found),
            self._unknown_scaler.look,
        )
        self._reducer = self._make_reducer(compressor)

    @property
    def spec(self) -> str:
        return str(self._compressor)

    @property
    def has_met(self) -> bool:
        """True if the ranks have met since the network was last initialised."""
        return self._met_in is self.network.generation

    def slot(self, parameter: Tensor) -> Slot:
        """Find the slot of a parameter. Refuse an unknown parameter."""
        slot = self.parameters.slot(parameter)
        if slot is None:
            raise ValueError(self._unknown_message.format(shape=tuple(parameter.shape)))
        return slot

    def mark_ready(self, slot: Slot, grad: Tensor | None = None, hold: bool = False) -> None:
        """Note that a parameter's gradient is complete. The last one of a bucket starts the bucket's exchange.

        grad: the gradient in the order of the parameter's memory; parameter.grad by default.
        hold: keep the gradient for finish_step() if the ranks have not met yet, since a meeting waits for the other ranks.
        """
        self._step_began = self._optimizer_check.exchanged = True
        if grad is None:
            self._kept_entries.keep(slot, self.network.generation)
        if hold and not self.has_met:
            self._held[slot.name] = slot
        else:
            self._hand_over(slot, grad)

    def finish_step(self, scale: float = 1.0) -> None:
        """Finish the step: the gradients are then scale times the mean update. Only the first call in a step acts."""
        if not self._step_began:
            return
        with self._meet_after_failure():
            self._kept_entries.check()
        held, self._held = self._held, {}
        for slot in held.values():
            self._hand_over(slot)
        self._step_began = False
        with self._meet_after_failure():
            self._reducer.finish_step(scale)
        for slot in self.parameters.slots:
            slot.close()

    def _hand_over(self, slot: Slot, grad: Tensor | None = None) -> None:
        with self._meet_after_failure():
            self.meet()
            self._reducer.mark_ready(slot.name, slot.open() if grad is None else grad)

    @property
    def steps_done(self) -> int:
        return self._reducer.steps_done

    def stats(self) -> dict[str, Any]:
        """Return figures of the last step on this rank."""
        return self._reducer.stats()

    def residual(self) -> dict[str, Tensor]:
        """Copy this rank's residual, by name, in the parameters' shapes."""
        flat = checkpoint.residual(self._reducer)
        return {slot.name: slot.shaped(flat[slot.name]) for slot in self.parameters.slots}

    def change(self, compressor: Compressor) -> None:
        """Continue with another compressor, and carry residuals over. The ranks meet again at once if they have met before."""
        if self._step_began and self.has_met:
            raise RuntimeError(
                "change() came in the middle of a step: call it after optimizer.step(), before the next backward"
            )
        meet_again, compressor = self.has_met, checkpoint.successor(compressor, self._reducer)
        changed = self._make_reducer(compressor)
        checkpoint.carry(self._reducer, changed)
        self._reducer, self._compressor, self._met_in = changed, compressor, None
        if meet_again:
            self.meet()

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on."""
        return checkpoint.stamp(self.spec, rank=checkpoint.save(self._reducer))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that state_dict() returned on this rank."""
        checkpoint.check_stamp(state, self.spec)
        checkpoint.load(self._reducer, state["rank"])
        self._met_in = None

    def meet(self) -> None:
        """Wait for the other ranks, and check that all agree. Do nothing if they have met since the network was initialised."""
        if self.has_met:
            return
        self._reducer.abort()
        self._held.clear()
        generation = self.network.generation
        self.network.prepare()
        terms = {
            "gradcomp's version": _version.VERSION,
            "spec": self.spec,
            "seed": str(self._options.seed),
            "bucket_mb": str(self._options.bucket_mb),
            **self.parameters.terms(),
            "compressor's state": self._reducer.common_state(),
        }
        agreement.check(terms, self._gather(agreement.record(terms), "agreement"))
        host = hashlib.blake2b(self.network.host.encode(), digest_size=8).digest()
        hosts = self._gather(torch.frombuffer(bytearray(host), dtype=torch.int64), "hosts")
        self.network.hosts = tuple(map(int, hosts))
        self._met_in = generation

    def _make_reducer(self, compressor: Compressor) -> Reducer:
        rates = None
        if (optimizer := self._optimizer_check.optimizer) is not None:
            check_momentum(compressor, optimizer)
            rates = self._optimizer_check.rate
        layers, options = self.parameters.layers, self._options
        reducer = Reducer(
            compressor, layers, self.network, options.bucket_mb, options.seed, rates=rates, loss_scale=self._loss_scale
        )
        self._unknown_scaler.matters = reducer.keeps_residual
        return reducer

    def _gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        replies = self.network.start(Gather(wrap(tensor.to(self.network.device))), name)()
        assert isinstance(replies, list)
        return [reply["bytes"].cpu() for reply in replies]

    @contextmanager
    def _meet_after_failure(self) -> Iterator[None]:
        """Make the ranks meet again after any failure. The meeting discards the failed step."""
        try:
            yield
        except BaseException:
            self._met_in = None
            self._kept_entries.discard()
            raise
