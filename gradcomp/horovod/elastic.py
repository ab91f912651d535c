"""Horovod's elastic mode: what must be kept, restored and synchronised along with an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from horovod.torch.elastic import state as elastic
from horovod.torch.functions import broadcast_object

from gradcomp.engine.commits import Commits


def keep_with_optimizers(find: Callable[[Any], Commits | None]) -> None:
    """Make TorchState, of Horovod's elastic mode, keep what find() returns along with an optimizer.

    An optimizer for which find() returns None keeps Horovod's own handler.
    """
    registry = elastic.get_handler_registry()
    if not any(isinstance(kind, _Optimizers) for kind, _ in registry):
        kept: Any = _Optimizers(find)
        elastic.set_handler_registry([(kept, kept.handler), *registry])


class _Optimizers:
    """The optimizers for which find() returns something, as a type for isinstance()."""

    def __init__(self, find: Callable[[Any], Commits | None]):
        self._find = find

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, torch.optim.Optimizer) and self._find(value) is not None

    def handler(self, optimizer: torch.optim.Optimizer) -> Any:
        return _Handler(optimizer, self._find)


class _Handler(elastic.OptimizerStateHandler):  # type: ignore[misc]
    """Saves, restores and synchronises an optimizer as Horovod's own handler does, and what is kept with it."""

    def __init__(self, optimizer: torch.optim.Optimizer, find: Callable[[Any], Commits | None]):
        self._find = find
        super().__init__(optimizer)
        self._kept().commit()

    def _kept(self) -> Commits:
        kept = self._find(self.value)
        assert kept is not None
        return kept

    def save(self) -> None:
        super().save()
        self._kept().commit()

    def restore(self) -> None:
        super().restore()
        self._kept().roll_back()

    def sync(self) -> None:
        if self._follows_state():
            super().sync()
        self._kept().sync()

    def _follows_state(self) -> bool:
        """Decide whether rank 0's optimizer has a state that Horovod is to broadcast. If not, take over its groups' settings.

        Horovod has an optimizer without a state make one, by a step. Moments that were taken over leave no state on the ranks
        that stay: a rank that joins would make one alone, and wait for the others'. And weight decay would move its weights,
        which have come before, so that the step's rate is 0 here.
        """
        optimizer = self.value
        settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        has_state, settings = broadcast_object((bool(optimizer.state), settings), 0)
        if not has_state:
            optimizer.state.clear()
        for group, of_root in zip(optimizer.param_groups, settings, strict=True):
            group.update({**of_root, "lr": 0.0} if has_state and not optimizer.state else of_root)
        return bool(has_state)
