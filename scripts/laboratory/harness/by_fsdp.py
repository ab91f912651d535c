"""Training through FSDP2, over shards, over replicas, or both, by each way that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradcomp.fsdp
from laboratory.harness import by_ddp, ways
from laboratory.harness.ways import Fitted


class Door(by_ddp.Door):
    """The ranks of torch.distributed, with a mesh of replicas and shards. shards: of a replica; 0: one on each rank."""

    def __init__(self, shards: int, backend: str = "gloo"):
        super().__init__(backend)
        self._shards = shards or self.size

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int, clip: float) -> Fitted:
        """Fit a way to a model and its optimizer. A module of each sequence or list is sharded by itself. No way clips."""
        name, _ = ways.other(way) or ("", 1.0)
        entries, replicas = sum(parameter.numel() for parameter in model.parameters()), self.size // self._shards
        mesh = init_device_mesh(
            next(model.parameters()).device.type, (replicas, self._shards), mesh_dim_names=("replicate", "shard")
        )
        if name == "none" or replicas == 1:  # then shards alone
            mesh = mesh["shard"]
        mixed, halved = name.startswith(("mixed", "weights")), name.endswith("bf16")
        reduced = torch.bfloat16 if halved else torch.float32 if mixed else None
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=reduced)
        sequences = [each for each in model.modules() if isinstance(each, (nn.Sequential, nn.ModuleList))]
        parts = [part for sequence in sequences for part in sequence if any(True for _ in part.parameters())]
        for part in (*reversed(parts), model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer.param_groups[0]["params"] = [*model.parameters()]
        if name in ("", "weights"):
            weights = f"blocks:bits={ways.weight_bits(way)}" if name else None
            handle = gradcomp.fsdp.attach(model, "blocks" if name else way, weights=weights, seed=seed)
            return Fitted(model, optimizer, lambda: int(handle.stats()["bytes_sent"]), handle.stats)
        for module in model.modules():
            if isinstance(module, FSDPModule) and name in _REDUCTIONS:
                reduction: Any = _REDUCTIONS[name]()
                module.set_custom_reduce_scatter(reduction)
        sent = 0 if name == "none" else entries - entries // self._shards + (entries // self._shards if replicas > 1 else 0)
        return Fitted(model, optimizer, lambda: (2 if halved else 4) * sent)


class Own:
    """A reduce-scatter that exchanges nothing: each rank keeps its own gradients of its part."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce the gradients of a module."""
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


class AllToAll(Own):
    """A reduce-scatter by an all-to-all and a mean, which FSDP2 asks for: each rank sends the others their parts."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.mean(received.view(group.size(), -1), 0, out=output_tensor)


_REDUCTIONS: dict[str, type[Own]] = {"none": Own, "alltoall": AllToAll, "mixed-alltoall": AllToAll}
