"""The yardsticks of `lab kernels`: the same work in plain torch, and in CuPy where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from gradcomp.compressors.gs_sgd import GsSgd
from laboratory.kernels.arrays import ADD, COPY, RATIO, TORCH_HEAVIEST, TORCH_SKETCH, TORCH_STEP, TORCH_TOPK, Arrays
from laboratory.timing import Case


def yardsticks(arrays: Arrays) -> list[Case]:
    """Return copies, sums and top-k of plain torch, and on a GPU its sketches and CuPy's selection."""
    n, target, acc = arrays.n, arrays.zeros(), arrays.zeros()

    def take(value: Tensor) -> Tensor:
        indices = torch.topk(value.abs(), arrays.k)[1]
        taken = value[indices]
        value.index_fill_(0, indices, 0)
        return taken

    found = [
        Case(COPY, lambda i: target.copy_(arrays.input(i)), 8 * n),
        Case(ADD, lambda i: acc.add_(arrays.input(i)), 12 * n),
        Case(TORCH_TOPK, lambda i: torch.topk(arrays.input(i).abs(), arrays.k)),
    ]
    residual = arrays.zeros()
    found.append(Case(TORCH_STEP, lambda i: take(residual.add_(arrays.input(i)))))
    if arrays.device.type == "cuda":
        found += _sketches(arrays) + ([_cupy_topk(arrays)] if importlib.util.find_spec("cupy") else [])
    return found


def _sketches(arrays: Arrays) -> list[Case]:
    """Write a count sketch plainly: for each row a table of all entries' columns, and one of their signs."""
    sizes = GsSgd(ratio=RATIO).sizes(arrays.n)
    columns = sizes.cells // sizes.rows
    places = [torch.randint(columns, (arrays.n,), device=arrays.device) for _ in range(sizes.rows)]
    signs = [torch.randint(2, (arrays.n,), device=arrays.device, dtype=torch.int8) * 2 - 1 for _ in range(sizes.rows)]
    rows = list(zip(places, signs, strict=True))

    def sketch(i: int) -> Tensor:
        return torch.stack([torch.bincount(to, arrays.input(i) * sign, minlength=columns) for to, sign in rows])

    table = sketch(0)

    def heaviest(i: int) -> Tensor:
        estimates = median_of_five(*(row[to] * sign for row, (to, sign) in zip(table, rows, strict=True)))
        return torch.topk(estimates.abs(), arrays.k)[1]

    return [Case(TORCH_SKETCH, sketch), Case(TORCH_HEAVIEST, heaviest)]


def median_of_five(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
    """Find the median of five numbers, entry by entry, by a network of ten exchanges' halves.

    torch's own median sorts every entry's five numbers by themselves, and takes many times as long.
    """
    low = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))  # neither the smallest of the first four is it,
    high = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))  # nor the largest
    return torch.maximum(torch.minimum(low, high), torch.minimum(torch.maximum(low, high), e))


def _cupy_topk(arrays: Arrays) -> Case:
    cupy: Any = importlib.import_module("cupy")
    inputs = [cupy.from_dlpack(flat) for flat in arrays.inputs]
    return Case(
        "CuPy argpartition of -|x|", lambda i: cupy.argpartition(-cupy.abs(inputs[i % len(inputs)]), arrays.k)[: arrays.k]
    )
