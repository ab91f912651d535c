"""Ascending indices below n in few bits: the Elias-Fano code. Its length depends only on n and on the number of indices.

The lowest bits of each index are stored as they are. The high parts that remain ascend too: the i-th index sets bit
(index >> low) + i of a bit row. Together an index takes at most 2 + log2(n / k) bits: 12 bits for one entry in a thousand,
instead of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def length(n: int, k: int) -> int:
    """Return the bytes of k packed indices below n."""
    low = _low_bits(n, k)
    return _bytes(low * k) + _bytes(_high_bits(n, k, low))


def pack(indices: Tensor, n: int) -> Tensor:
    """Pack k indices, ascending, distinct and below n, into uint8[length(n, k)]."""
    k = indices.numel()
    low, wide = _low_bits(n, k), indices.long()
    bits = (wide[:, None] >> torch.arange(low, device=indices.device)) & 1
    high = torch.zeros(_high_bits(n, k, low), dtype=torch.uint8, device=indices.device)
    high.index_fill_(0, (wide >> low) + torch.arange(k, device=indices.device), 1)  # high[...] = 1 would wait for the GPU
    return torch.cat([_to_bytes(bits.flatten().to(torch.uint8)), _to_bytes(high)])


def unpack(packed: Tensor, n: int, k: int) -> Tensor:
    """Unpack k indices as int64. Any bytes give k indices below n."""
    low = _low_bits(n, k)
    split = _bytes(low * k)
    lowest = _to_bits(packed[:split])[: low * k].view(k, low).long() << torch.arange(low, device=packed.device)
    high = _to_bits(packed[split:])[: _high_bits(n, k, low)]
    set_bits = torch.sort(high, descending=True, stable=True).indices[:k]  # nonzero() would wait for the GPU
    return ((set_bits - torch.arange(k, device=packed.device) << low) + lowest.sum(1)).clamp(0, n - 1)


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
