"""Values in two bits: the sign, and one of two means for the magnitude, which GROUP values in a row share.

The magnitudes of a group above their mean have one mean, and the others the other. The sum of squared errors is the sum of the
squares less that of the means: values never end farther from the true ones than zeros would be. Means travel as bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 256


def lengths(k: int) -> tuple[int, int]:
    """Return the number of means of k values, and the bytes of their codes."""
    return 2 * -(-k // GROUP), -(-k // 4)


def pack(values: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means and the codes of values. there: which of them count. A value of 0 stays 0."""
    sizes, counts = _by_group(values.abs().double().masked_fill(~there, 0.0)), _by_group(there)
    of_group = counts.sum(1, keepdim=True)
    has_zero = (counts & (sizes == 0)).any(1, keepdim=True)
    upper = sizes > (sizes.sum(1, keepdim=True) / of_group.clamp(min=1)).masked_fill(has_zero, 0.0)
    of_upper = upper.sum(1, keepdim=True)
    sums = torch.cat([(sizes * ~upper).sum(1, keepdim=True), (sizes * upper).sum(1, keepdim=True)], 1)
    means = sums / torch.cat([of_group - of_upper, of_upper], 1).clamp(min=1)
    codes = upper.flatten()[: len(values)].to(torch.uint8) + 2 * (values < 0).to(torch.uint8)
    fours = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return means.flatten().bfloat16(), (fours << _shifts(codes)).sum(1, dtype=torch.uint8)


def unpack(means: Tensor, codes: Tensor, k: int) -> Tensor:
    """Return the k values that means and codes stand for. Any bytes give values."""
    code = ((codes[:, None] >> _shifts(codes)) & 3).flatten()[:k].long()
    group = torch.arange(k, device=codes.device) // GROUP
    sizes = means.float().index_select(0, 2 * group + (code & 1))
    return torch.where(code > 1, -sizes, sizes)


def _by_group(each: Tensor) -> Tensor:
    return torch.nn.functional.pad(each, (0, -len(each) % GROUP)).view(-1, GROUP)


def _shifts(codes: Tensor) -> Tensor:
    return 2 * torch.arange(4, dtype=torch.uint8, device=codes.device)
