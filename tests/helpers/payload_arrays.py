"""The arrays that kernels exchange, made for tests, and the bytes of payloads by a route."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradcomp.exchanges.rounded import GroupPartition

Arrays = dict[str, Tensor]
CPU = torch.device("cpu")


def flag_on(device: torch.device, value: int = 0) -> Tensor:
    """Make a flag."""
    return torch.tensor([value], dtype=torch.int32, device=device)


def to_take(k: int, device: torch.device = CPU) -> Arrays:
    """Make a payload of k entries with contents that no take leaves."""
    return {
        "values": torch.full((k,), 9.0, device=device),
        "indices": torch.full((k,), -1, dtype=torch.int32, device=device),
        "header": torch.full((2,), -1, dtype=torch.int32, device=device),
    }


def entries(
    values: Sequence[float], indices: Sequence[int], count: int | None = None, flag: int = 0, device: torch.device = CPU
) -> Arrays:
    """Make a payload of these entries. count: what its header says, if not their number."""
    return {
        "values": torch.tensor(values, device=device),
        "indices": torch.tensor(indices, dtype=torch.int32, device=device),
        "header": torch.tensor([len(values) if count is None else count, flag], dtype=torch.int32, device=device),
    }


def bytes_by(route: str, group: int, payload: Callable[[int], int]) -> Callable[[int, int, int], int]:
    """By alltoall a payload of the longest part to each other rank that has one, and one to all.

    payload: the bytes of so many entries.
    """

    def promised(n: int, rank: int, world: int) -> int:
        if route == "allgather":
            return payload(n)
        lengths = [GroupPartition(n, group, world).length(i) for i in range(world)]
        others = sum(length > 0 for i, length in enumerate(lengths) if i != rank)
        return (others + 1) * payload(max(lengths))

    return promised
