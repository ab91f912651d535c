"""What all ranks know of entries at the same places, and how they come to know it: as they are, or from codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.compressors.lgc.autoencoder import Autoencoder, mean_of, own_of
from gradcomp.compressors.lgc.code_error import Verdict
from gradcomp.compressors.lgc.common_places import Support
from gradcomp.messages.payload import whole
from gradcomp.requests import Asking, World, gather, reduce

FURTHEST = 1000.0
"""Root mean squares: beyond so many, entries are coded as if they were there."""
LARGEST = 6e4
"""What half precision holds of a number of a code."""
LEAST = 32
"""Entries of a row that are learned from together, where so many are."""


class Innovations(NamedTuple):
    """Of every rank the entries that it sent as they are: at common places, [ranks, rows, k]; and those at other places."""

    inside: Tensor
    outside: Sequence[tuple[Tensor, Tensor]]


class Said(NamedTuple):
    """Of entries at common places, the mean over the ranks as all of them are told it, and what stays with this rank."""

    mean: Tensor
    left: Tensor


class Rows(NamedTuple):
    """This rank's entries at common places, [rows, k]."""

    values: Tensor
    support: Support
    world: World
    told: Innovations | None = None

    @property
    def normal(self) -> Tensor:
        """In units of what their leaders have."""
        return self.values / self.support.scales

    @property
    def beside(self) -> Tensor | None:
        """What decoders are told beside a code."""
        if self.told is None:
            return None
        return self.from_leaders(self.told.inside / self.support.scales).clamp(-FURTHEST, FURTHEST)

    def from_leaders(self, everyone: Tensor) -> Tensor:
        """[ranks, rows, k] as [rows, ranks, k], of which in each row the leader is first, and who comes after it next."""
        ranks, rows, _ = everyone.shape
        after = torch.arange(ranks, device=everyone.device)
        order = (self.support.leaders[0] + after[:rows, None] + after) % ranks  # one row's leader comes after the other's
        return everyone.transpose(0, 1).gather(1, order[:, :, None].expand(-1, -1, everyone.shape[2]))

    @property
    def decoders(self) -> list[int]:
        """Row by row, where there is one for every rank, the one that says what this rank has."""
        return [(self.world.rank - leader) % self.world.size for leader in self.support.leaders]

    def own(self, said: Tensor) -> Tensor:
        """Of what decoders say, [rows, decoders, k], what is about this rank's entries."""
        return own_of(said, [decoder % said.shape[1] for decoder in self.decoders])

    def some(self, which: slice, where: slice) -> Rows:
        """Some rows, as far as some of their entries."""
        places, scales, leaders, _ = self.support
        told = None if self.told is None else Innovations(self.told.inside[:, which, where], [])
        return Rows(self.values[which, where], Support(places[which, where], scales[which], leaders[which]), self.world, told)

    def settle(self, residual: Tensor, velocity: Tensor | None, update: Tensor, said: Said, verdict: Verdict) -> None:
        """Makes what was said the update, if it is good, and leaves what it left. Where a gradient was not finite, the update
        is not, and nothing was taken."""
        taken = verdict.good & ~verdict.failed
        mean = torch.where(verdict.failed, torch.nan, torch.where(verdict.good, said.mean, 0.0))
        self.support.write(update, mean)
        self.support.write(residual, torch.where(taken, said.left, self.values))
        if velocity is not None:
            self.support.write(velocity, self.support.of(velocity).masked_fill(taken, 0.0))
        for rank, (places, values) in enumerate([] if self.told is None else self.told.outside):
            went = values.masked_fill(verdict.failed, 0.0)
            update.index_add_(0, places, went / self.world.size)
            if rank == self.world.rank:
                residual.index_add_(0, places, -went)
                if velocity is not None:
                    velocity.index_copy_(0, places, velocity.index_select(0, places).masked_fill(went != 0, 0.0))


def as_they_are(rows: Rows) -> Asking[Tensor]:
    """Every rank's entries, [ranks, rows, k]."""
    came = yield from gather(whole(rows.values.flatten()))
    return torch.stack([reply["bytes"].view(rows.values.shape) for reply in came])


def exactly(rows: Rows, everyone: Tensor) -> Said:
    """What is said by the entries themselves."""
    return Said(mean_of(everyone), torch.zeros_like(rows.values))


def from_mean_code(rows: Rows, coder: Autoencoder, half: bool) -> Asking[Said]:
    """Every rank sends codes of its own, and all decode their mean; each is left with what its own codes miss."""
    codes = encoded(coder, rows.normal)
    if half:
        codes = codes.half()
        came = yield from gather(whole(codes.flatten()))
        mean = mean_of(torch.stack([reply["bytes"].double() for reply in came]))
    else:
        mean = yield from reduce(codes.flatten().clone(), 1 / rows.world.size)
    entries = rows.values.shape[1]
    only = [0] * len(codes)
    own, all_ranks = (coder.decode_alike(each, entries, only) * rows.support.scales for each in (codes, mean.view(codes.shape)))
    return Said(all_ranks, rows.values - own)


def from_led_codes(rows: Rows, coder: Autoencoder) -> Said:
    """The leaders' codes have come with the places: every rank's entries are told from them, by a decoder of its own."""
    assert rows.support.codes is not None
    scales = rows.support.scales
    own, mean = coder.decode_led(rows.support.codes, rows.values.shape[1], rows.decoders, rows.beside)
    return Said(mean * scales, rows.values - own * scales)


def encoded(coder: Autoencoder, rows: Tensor) -> Tensor:
    """The code of entries, as large as half precision can hold it."""
    return coder.encode(rows.clamp(-FURTHEST, FURTHEST)).clamp(-LARGEST, LARGEST)


def learn(rows: Rows, everyone: Tensor, coder: Autoencoder, window: int, turn: int) -> tuple[Tensor, Tensor]:
    """A step of the autoencoder down its loss, on as many of all ranks' entries as the window has room for. Of these, this
    rank's, and what codes would have missed of them."""
    ranks, count, k = everyone.shape
    high = min(count, max(1, window // (ranks * LEAST)))
    wide = min(k, max(LEAST, window // (ranks * high)))
    which, where = _some(turn, count, high), _some(turn, k, wide)
    part = rows.some(which, where)
    seen, beside = (everyone[:, which, where] / part.support.scales).clamp(-FURTHEST, FURTHEST), part.beside
    own = seen[rows.world.rank]
    if beside is None:
        said = coder.decode(encoded(coder, own), wide)
        coder.learn(lambda weights: coder.loss_of_mean(seen, weights))
    else:
        led = part.from_leaders(seen)
        said = coder.decode(encoded(coder, led[:, 0]), wide, beside)
        coder.learn(lambda weights: coder.loss_of_each(led, beside, weights))
    return own, own - part.own(said)


def _some(turn: int, of: int, how_many: int) -> slice:
    """As many neighbours, at another place each time."""
    begin = turn * 0x9E3779B1 % (of - how_many + 1)
    return slice(begin, begin + how_many)
