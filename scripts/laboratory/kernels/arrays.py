"""The names of the cases of `lab kernels`, and the arrays that they share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradcomp.native.memory import Memory

COPY, ADD, TORCH_TOPK, TORCH_STEP = "torch copy_", "torch add_", "torch top-k of |x|", "torch add_, top-k, gather, fill"
TAKE_TOPK, FEEDBACK, SIMULATED = "take_topk", "accumulate, take_topk", "Simulation step, topk"
SDAGC, SDAGC_SIMULATED = "accumulate, moments, take_above", "Simulation step, sdagc"
SKETCH, HEAVIEST = "sketch", "heaviest"
ORQ_3, ORQ_5, ORQ_9 = (f"ORQ-{levels}, round and add" for levels in (3, 5, 9))
BINGRAD_B = "BinGrad-b, round and add"
ROUND_3, ADD_3, ROUND_B = "ORQ-3, round", "ORQ-3, add", "BinGrad-b, round"
TORCH_SKETCH, TORCH_HEAVIEST = "torch sketch: tables of hashes, bincount", "torch heaviest: gather, sorting network, top-k"

# The share of the entries that sparse cases take.
RATIO = 0.001

# Ranks of the payloads that are added in one call.
MANY = 8


def layer_sizes(n: int, layers: int) -> list[int]:
    """Split n entries into layers of nearly the same size."""
    return [n // layers + (i < n % layers) for i in range(layers)]


class Arrays:
    """Arrays of n entries: inputs that take turns and are shared, and arrays that a case has for itself."""

    def __init__(self, n: int, device: torch.device, layers: int = 1):
        self.n, self.device, self.sizes = n, device, layer_sizes(n, layers)
        self.k = max(1, math.ceil(RATIO * n))
        torch.manual_seed(0)
        # Together they are larger than any cache.
        self.inputs = [torch.randn(n, device=device) for _ in range(self._turns())]
        self.pieces = [list(flat.split(self.sizes)) for flat in self.inputs]
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.memory = Memory()

    def _turns(self) -> int:
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.device.type == "cuda" else 2**26
        return max(2, min(64, math.ceil(4 * cache / (4 * self.n))))

    def input(self, i: int) -> Tensor:
        """Return the i-th call's input."""
        return self.inputs[i % len(self.inputs)]

    def grads(self, i: int) -> list[Tensor]:
        """Return the i-th call's input, cut into layers."""
        return self.pieces[i % len(self.pieces)]

    def zeros(self) -> Tensor:
        """Make an array of zeros."""
        return torch.zeros(self.n, device=self.device)

    def payload(self) -> dict[str, Any]:
        """Make arrays for k sparse entries."""
        return {
            "values": torch.zeros(self.k, device=self.device),
            "indices": torch.arange(self.k, dtype=torch.int32, device=self.device),
            "header": torch.tensor([self.k, 0], dtype=torch.int32, device=self.device),
        }
