"""Agreement: short records by which ranks tell one another where they are, and whether their own gradients are finite.

A backward pass and a step both begin with one, of the same size. Ranks that have parted then read each other's, and say so,
where each would otherwise wait for a message that never comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.core.requests import Field, Gather, Payload
from gradcomp.engine.updates.steps import warn_user
from gradcomp.native import kernels
from gradcomp.native.memory import HostCopy, Memory
from gradcomp.networks import Answer, Connection

# The kinds of records, and their form.
BACKWARD, STEP = 1.0, 2.0
_FORM = (Field("bytes", torch.float32, 4),)

_PARTED = (
    "the ranks are out of step: {places}. Every rank must call backward() and step the same optimizers in the same order: one "
    "that skips a step, by a guard of its own gradient's norm for example, stops the others. Let all ranks decide alike, by a "
    'mean over the ranks, or take the spec "blocks", which exchanges gradients in backward()'
)


# Passes on end with a gradient that is not finite, before the warning. A GradScaler halves its scale as often: to a millionth.
SPOILT_BEFORE_WARNING = 20
_SPOILT = (
    f"the gradients of {SPOILT_BEFORE_WARNING} backward passes in a row were not finite on some rank. Either the training has "
    "diverged, or a layer that no optimizer trains keeps an infinity of an earlier pass in its gradient: freeze such layers, "
    "or call model.zero_grad() in place of optimizer.zero_grad()"
)


class Agreement:
    """The records of one session. The last ones of a GPU are looked at with the next, so that no step waits for it.

    layers: those of each optimizer, in words, by its number.
    """

    def __init__(self, network: Connection, layers: Mapping[int, str]):
        self._network, self._layers = network, layers
        self._found: HostCopy | None = None
        self._answer: Answer | None = None
        self._spoilt = 0  # the latest passes on end that were not finite

    def begin(self, kind: float, number: int, step: int, poison: Tensor | None = None) -> None:
        """Begin to exchange records. number: of the optimizer. poison: a float: not 0 where a gradient is not finite, 1
        where a step is skipped.
        """
        if self._found is not None:
            self._look(self._found.all())
        device = self._network.device
        record = torch.tensor((kind, float(number), float(step), 0.0)).to(device, non_blocking=device.type != "cpu")
        if poison is not None:
            record[3:] = poison
        self._answer = self._network.start(Gather(Payload(_FORM, record.view(torch.uint8), {})), "agreement of the ranks")

    def end(self) -> Tensor | None:
        """End the exchange. Return the sum of the ranks' poison, where the records lie.

        None if no exchange is under way.
        """
        answer, self._answer = self._answer, None
        if answer is None:
            return None
        replies: Any = answer()
        records = torch.cat([reply.bytes for reply in replies]).view(torch.float32)
        if records.is_cuda:
            self._found = HostCopy(records)
        else:
            self._look(records.tolist())
        return records[3::4].sum()

    def discard(self) -> None:
        """Forget the records that nobody has looked at."""
        self._found = self._answer = None

    def _look(self, numbers: Sequence[float]) -> None:
        """Look whether the ranks have sent equal records, but for what they say of their gradients."""
        self._found = None
        if numbers[0] == BACKWARD:
            self._spoilt = 0 if all(each == 0 for each in numbers[3::4]) else self._spoilt + 1
            if self._spoilt == SPOILT_BEFORE_WARNING:
                warn_user(_SPOILT)
        first = numbers[:3]
        for i in range(4, len(numbers), 4):
            if numbers[i : i + 3] != first:
                records = [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 4)]
                raise self._network.failure(_PARTED.format(places=_in_words(records, self._network, self._layers)))


def _in_words(records: Sequence[tuple[float, ...]], network: Connection, layers: Mapping[int, str]) -> str:
    first = next(i for i, each in enumerate(records) if each != records[0])
    several = len({number for kind, number, _ in records if kind == STEP} | layers.keys()) > 1
    return " and ".join(
        f"rank {network.world.number(rank)} {_place(records[rank], layers if several else None)}" for rank in (0, first)
    )


def _place(record: Sequence[float], layers: Mapping[int, str] | None) -> str:
    """Say where a rank is. layers: None where all have one optimizer."""
    kind, number, step = record
    if kind == BACKWARD:
        return f"is in a backward pass after {int(step)} exchanges"
    of = None if layers is None else layers.get(int(number))
    which = "" if layers is None else " of another optimizer" if of is None else f" of the optimizer of {of}"
    return f"is in step {int(step) + 1}{which}"


class _Place(NamedTuple):
    """The sums of squares of some gradients of a pass, and scratch for them."""

    sizes: list[int]
    squares: Tensor
    scratch: Tensor | None


class LocalGradients:
    """The sum of squares of a backward pass, where the gradients lie. Nothing waits for a device.

    scaler: the GradScaler that scales the loss, or None.
    """

    def __init__(self, memory: Memory):
        self._memory = memory
        self._places: list[_Place] = []
        self._noted = 0
        self._total: Tensor | None = None
        self._scale: Tensor | None = None  # of the loss in the last pass
        self.scaler: Any = None

    def add(self, grads: Sequence[Tensor]) -> Tensor:
        """Add gradients of one device to those of the pass under way. Return their sums of squares."""
        sizes = [*map(torch.Tensor.numel, grads)]
        place = self._places[self._noted] if self._noted < len(self._places) else None
        if place is None or place.sizes != sizes:
            squares = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
            place = _Place(sizes, squares, kernels.scratch_of_squares(grads, squares))
            self._places[self._noted : self._noted + 1] = [place]
        self._noted += 1
        kernels.sum_squares(grads, place.squares, self._memory, place.scratch)
        return place.squares

    def end(self) -> Tensor | None:
        """End the pass. Return 0 if its gradients are finite, otherwise Inf or NaN, as one float; None if there were none."""
        if not (noted := self._noted):
            return None
        every, self._noted = [each.squares for each in self._places[:noted]], 0
        all_squares = every[0] if noted == 1 else torch.cat([each.to(every[0].device) for each in every])
        self._total = all_squares.sum()
        scale = getattr(self.scaler, "_scale", None)  # in public only as a number, for which a GPU would be waited for
        self._scale = None if scale is None else scale.clone()
        return torch.where(self._total.isfinite(), 0.0, self._total).float()

    def discard(self) -> None:
        """Forget the pass under way."""
        self._noted = 0

    @property
    def norm(self) -> float | None:
        """The norm of the last pass's gradients; None before the first. This waits for a device."""
        if self._total is None:
            return None
        return math.sqrt(float(self._total)) / (1.0 if self._scale is None else float(self._scale))
