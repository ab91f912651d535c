"""The base of algorithms that use count sketches: their knobs, the table, and exact values at indices that all ranks know."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout, Steps, Traits
from gradcomp.core.requests import Requests, World, gather
from gradcomp.exchanges import routes
from gradcomp.knobs import knob
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import are_outside, check_indices, count_of, ratio_knob
from gradcomp.native import kernels
from gradcomp.native.extension import SEARCH_BLOCK, TILE
from gradcomp.native.memory import Memory, Update

# The default number of columns for each entry sent.
COLUMNS_PER_ENTRY = 5

# The fewest entries that a rank looks for in a part of a search. Parts' shares of few heavy entries would be too unequal.
LEAST_OF_A_PART = 256


class Sizes(NamedTuple):
    """The sizes for a bucket: entries sent (k), entries with exact values (candidates), and the table's rows and columns."""

    k: int
    candidates: int
    rows: int
    columns: int

    @property
    def cells(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Sketcher(Compressor):
    """Sends the k entries with the largest sums over the ranks: k = max(1, ceil(ratio * n)) of the model's n entries."""

    ratio: float = ratio_knob()
    candidates: int = knob(4, "candidates with exact values for each entry sent; higher = fewer large ones missed", least=1)
    rows: int = knob(5, "rows of the table; higher = better estimates, more bytes", choices=(3, 5, 7, 9))
    columns: int = knob(0, "columns of the table; 0 = from compression, or five for each entry sent", least=0, multiple=TILE)
    compression: float = knob(0.0, "compression ratio in bytes, above 1, that sets columns; 0 = unused", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns and self.compression:
            raise ValueError(f"{self}: compression sets the number of columns; remove columns or compression")
        if 0 < self.compression <= 1:
            raise ValueError(f"{self.name}: compression={self.compression} must be above 1, or 0 to leave it unused")
        if self.compression * self.candidates * self.ratio >= 1:
            raise ValueError(f"{self}: candidates={self.candidates} leave no room for a table; lower ratio={self.ratio}")

    @property
    def traits(self) -> Traits:
        return Traits(whole_model=True, selects=True, share=self.ratio)

    def sizes(self, n: int) -> Sizes:
        k = count_of(self.ratio, n)
        candidates = min(n, self.candidates * k)
        columns = self.columns or COLUMNS_PER_ENTRY * k
        if self.compression:
            indices = self.indices_sent(candidates)
            columns = math.floor((n / self.compression - candidates - indices - 1) / self.rows)
        return Sizes(k, candidates, self.rows, max(1, columns // TILE) * TILE)

    def indices_sent(self, candidates: int) -> int:
        """Return the most numbers that a rank sends to say where its part's candidates are."""
        return 0

    def init(self, layout: Layout, seed: int) -> SketchTable:
        return SketchTable(layout.total, self.sizes(layout.total), seed, layout.device)

    def exchange(self, acc: Acc, state: SketchTable, world: World) -> Steps:
        if not state.is_smaller:
            state.buffer = torch.empty_like(acc.residual) if state.buffer is None else state.buffer
            return (yield from routes.send_all(acc, world, state.buffer))
        return (yield from self.exchange_sketch(acc, state, world))

    @abstractmethod
    def exchange_sketch(self, acc: Acc, table: SketchTable, world: World) -> Steps:
        """Exchange the heaviest entries, found with a sketch."""


def divided(count: int, ranks: int) -> int:
    """Return how many of the heaviest entries each rank looks for; 0 if every rank looks for all of them."""
    each = -(-count // ranks)
    return each if ranks > 1 and each >= LEAST_OF_A_PART else 0


class SketchTable:
    """A bucket's count sketch. All ranks read the same indices from the sum of their tables."""

    def __init__(self, n: int, sizes: Sizes, seed: int, device: torch.device):
        self.n, self.sizes, self.seed = n, sizes, seed
        self.is_smaller = sizes.cells + sizes.candidates < n  # than a dense exchange
        self.cells = torch.empty(sizes.cells + 1 if self.is_smaller else 0, device=device)
        self.buffer: Tensor | None = None

    def share(self, world: World) -> float:
        """Return the factor of a sketched entry: a power of two, with which no cell of a sum of tables can overflow."""
        rounds = -(-self.n // self.sizes.columns)  # the most entries in a cell
        return world.share * 2.0 ** -rounds.bit_length()

    def sketch(self, acc: Acc, world: World) -> Tensor:
        """Sketch shares of this rank's residual. The flag for a gradient that is not finite follows the cells."""
        kernels.sketch(acc.residual, self.sizes.rows, self.seed, self.cells[:-1], self.share(world))
        _write_flag(acc, self.cells)
        return self.cells

    def heaviest(self, total: Tensor, count: int, memory: Memory, part: int = 0, parts: int = 1) -> Tensor:
        """Return the indices of the heaviest entries in a sum of tables, or in a part of it, in ascending order."""
        indices = torch.empty(count, dtype=torch.int32, device=total.device)
        estimates = torch.empty(count, device=total.device)
        sizes = (self.sizes.rows, self.seed, self.n)
        kernels.heaviest(total[:-1], *sizes, indices, estimates, memory, part=part, parts=parts)
        return indices

    def search(self, total: Tensor, count: int, memory: Memory, world: World) -> Requests[Tensor]:
        """Return the indices of about as many heaviest entries, the same on all ranks.

        Each rank searches a part, if the entries are many. A part has small blocks from all layers, and so about its share of
        the heaviest entries.
        """
        each, parts = divided(count, world.size), world.size
        if not 0 < each <= self.n // (SEARCH_BLOCK * parts) * SEARCH_BLOCK:
            return self.heaviest(total, count, memory)
        replies = yield from gather(payloads.wrap(self.heaviest(total, each, memory, world.rank, parts)))
        for rank, reply in enumerate(replies):
            check_indices(reply["bytes"], self.n, f"rank {rank}")
        return torch.cat([reply["bytes"] for reply in replies])


def _write_flag(acc: Acc, buffer: Tensor) -> None:
    """Write acc's flag into the last entry of a buffer."""
    buffer[-1:] = 0 if acc.flag is None else acc.flag


def values_at(acc: Acc, indices: Tensor, world: World) -> Tensor:
    """Return shares of the residual's values at these indices.

    The flag for a gradient that is not finite, or for indices outside the bucket, follows them.
    """
    n = acc.residual.numel()
    found = torch.empty(indices.numel() + 1, device=indices.device)
    torch.index_select(acc.residual, 0, indices.clamp(0, n - 1), out=found[:-1])
    found.mul_(world.share)
    _write_flag(acc, found)
    found[-1:] += are_outside(indices, n).any()
    return found


def select_largest(indices: Tensor, total: Tensor, k: int, memory: Memory) -> tuple[Tensor, Tensor]:
    """Select the k largest of the sums. Return their indices, and their values followed by the sum of the flags."""
    device = indices.device
    found, header = torch.empty(k + 1, device=device), torch.empty(2, dtype=torch.int32, device=device)
    local = torch.empty(k, dtype=torch.int32, device=device)
    kernels.take_topk(total[:-1].clone(), k, found[:-1], local, header, memory=memory)
    found[-1:] = total[-1:]
    return indices.index_select(0, local), found


def make_update(acc: Acc, indices: Tensor, total: Tensor, world: World) -> Update:
    """Make the update from sums at these indices, and take all that this rank has there out of acc.

    The update is not finite and nothing is taken if a gradient or a sum is not finite, or if an index is outside the bucket.
    total: sums of shares, followed by the sum of the flags.
    """
    device, n = indices.device, acc.residual.numel()
    failed = (total[-1:] != 0) | ~total[:-1].isfinite().all() | are_outside(indices, n).any()
    index = indices.clamp(0, n - 1).long()
    header = torch.empty(2, dtype=torch.int32, device=device)
    header[:1] = indices.numel()
    header[1:] = failed
    update = acc.memory.lend(n, device)
    kernels.add_sparse(update.flat, total[:-1], indices, header, world.mean_of_shares, update.marks)
    values = acc.residual.index_select(0, index)
    acc.residual.index_copy_(0, index, torch.where(failed, values, 0.0))
    if acc.ages is not None:
        kernels.note_sent(acc.ages, index, ~failed.expand(len(index)))
    return update
