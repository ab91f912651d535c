"""Horovod's elastic mode: a compression's state is kept, restored and synchronised along with the optimizer's."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.elastic import state as elastic
from horovod.torch.functions import broadcast_object

from gradcomp.engine.session import Session
from gradcomp.horovod.compression import Compression


def register() -> None:
    """Make TorchState, of Horovod's elastic mode, handle optimizers that have a Compression. Others keep Horovod's handler."""
    kind: Any = _WithCompression()
    elastic.set_handler_registry([(kind, _Handler), *elastic.get_handler_registry()])


class _WithCompression:
    """The optimizers that have a Compression, as a type for isinstance()."""

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, torch.optim.Optimizer) and isinstance(getattr(value, "_compression", None), Compression)


class _Handler(elastic.OptimizerStateHandler):  # type: ignore[misc]
    """Saves, restores and synchronises an optimizer as Horovod's own handler does, and the state of its compression."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        super().__init__(optimizer)
        self._session.resume.commit()

    @property
    def _session(self) -> Session:
        compression: Compression = self.value._compression
        found: Session = getattr(compression._session, "kept", compression._session)  # also after remove()
        return found

    def save(self) -> None:
        super().save()
        self._session.resume.commit()

    def restore(self) -> None:
        super().restore()
        self._session.resume.roll_back()

    def sync(self) -> None:
        self._session.updates.keeps_residuals = True
        try:
            if self._follows_state():
                super().sync()
        finally:
            self._session.updates.keeps_residuals = False
        self._session.resume.sync()

    def _follows_state(self) -> bool:
        """Decide whether rank 0's optimizer has a state that Horovod is to broadcast. If not, take over its groups' settings.

        Horovod has an optimizer without a state make one, by a step. SGD whose momentum is hidden has none on the ranks that
        stay: a rank that joins would make one alone, and wait for the others'. And weight decay would move its weights, which
        have come before, so that the step's rate is 0 here.
        """
        optimizer = self.value
        settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        has_state, settings = broadcast_object((bool(optimizer.state), settings), 0)
        if not has_state:
            optimizer.state.clear()
        for group, of_root in zip(optimizer.param_groups, settings, strict=True):
            group.update({**of_root, "lr": 0.0} if has_state and not optimizer.state else of_root)
        return bool(has_state)
