"""What algorithms over count sketches share: their knobs, the table, and exact values at places that all ranks know."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.exchanges import dense
from gradcomp.knobs import knob
from gradcomp.messages.sparse import count_of, ratio_knob
from gradcomp.native import kernels
from gradcomp.native.extension import TILE
from gradcomp.native.memory import Memory, Update
from gradcomp.protocol import Acc, Compressor, Layout, Steps, Traits
from gradcomp.requests import World

COLUMNS_FOR_ONE = 5
"""Columns for each entry that is sent, where nothing else is said."""


class Sizes(NamedTuple):
    """Of n entries: how many are sent, how many are looked at for that, and the table they are found with."""

    k: int
    candidates: int
    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Sketching(Compressor):
    """Sends k = max(1, ceil(ratio * n)) of the model's n entries: those that are heaviest in the sum over the ranks."""

    ratio: float = ratio_knob()
    candidates: int = knob(4, "times k entries are looked at exactly; higher = fewer large ones missed; 0 = estimates", least=0)
    rows: int = knob(5, "rows of the table; higher = better estimates, more bytes", choices=(3, 5, 7, 9))
    columns: int = knob(0, "columns of the table; 0 = what compression leaves, or five an entry sent", least=0, multiple=TILE)
    compression: float = knob(0.0, "ratio of bytes that columns follow from, above 1; 0 = columns decide", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns and self.compression:
            raise ValueError(f"{self}: columns follow from compression; set one of them to 0")
        if 0 < self.compression <= 1:
            raise ValueError(f"{self.name}: compression={self.compression} must be above 1, or 0 where columns decide")

    @property
    def traits(self) -> Traits:
        return Traits(whole_model=True)

    def sizes(self, n: int) -> Sizes:
        k = count_of(self.ratio, n)
        looked_at = min(n, self.candidates * k)
        columns = self.columns or COLUMNS_FOR_ONE * k
        if self.compression:
            columns = math.floor((n / self.compression - looked_at - 1) / self.rows)
        return Sizes(k, looked_at, self.rows, max(1, columns // TILE) * TILE)

    def init(self, layout: Layout, seed: int) -> Table:
        return Table(layout.total, self.sizes(layout.total), seed, layout.device)

    def exchange(self, acc: Acc, state: Table, world: World) -> Steps:
        if state.sizes.cells + state.sizes.candidates >= acc.residual.numel():  # a small model: everything travels at once
            state.buffer = torch.empty_like(acc.residual) if state.buffer is None else state.buffer
            return (yield from dense.allreduce(acc, world, state.buffer, mask=True))
        return (yield from self.sketched(acc, state, world))

    @abstractmethod
    def sketched(self, acc: Acc, table: Table, world: World) -> Steps:
        """The exchange by sketch."""


class Table:
    """A bucket's table, and the places that are read from the sum of all ranks' tables: the same ones everywhere."""

    def __init__(self, n: int, sizes: Sizes, seed: int, device: torch.device):
        self.n, self.sizes, self.seed = n, sizes, seed
        self.cells = torch.empty(sizes.cells + 1, device=device)
        self.buffer: Tensor | None = None

    def sketch(self, acc: Acc) -> Tensor:
        """A table of this rank; behind its cells, whether a gradient was not finite."""
        kernels.sketch(acc.residual, self.sizes.rows, self.seed, self.cells[:-1])
        _flag(acc, self.cells)
        return self.cells

    def heaviest(self, total: Tensor, count: int, memory: Memory) -> tuple[Tensor, Tensor]:
        """The places of the heaviest entries of a sum of tables, in order, and their estimates."""
        places = torch.empty(count, dtype=torch.int32, device=total.device)
        estimates = torch.empty(count, device=total.device)
        kernels.heaviest(total[:-1], self.sizes.rows, self.seed, self.n, places, estimates, memory)
        return places, estimates.nan_to_num_(0.0, 0.0, 0.0)  # where a table's sums overflowed, nothing is known


def _flag(acc: Acc, buffer: Tensor) -> None:
    buffer[-1:] = 0 if acc.flag is None else acc.flag


def values_at(acc: Acc, places: Tensor) -> Tensor:
    """What a rank has at these places; behind it, whether a gradient was not finite."""
    found = torch.empty(places.numel() + 1, device=places.device)
    torch.index_select(acc.residual, 0, places, out=found[:-1])
    _flag(acc, found)
    return found


def largest(places: Tensor, total: Tensor, k: int, memory: Memory) -> tuple[Tensor, Tensor]:
    """Of sums at these places the k largest, behind them the flags' sum: places and values."""
    device = places.device
    found, header = torch.empty(k + 1, device=device), torch.empty(2, dtype=torch.int32, device=device)
    local = torch.empty(k, dtype=torch.int32, device=device)
    kernels.take_topk(total[:-1].clone(), k, found[:-1], local, header, memory=memory)
    found[-1:] = total[-1:]
    return places.index_select(0, local), found


def make_update(acc: Acc, places: Tensor, total: Tensor, world: World, whole: bool = True) -> Update:
    """The update that has these sums at these places: every rank takes out what it has there, or, where the sums are
    estimates, its share of them. Where something is not finite, the update is not, and nothing is taken."""
    device, index = places.device, places.long()
    failed = (total[-1:] != 0) | ~total[:-1].isfinite().all()
    header = torch.empty(2, dtype=torch.int32, device=device)
    header[:1] = places.numel()
    header[1:] = failed
    update = acc.memory.lend(acc.residual.numel(), device)
    kernels.add_sparse(update.flat, total[:-1], places, header, 1 / world.size, update.marks)
    own = acc.residual.index_select(0, index)
    left = torch.zeros_like(own) if whole else own - update.flat.index_select(0, index)
    acc.residual.index_copy_(0, index, torch.where(failed, own, left))
    if acc.velocity is not None:
        acc.velocity.index_copy_(0, index, acc.velocity.index_select(0, index).masked_fill(~failed, 0.0))
    return update
