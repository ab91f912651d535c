"""Ascending places among n as few bits: Elias and Fano's code, whose length depends on how many there are alone.

Of each place the lowest bits stand as they are. The others ascend, too: they are a row of bits in which place i sets bit
(place >> low) + i. Together at most 2 + log2(n / k) bits a place: 12 for one entry in a thousand, where 32 would be plain.
"""

from __future__ import annotations

import torch
from torch import Tensor


def length(n: int, k: int) -> int:
    """Bytes that k places among n take."""
    low = _low_bits(n, k)
    return _bytes(low * k) + _bytes(_high_bits(n, k, low))


def pack(places: Tensor, n: int) -> Tensor:
    """Whole numbers, ascending and different, to uint8[length(n, k)]."""
    k = places.numel()
    low, wide = _low_bits(n, k), places.long()
    bits = (wide[:, None] >> torch.arange(low, device=places.device)) & 1
    high = torch.zeros(_high_bits(n, k, low), dtype=torch.uint8, device=places.device)
    high[(wide >> low) + torch.arange(k, device=places.device)] = 1
    return torch.cat([_to_bytes(bits.flatten().to(torch.uint8)), _to_bytes(high)])


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """The places again, int64. Whatever the bytes are, k of them, each below n."""
    low = _low_bits(n, k)
    split = _bytes(low * k)
    lowest = _to_bits(packed[:split])[: low * k].view(k, low).long() << torch.arange(low, device=packed.device)
    high = _to_bits(packed[split:])[: _high_bits(n, k, low)]
    first = torch.sort(high, descending=True, stable=True).indices[:k]  # where bits are set, without asking how many are
    return ((first - torch.arange(k, device=packed.device) << low) + lowest.sum(1)).clamp(0, n - 1)


def _low_bits(n: int, k: int) -> int:
    return max(1, n // k).bit_length() - 1 if k else 0


def _high_bits(n: int, k: int, low: int) -> int:
    return k + (max(n - 1, 0) >> low) + 1


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _to_bytes(bits: Tensor) -> Tensor:
    eights = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (eights << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _to_bits(packed: Tensor) -> Tensor:
    return ((packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).flatten()
