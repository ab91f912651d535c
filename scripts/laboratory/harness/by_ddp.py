"""Training through DistributedDataParallel, by each way that it has."""

# No `from __future__ import annotations` here: it makes annotations strings, and torch compares a hook's with types.

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.local import LocalSteps
from laboratory.harness import ways
from laboratory.harness.ways import Fitted
from laboratory.tasks.task import clip as shorten

# The hook starts later reductions of a bucket from gloo's threads. With several buckets their order differs between ranks, and
# gloo adds up tensors of different buckets, or aborts. So it gets one bucket, of up to so many megabytes.
ONE_BUCKET = 1e4


class Door:
    """The ranks of torch.distributed, on gloo or NCCL. They join once, and may have several doors."""

    def __init__(self, backend: str = "gloo") -> None:
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timedelta(minutes=10))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._by_gloo = backend == "gloo"
        self.figures = dist.group.WORLD if self._by_gloo else dist.new_group(backend="gloo")  # for figures in main memory

    def means(self, own: list[float], name: str) -> list[float]:
        """Return the means of figures over the ranks."""
        mean = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(mean, group=self.figures)
        return [float(figure) / self.size for figure in mean]

    def end(self) -> None:
        """Leave the ranks, when all of them are done."""
        dist.barrier()
        dist.destroy_process_group()

    def fit(self, way: str, model: nn.Module, optimizer: Any, seed: int, clip: float) -> Fitted:
        """Fit a way to a model and its optimizer."""
        found = ways.other(way)
        if (local := ways.local_of(way)) is not None:
            every, rate, momentum, spec = local
            steps = LocalSteps(model, optimizer, spec, every=every, outer_lr=rate, outer_momentum=momentum, seed=seed)
            return Fitted(model, steps, lambda: int(steps.stats()["bytes_sent_total"] // max(1, steps.stats()["steps"])))
        if found is None:
            wrapped = DistributedDataParallel(model)
            handle = gradcomp.ddp.attach(wrapped, way, seed=seed)
            return Fitted(wrapped, optimizer, lambda: int(handle.stats()["bytes_sent"]), handle.stats)
        name, number = found
        if name == "none":
            return Fitted(model, optimizer, lambda: 0)
        entries = sum(parameter.numel() for parameter in model.parameters())
        in_order = clip or (name == "powersgd" and self._by_gloo)
        # Old torch takes no None.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET) if in_order else DistributedDataParallel(model)
        state, hook, sent = None, _HOOKS[name], (2 if name in ("bf16", "fp16") else 4) * entries // int(number)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD,
                matrix_approximation_rank=int(number),
                start_powerSGD_iter=ways.powersgd_from(way),
                random_seed=seed,
            )
        if clip or name != "stock":
            wrapped.register_comm_hook(state, clipped(hook, clip))
        return Fitted(wrapped, optimizer, Sent(state, entries) if state else lambda: sent)


class Sent:
    """The bytes that PowerSGD's hook sends in a step, of those since the last call, from what it counts when it compresses."""

    def __init__(self, state: powerSGD_hook.PowerSGDState, entries: int):
        self._state, self._entries, self._before, self._steps = state, entries, 0, state.start_powerSGD_iter

    def __call__(self) -> int:
        total, steps = self._state.total_numel_after_compression, max(self._state.start_powerSGD_iter, self._state.iter)
        sent, in_steps = total - self._before, steps - self._steps
        self._before, self._steps = total, steps
        return 4 * (sent // in_steps if sent else self._entries)


def clipped(hook: Any, longest: float = 0.0) -> Any:
    """Wrap a hook. DistributedDataParallel knows torch's by name and refuses some on gloo, which can reduce their types."""

    def shortened(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        shorten((bucket.buffer(),), longest)  # with a length to keep, the bucket has the whole gradient of this rank
        found: torch.futures.Future[Tensor] = hook(state, bucket)
        return found

    return shortened


_HOOKS = {
    "stock": default_hooks.allreduce_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
}
