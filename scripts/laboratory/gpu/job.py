"""A rank of gpu_check: python -m laboratory.gpu.job DOOR --help. It trains without and with gradcomp, and compares the weights.

Under torchrun: DDP; or FSDP2, a compiled DDP model and a GradScaler (doors). Under horovodrun: stock Horovod.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
import gradcomp.fsdp
from laboratory import ranks
from laboratory.tasks import digits

# The steps of a training, and the pictures of a step.
STEPS, BATCH = 20, 64
EXACT, SPARSE = "topk:ratio=1,wire=exact", "topk:ratio=0.001"
# Where updates of all entries are exchanged, weights differ from those of a mean gradient by rounding, of at most so much; and
# where models compute in half precision, in which a last bit turns the next result.
ROUNDING, ROUNDING_OF_HALVES = 1e-5, 1e-3

# NCCL takes several ranks on one GPU if each is a host of its own, joined through the loopback interface.
RANK = os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0"))
NCCL = {"NCCL_HOSTID": f"rank{RANK}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

Made = tuple[nn.Module, Any]


class OnTwoStreams(nn.Sequential):
    """Layers that run on two streams in turn. Autograd then calls hooks on both."""

    def forward(self, x: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for i, layer in enumerate(self):
            before, now = (main, side) if i % 2 == 0 else (side, main)
            now.wait_stream(before)
            with torch.cuda.stream(now):
                x = layer(x)
        main.wait_stream(side)
        return x


class UnderAutocast(nn.Module):
    """A model that computes in half precision: float16 on a GPU, bfloat16 on a CPU."""

    def __init__(self, inside: nn.Module, device: str):
        super().__init__()
        self.inside, self._device = inside, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self._device, torch.float16 if self._device == "cuda" else torch.bfloat16):
            result: Tensor = self.inside(x)
        return result.float()


class Scaled:
    """An optimizer with a GradScaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler):
        self._optimizer, self._scaler = optimizer, scaler
        self.zero_grad, self.scale = optimizer.zero_grad, scaler.scale

    def step(self) -> None:
        """Make a step, unless a gradient has overflowed."""
        self._scaler.step(self._optimizer)
        self._scaler.update()


def by_ddp(device: str, spec: str, model: nn.Module, kind: str = "plain") -> Made:
    """Wrap a model in DDP: plain, compiled, or scaled by a GradScaler. Attach gradcomp unless DDP is to run by itself."""
    wrapped = DistributedDataParallel(UnderAutocast(model, device) if kind == "scaled" else model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0) if kind == "scaled" else None
    if spec not in ("ddp", "none"):
        gradcomp.ddp.attach(wrapped, spec)
    if scaler:
        return wrapped, Scaled(optimizer, scaler)
    if kind == "compiled":
        compiled: Any = torch.compile(wrapped, backend="inductor" if device == "cuda" else "eager")
        return compiled, optimizer
    return wrapped, optimizer


def by_fsdp(device: str, spec: str, model: nn.Module, of_replicas: bool) -> Made:
    """Give every layer to FSDP2: sharded over the ranks, or whole on each."""
    replicas = dist.get_world_size() if of_replicas else 1
    names, shape = ("replicate", "shard"), (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    layers = [layer for layer in model.children() if any(True for _ in layer.parameters())]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh if replicas > 1 else mesh["shard"])
    if spec != "none":
        gradcomp.fsdp.attach(model, spec)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def by_horovod(device: str, way: str, model: nn.Module) -> Made:
    """Make an optimizer on one of gradcomp's two routes, or Horovod's own."""
    import horovod.torch as hvd

    import gradcomp.horovod

    plain, named = torch.optim.SGD(model.parameters(), lr=0.05), list(model.named_parameters())
    spec, _, route = way.partition(", ")
    if way == "horovod":
        return model, hvd.DistributedOptimizer(plain, named_parameters=named)
    if route == "stock route":
        return model, hvd.DistributedOptimizer(plain, named, compression=gradcomp.horovod.Compression(spec, named))
    return model, gradcomp.horovod.DistributedOptimizer(plain, named, compression=spec)


class Kind(NamedTuple):
    """A kind of training, and its ways to exchange gradients.

    like: the first is the exchange without gradcomp, whose weights the others must give. near: must give them but for rounding.
    make: wraps a model and makes its optimizer; gets the device and the way, too.
    """

    like: list[str]
    near: list[str]
    others: list[str]
    make: Callable[[str, str, nn.Module], Made]


def routes(spec: str) -> list[str]:
    """Name both of gradcomp's routes under Horovod."""
    return [f"{spec}, {route} route" for route in ("stock", "direct")]


LIKE = ["none", "dense"]
DOORS = {
    "ddp": {"": Kind(["ddp", "dense"], [EXACT], [SPARSE, "sdagc", "orq:route=alltoall", "gtopk", "gs_sgd"], by_ddp)},
    "doors": {
        "FSDP2 over shards": Kind(LIKE, [], ["blocks"], partial(by_fsdp, of_replicas=False)),
        "FSDP2 over replicas": Kind(LIKE, [EXACT], [SPARSE], partial(by_fsdp, of_replicas=True)),
        "compiled": Kind(LIKE, [EXACT], [SPARSE], partial(by_ddp, kind="compiled")),
        "scaled": Kind(LIKE, [EXACT], [SPARSE], partial(by_ddp, kind="scaled")),
    },
    "horovod": {"": Kind(["horovod", *routes("dense")], routes(EXACT), routes(SPARSE), by_horovod)},
}


def train(model: nn.Module, optimizer: Any, device: torch.device) -> Tensor:
    """Train on pictures of this rank's own. Return the bits of the weights. An optimizer may scale the loss."""
    generator = torch.Generator().manual_seed(int(RANK))
    scale = getattr(optimizer, "scale", lambda loss: loss)
    for _ in range(STEPS):
        x = torch.rand(BATCH, 64, generator=generator).to(device)
        y = torch.randint(10, (BATCH,), generator=generator).to(device)
        optimizer.zero_grad()
        scale(cross_entropy(model(x), y)).backward()
        optimizer.step()
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters())
    return torch.cat([each.detach().reshape(-1) for each in whole]).cpu().view(torch.int32)


def compared(kind: str, own: Kind, agree: Callable[[str, Tensor], bool], options: argparse.Namespace) -> dict[str, bool]:
    """Train by every way of a kind, and return the checks. agree: tells whether all ranks have these weights."""
    device, checks = torch.device(options.device), dict[str, bool]()

    def run(way: str, streams: int = 1) -> Tensor:
        model = digits.model(width=options.width).to(device)
        wrapped, optimizer = own.make(options.device, way, model if streams == 1 else OnTwoStreams(*model))
        return train(wrapped, optimizer, device)

    of_kind = f"{kind}, " if kind else ""
    first, stock, found = run(own.like[0]), of_kind + own.like[0], dict[str, Tensor]()
    for way in (*own.like, *own.near, *own.others):
        name = of_kind + way
        found[way] = weights = run(way)
        checks[f"{name}: the ranks' weights are equal"] = agree(name, weights)
        if way in own.like:
            checks[f"{name}: weights equal those of {stock} by itself"] = torch.equal(weights, first)
        elif way in own.near:
            distance = (weights.view(torch.float32) - first.view(torch.float32)).abs().max()
            most = ROUNDING_OF_HALVES if kind == "scaled" else ROUNDING
            checks[f"{name}: weights equal those of {stock} by itself, but for rounding"] = bool(distance <= most)
    for way in own.near if device.type == "cuda" and not kind else ():
        with torch.cuda.stream(torch.cuda.Stream()):
            weights = run(way)
        for how, each in (("on another stream", weights), ("layers on two streams", run(way, streams=2))):
            checks[f"{way}, {how}: the ranks' weights are equal"] = agree(f"{way}, {how}", each)
            checks[f"{way}, {how}: weights equal those on the main stream"] = torch.equal(each, found[way])
    return checks


def agree_by_torch(named: str, weights: Tensor) -> bool:
    """Tell whether all ranks have these weights."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, weights)
    return all(torch.equal(weights, other) for other in gathered)


def agree_by_horovod(named: str, weights: Tensor) -> bool:
    """Tell whether all ranks have these weights."""
    import horovod.torch as hvd

    first = hvd.broadcast(weights, root_rank=0, name=f"first.{named}")
    same = hvd.allreduce(torch.tensor([float(torch.equal(weights, first))]), name=f"same.{named}", op=hvd.Sum)
    return bool(same == hvd.size())


@record  # torchrun shows the exception
def main() -> None:
    """Join the ranks, train by every kind under every way, and let rank 0 report."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.job", description=__doc__)
    parser.add_argument("door", choices=DOORS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="of torch's ranks")
    parser.add_argument("--width", type=int, default=digits.WIDTH)
    options = parser.parse_args()
    os.environ.update(NCCL)
    by_torch = options.door != "horovod"
    if by_torch:
        dist.init_process_group(options.backend)
    else:
        import horovod.torch as hvd

        hvd.init()
    torch.use_deterministic_algorithms(True)
    checks: dict[str, bool] = {}
    for kind, own in DOORS[options.door].items():
        checks |= compared(kind, own, agree_by_torch if by_torch else agree_by_horovod, options)
    if int(RANK) == 0:
        backend = {"backend": options.backend} if by_torch else {}
        ranks.report({**backend, "width": options.width, "steps": STEPS, "checks": checks})
    if by_torch:
        dist.destroy_process_group()
        os._exit(0)  # torch's threads and this process end in no fixed order, and now and then abort it after all is done
    hvd.barrier()  # a rank that shuts down ends Horovod for the others
    hvd.shutdown()


if __name__ == "__main__":
    main()
