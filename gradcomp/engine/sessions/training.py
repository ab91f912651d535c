"""What a session knows of the training around it: the optimizer, its momentum, and the scale of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradcomp.core.compressor import Compressor
from gradcomp.engine.delivery import LossScale
from gradcomp.engine.optimizers.check import OptimizerCheck, check_momentum
from gradcomp.engine.optimizers.delivered_sample import DeliveredSample
from gradcomp.engine.optimizers.own_momentum import OwnMomentum
from gradcomp.engine.parameters import Parameters
from gradcomp.engine.return_moments import average_moments, moments_to_return, return_moments
from gradcomp.engine.sessions.freezes import Freezes
from gradcomp.engine.steps.options import Options
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.engine.unknown_scaler import UnknownScaler


class Training:
    """The optimizer and the GradScaler of a session's parameters.

    compressor, reducer: return the session's. before_step: called before each step of an optimizer of the parameters.
    sums: updates are sums over this many ranks; 1 if they are means. under_way: a step's exchange has begun and not ended.
    lags: no step of the optimizer follows this rank's exchanges, and its weights lag behind.
    """

    def __init__(
        self,
        parameters: Parameters,
        options: Options,
        compressor: Callable[[], Compressor],
        before_step: Callable[[], None],
        reducer: Callable[[], Reducer],
        sums: Callable[[], int],
        under_way: Callable[[], bool],
    ):
        self._reducer, self._rates_noted, self.lags = reducer, False, False
        self._loss_scale = None if options.scaler is None else LossScale(options.scaler)
        self._unknown_scaler = UnknownScaler(options.scaler, lambda: reducer().remembers or self._momentum.taken)
        self._check = OptimizerCheck(
            parameters,
            options.optimizer,
            lambda found: check_momentum(compressor(), found),
            [before_step, self._note_rates, self._unknown_scaler.look],
        )
        slots = {slot.name: slot for slot in parameters.slots}
        self.freezes = Freezes({name: slot.parameter for name, slot in slots.items()})
        self._shaped = lambda name, flat: slots[name].shaped(flat)
        self._momentum = OwnMomentum(
            self._check.acting,
            {name: slot.parameter for name, slot in slots.items()},
            lambda name, tensor: slots[name].flat(tensor),
            sums,
            sample=DeliveredSample(slots),
            under_way=under_way,
            is_told=lambda: self._check.is_told,
        )

    @property
    def terms(self) -> dict[str, str]:
        """Describe what must be equal on all ranks."""
        return {"optimizer": self._momentum.describe() if self._check.is_told else "unknown before its first step"}

    @property
    def bears_waiting(self) -> bool:
        """True if entries may wait without loss: the optimizer was given, and its momentum, if any, is taken over."""
        return self._check.is_told and self._momentum.bears_waiting

    def note_exchange(self) -> None:
        """Note that gradients are exchanged. From now on, the optimizer's steps are checked."""
        self._check.note_exchange()

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer that will step, before its first step."""
        self._check.note(optimizer)

    def end(self) -> None:
        """End with the session: Python's collector may find this much later, and an optimizer may step until then."""
        self._check.replaced = True

    def of_reducer(self, compressor: Compressor) -> dict[str, Any]:
        """Return what a reducer needs to know, after a check of the compressor's momentum."""
        if (optimizer := self._check.optimizer) is not None:
            check_momentum(compressor, optimizer)
        self._rates_noted = False
        known = {"rates": self._check.rates, "linear": lambda: self._check.is_linear, "frozen": self.freezes.of}
        return {**known, "loss_scale": self._loss_scale, "momentum": self._momentum}

    def _note_rates(self) -> None:
        if not self._rates_noted and self._check.is_linear:
            for bucket in self._reducer().buckets:
                bucket.note_rates(self._check.rates)
            self._rates_noted = True

    @property
    def update_waits(self) -> bool:
        """True if an update that holds momentum waits for the optimizer's step."""
        return self._momentum.update_waits

    def refuse_before_step(self, call: str) -> None:
        """Raise an error if an update that holds momentum waits for the optimizer's step."""
        self._momentum.refuse_before_step(call)

    def arrays_to_hand_back(self, old: Reducer, new: Reducer) -> Sequence[str]:
        """List the arrays that the optimizer gets back when a new reducer follows an old one."""
        return moments_to_return(self._momentum, old, new)

    def hand_back(self, old: Reducer, new: Reducer, arrays: Sequence[str]) -> None:
        """Give the optimizer the means of these arrays over the ranks. All ranks call this."""
        return_moments(self._momentum, average_moments(self._momentum, old, arrays)(), [new], self._shaped)

    def note_loaded(self, reducer: Reducer) -> None:
        """Note that the reducer's state was loaded: no update waits for the optimizer's step."""
        self._momentum.note_loaded(any(bucket.moments() for bucket in reducer.buckets))

    def forget_update(self) -> None:
        """Forget the last step's update: nobody is to apply it on this rank."""
        self._momentum.forget_update()
