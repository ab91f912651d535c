"""Published ways to send fewer bytes that are no compressors of gradcomp: yardsticks in a study.

bf16: each rank rounds its gradient to bfloat16. The update is the float32 mean of the rounded gradients.

powersgd:rank=R: PowerSGD, rank-R factors of every gradient with two or more dimensions (Vogels, Karimireddy, Jaggi: PowerSGD,
NeurIPS 2019; torch.distributed's powerSGD_hook). With M, a rank's gradient and what earlier steps left, as a matrix:
P = mean of M Q over the ranks; P is orthogonalised; Q = mean of M^T P. The update is P Q^T, and M - P Q^T is left to the next
step. Q begins as noise, and each step begins with the last one's (warm start). Other tensors travel whole, as do matrices that
are no larger than P and Q. It compresses from the first step on; torch's hook sends the first 1,000 whole unless it is told
otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

import gradcomp
from laboratory import options

NAMES = ("bf16", "powersgd")

Grads = dict[str, Tensor]

# A function that is given what the ranks meant to send and what is left of it.
Note = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


class Exchange(Protocol):
    """The exchanges of simulated ranks, as gradcomp.Simulation offers them. bytes_sent: of each rank, in the last step."""

    bytes_sent: list[int]

    def step(self, grads: Sequence[Grads]) -> Grads:
        """Return the mean update by name."""


class Bfloat16:
    """Gradients that are rounded to bfloat16, without error feedback."""

    def __init__(self, ranks: int, note: Note):
        self.bytes_sent, self._note = [0] * ranks, note

    def step(self, grads: Sequence[Grads]) -> Grads:
        """Round, and return the mean."""
        rounded = [{name: grad.bfloat16().float() for name, grad in own.items()} for own in grads]
        for own, sent in zip(grads, rounded, strict=True):
            self._note(list(own.values()), [own[name] - sent[name] for name in own])
        self.bytes_sent = [2 * sum(grad.numel() for grad in own.values()) for own in grads]
        return {name: mean([own[name] for own in rounded]) for name in rounded[0]}


class PowerSGD:
    """PowerSGD with error feedback and warm start.

    q: for each compressed tensor, the factor that the next step begins with. left: for each rank, what it has not sent of them.
    """

    def __init__(self, rank: int, shapes: Mapping[str, Sequence[int]], ranks: int, seed: int, note: Note):
        generator = torch.Generator().manual_seed(seed)
        self.q: Grads = {}
        sent = 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            rows, columns = (shape[0], size // shape[0]) if len(shape) > 1 else (1, size)
            if factors_are_smaller(rank, rows, columns):
                self.q[name] = torch.randn(columns, rank, generator=generator)
                size = rank * (rows + columns)
            sent += 4 * size
        self.bytes_sent = [sent] * ranks
        self.left = [{name: torch.zeros(torch.Size(shapes[name])) for name in self.q} for _ in range(ranks)]
        self._note = note

    def step(self, grads: Sequence[Grads]) -> Grads:
        """Add what was left, and return the mean or its approximation."""
        meant = [
            {name: grad + left[name] if name in left else grad for name, grad in own.items()}
            for own, left in zip(grads, self.left, strict=True)
        ]
        update = {name: self._mean_of(name, [own[name] for own in meant]) for name in meant[0]}
        for left, own in zip(self.left, meant, strict=True):
            for name in left:
                left[name] = own[name] - update[name]
            self._note(list(own.values()), list(left.values()))
        return update

    def _mean_of(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the mean of a tensor over the ranks: exact, or P Q^T."""
        if name not in self.q:
            return mean(tensors)
        matrices = [each.flatten(1) for each in tensors]
        p, _ = torch.linalg.qr(mean([matrix @ self.q[name] for matrix in matrices]))
        self.q[name] = mean([matrix.T @ p for matrix in matrices])
        product: Tensor = p @ self.q[name].T
        return product.view_as(tensors[0])


def factors_are_smaller(rank: int, rows: int, columns: int) -> bool:
    """Compare P and Q with their product."""
    return rank * (rows + columns) < rows * columns


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean over the ranks, summed in their order."""
    return torch.stack(list(tensors)).mean(0)


def is_one(spec: str) -> bool:
    """Check whether a spec names a peer."""
    return spec.partition(":")[0].strip() in NAMES


def rank_of(spec: str) -> int:
    """Return the rank of a PowerSGD spec; 0 for bf16. Refuse a wrong spec."""
    if spec == "bf16":
        return 0
    found = re.fullmatch(r"powersgd:rank=([1-9]\d*)", spec)
    if not found:
        raise ValueError(f"{spec!r} is not a peer's spec; write bf16, or for example powersgd:rank=4")
    return int(found[1])


def make(spec: str, shapes: Mapping[str, Sequence[int]], ranks: int, seed: int, note: Note) -> Exchange:
    """Make the exchange of a peer's spec."""
    rank = rank_of(spec)
    return PowerSGD(rank, shapes, ranks, seed, note) if rank else Bfloat16(ranks, note)


def specs(text: str) -> list[str]:
    """Read specs of gradcomp and of peers."""
    return options.specs(text, check=_check)


def _check(spec: str) -> None:
    if is_one(spec):
        rank_of(spec)
        return
    try:
        gradcomp.make(spec)
    except ValueError as error:
        raise ValueError(f"{error} (beside gradcomp's specs: bf16, powersgd:rank=4)") from None
