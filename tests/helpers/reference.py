"""The kernels' definitions in plain torch, slow and obvious: the oracle of both twins."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# The largest magnitude in a residual: 0.4 % below the largest float.
LARGEST = 255 * 2.0**120


def flatten(grads: list[Tensor]) -> Tensor:
    """Join the gradients into one array of float32."""
    return torch.cat([grad.reshape(-1).float() for grad in grads])


def moments(x: Tensor) -> list[float]:
    """Compute the mean, the squared deviations from it, smallest, largest, and the number not 0, in float64."""
    if x.numel() == 0:
        return [0.0] * 5
    wide = x.double()
    mean = wide.mean()
    return [float(mean), float((wide - mean).square().sum()), float(x.min()), float(x.max()), float(x.count_nonzero())]


def above(residual: Tensor, sizes: list[int], thresholds: list[float], capacity: int) -> tuple[Tensor, int]:
    """Find the places of the entries that travel, in index order, and the number that pass."""
    threshold = torch.tensor(thresholds, device=residual.device).repeat_interleave(torch.tensor(sizes, device=residual.device))
    passing = (residual.abs() > threshold).nonzero().view(-1)
    order = torch.sort(residual[passing].abs(), descending=True, stable=True).indices[:capacity]
    return passing[order].sort().values, passing.numel()


def packed(values: Tensor, indices: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pack entries: the words of the blocks, the words of the two rows, and the values that the entries stand for."""
    capacity, numbers, places = values.numel(), values.double().tolist(), indices.tolist()
    low = low_bits(n, capacity)
    exponents = [_nearest_exponent(value) for value in numbers]
    words, said = [0] * -(-n // 65536), []
    for b in {place >> 16 for place in places}:
        mine = [exponent for exponent, place in zip(exponents, places, strict=True) if place >> 16 == b]
        words[b] = len(mine) | max(-126, *mine) + 126 << 24
    high_row = codes_row = 0
    for i, (value, exponent, place) in enumerate(zip(numbers, exponents, places, strict=True)):
        power = exponent - ((words[place >> 16] >> 24) - 126) + 31
        power = 0 if power < 1 or exponent < -126 else power
        negative = math.copysign(1, value) < 0
        said.append((-1.0 if negative else 1.0) * 2.0**exponent if power else 0.0)
        code = (power | negative << 5 if power else 0) << low | place % 2**low
        high_row |= 1 << (place >> low) + i
        codes_row |= code << i * (low + 6)
    rows = zip((high_row, codes_row), row_words(n, capacity), strict=True)
    split = [row >> 32 * word & 0xFFFFFFFF for row, count in rows for word in range(count)]
    return torch.tensor(words), torch.tensor(split), torch.tensor(said)


def low_bits(n: int, capacity: int) -> int:
    """Return the bits of a place that are not in the row of high parts."""
    return max(bits for bits in range(17) if bits == 0 or capacity * 2**bits <= n)


def row_words(n: int, capacity: int) -> tuple[int, int]:
    """Count the words of the two rows of packed entries."""
    low = low_bits(n, capacity)
    return -(-(((n - 1) >> low) + 1 + capacity) // 32), -(-capacity * (low + 6) // 32)


def compact_bytes(n: int, capacity: int) -> int:
    """Count a payload's bytes: the header's, a word for each block, and the two rows, each rounded up to 8."""
    return 8 + 8 * math.ceil(math.ceil(n / 65536) / 2) + 8 * math.ceil(sum(row_words(n, capacity)) / 2)


def coarse_bytes(n: int, capacity: int) -> int:
    """Count a payload's bytes: the header's, those of ascending indices, of two means for 256 entries, and of 2 bits each."""
    low = math.floor(math.log2(n // capacity))
    indices = math.ceil(low * capacity / 8) + math.ceil((capacity + ((n - 1) >> low) + 1) / 8)
    return 8 + sum(8 * math.ceil(size / 8) for size in (indices, 4 * math.ceil(capacity / 256), math.ceil(capacity / 4)))


def _nearest_exponent(value: float) -> int:
    """Return the exponent of the nearest power of two that a normal float can be; -127 where 0 is nearer. Ties go up."""
    if abs(value) < 2.0**-127:
        return -127
    below = math.frexp(abs(value))[1] - 1
    nearest = below + (abs(value) >= 1.5 * 2.0**below)
    return -126 if abs(value) >= 2.0**-127 and nearest < -126 else min(nearest, 127)


def topk(flat: Tensor, k: int) -> Tensor:
    """Find the places of the k entries of largest magnitude, ties to the lower index, in index order."""
    return torch.sort(flat.abs(), descending=True, stable=True).indices[:k].sort().values


def mix(x: np.ndarray | int) -> np.ndarray:
    """Hash 32-bit numbers."""
    x = np.asarray(x, np.uint64) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return x ^ x >> 16


def places(n: int, rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the column and the sign of each of n entries in a count sketch: two arrays of [rows, n]."""
    tiles = columns // 16
    drawn = start = int(mix(seed & 0xFFFFFFFF))
    steps: list[int] = []  # steps that permute the numbers below tiles
    while len(steps) < 32:
        drawn = int(mix(drawn + 1))
        step = drawn * tiles >> 32
        if math.gcd(step, tiles) == 1:
            steps.append(step)
    tile, lane = np.divmod(np.arange(n, dtype=np.uint64), 16)
    round_, inside = np.divmod(tile, tiles)
    column, sign = np.empty((rows, n), np.int64), np.empty((rows, n), np.float32)
    for row in range(rows):
        deal = mix(mix(start ^ (2 * row + 1)) ^ round_)
        column_tile = (np.array(steps, np.uint64)[deal % 32] * inside + (mix(deal) * tiles >> 32)) % tiles
        turn = mix(mix(start ^ (2 * row + 2)) + tile)
        column_lane = lane ^ turn % 16
        column[row] = column_tile * 16 + column_lane
        sign[row] = np.where(turn >> (31 - column_lane) & 1, -1, 1)
    return column, sign


def sketch(flat: Tensor, rows: int, columns: int, seed: int, scale: float = 1.0) -> Tensor:
    """Sum a count sketch: each entry times scale, in order, is added to one cell of each row."""
    table = np.zeros((rows, columns), np.float32)
    with np.errstate(over="ignore"):
        for cells, column, sign in zip(table, *places(flat.numel(), rows, columns, seed), strict=True):
            np.add.at(cells, column, sign * np.float32(scale) * flat.cpu().numpy())
    return torch.from_numpy(table).view(-1).to(flat.device)


def estimates(table: Tensor, rows: int, seed: int, n: int) -> Tensor:
    """Estimate each of n entries from a sketch: the median over the rows."""
    cells = table.cpu().numpy().reshape(rows, -1)
    column, sign = places(n, rows, cells.shape[1], seed)
    return torch.from_numpy(np.median(sign * np.take_along_axis(cells, column, 1), axis=0)).to(table.device)


def same(a: Tensor, b: Tensor) -> bool:
    """Compare to the last bit, NaNs and the sign of zero included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
