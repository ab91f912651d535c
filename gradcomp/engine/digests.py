"""Digests of weights, computed where they lie, by which ranks see that theirs are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.engine.slots import local
from gradcomp.networks.waits import in_words

# A digest is computed of so many entries at once.
PART = 2**20
# Odd, so that no change of one entry's bits is lost in a product modulo 2^64.
_FIRST, _SECOND, _PART_FACTOR = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x2545F4914F6CDD1D
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(weights: Mapping[str, Tensor], counts: bool = True) -> Tensor:
    """Compute 64 bits from the bits of each weight, on the first one's device. A change of one entry always changes them.

    Before them stands whether they count: 1 or 0. counts: False on a rank whose weights lag behind.
    """
    found = [_digest(local(weight.detach())) for weight in weights.values()]
    device = found[0].device if found else torch.device("cpu")
    return torch.stack([torch.tensor(int(counts), device=device), *(each.to(device) for each in found)])


def _digest(weight: Tensor) -> Tensor:
    words = torch.view_as_real(weight) if weight.is_complex() else weight
    words = words.reshape(-1).view(_WORDS[words.element_size()])
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    factors = _factors(min(PART, words.numel()), words.device)
    for part in words.split(PART):
        total = total * _PART_FACTOR + (part.long() * factors[: len(part)]).sum()
    return total


def _factors(count: int, device: torch.device) -> Tensor:
    """Return an odd factor for each place. They follow no line: changes that mirror one another must not cancel out."""
    mixed = torch.arange(1, count + 1, device=device) * _FIRST
    for shift in (30, 27):
        mixed = (mixed ^ (mixed >> shift)) * _SECOND
    return (mixed ^ (mixed >> 31)) | 1


def differences(names: Sequence[str], by_rank: Mapping[int, Sequence[int]]) -> str:
    """Say in words which ranks have other digests, as "rank 3 has other weights of 'a' than ranks 0 to 2"; "" if none has.

    The first layer is named, and the ranks that differ from most.
    """
    counted = {rank: own[1:] for rank, own in by_rank.items() if own[0]}
    different = [i for i in range(len(names)) if len({own[i] for own in counted.values()}) > 1]
    if not different:
        return ""
    groups: dict[int, list[int]] = {}
    for rank, own in counted.items():
        groups.setdefault(own[different[0]], []).append(rank)
    most = max(groups.values(), key=len)
    others = sorted(rank for group in groups.values() if group is not most for rank in group)
    have = "have" if len(others) > 1 else "has"
    return (
        f"{in_words(others)} {have} other weights of {names[different[0]]!r} than {in_words(most)} ({len(different)} of "
        f"{len(names)} layers differ)"
    )
