"""The all-gathers of weights that are sharded, in blocks of few bits.

A shard is rounded for the gather alone: its owner keeps it as it is, and so do optimizer and checkpoint, so that errors do not
add up. Every rank computes with the rounded weights, its own too, and so all with the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.compressors.blocks import Blocks
from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import Field, Form, Gather, bytes_of
from gradcomp.messages import payload as payloads
from gradcomp.messages.rounding import BlockRounding
from gradcomp.native import kernels
from gradcomp.networks import Network

# The types of weights that are gathered rounded.
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Parameters of fewer entries in a shard travel whole, and so do those of one dimension: norms and biases.
SMALLEST = 1024

_NOT_BLOCKS = (
    "weights= got {spec}; weights travel as blocks, such as weights='blocks:bits=8': every rank needs all of them in every "
    "gather, and nothing may wait"
)


def bits_of(weights: Compressor) -> int:
    """Return the bits in which weights travel."""
    if not isinstance(weights, Blocks):
        raise ValueError(_NOT_BLOCKS.format(spec=weights))
    return weights.bits


@dataclass
class Division:
    """The entries of each parameter in a module's shards, which are equally long, and which of them are rounded."""

    sizes: list[int]
    are_rounded: list[bool]

    @functools.cached_property
    def rounded(self) -> list[int]:
        return [size for size, is_rounded in zip(self.sizes, self.are_rounded, strict=True) if is_rounded]

    @functools.cached_property
    def whole(self) -> list[int]:
        return [size for size, is_rounded in zip(self.sizes, self.are_rounded, strict=True) if not is_rounded]

    @classmethod
    def of(cls, shards: Sequence[tuple[int, int]]) -> Division:
        """Choose the parameters to round. shards: how many entries and dimensions each parameter has."""
        return cls([size for size, _ in shards], [size >= SMALLEST and dimensions > 1 for size, dimensions in shards])

    def split(self, shard: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the rounded parameters in a shard, and of the others."""
        views = [*zip(shard.split_with_sizes(self.sizes), self.are_rounded, strict=True)]
        return [each for each, is_rounded in views if is_rounded], [each for each, is_rounded in views if not is_rounded]


class GatheredWeights:
    """The all-gathers of one model. bits: of an entry. network: of the ranks with other shards.

    sent: bytes since the last step, to all other ranks; sent_in_step: in the last one.
    """

    def __init__(self, bits: int, network: Network):
        self._bits, self._network = bits, network
        self.sent = self.sent_in_step = 0

    def __str__(self) -> str:
        return f"blocks:bits={self._bits}"

    def end_step(self) -> None:
        """End a step's figures."""
        self.sent_in_step, self.sent = self.sent, 0

    def gather(self, module: int, shard: Tensor, result: Tensor, division: Division) -> None:
        """Gather the shards of a module's weights into the result, rank by rank. shard: this rank's, a part of the result."""
        own, own_whole = division.split(shard)
        rounding, to, given = BlockRounding(self._bits, sum(division.rounded)), list[Tensor](), list[Tensor]()
        form: Form = (*rounding.form, Field("whole", shard.dtype, sum(division.whole)))
        payload = payloads.empty(form, shard.device)
        _copy(payload["whole"].split_with_sizes(division.whole), own_whole)
        exact = torch.empty(sum(division.rounded), device=shard.device)
        kernels.flatten(own, exact)
        rounding.take(exact, None, None, key=0, payload=payload)
        request = Gather(payload)
        self.sent += bytes_of(request) * (self._network.world.size - 1)
        received = self._network.start(request, f"weights of module {module}")()
        assert isinstance(received, list)
        for part, each in zip(result.view(len(received), -1), received, strict=True):
            rounded, whole = division.split(part)
            rounding.read(each, rounded)
            to += whole
            given += each["whole"].split_with_sizes(division.whole)
        _copy(to, given)


def _copy(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_([*to], [*given])
