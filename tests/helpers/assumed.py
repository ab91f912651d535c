"""What the pages' blocks of Python assume: names that a block uses without making them are made when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Maker = Callable[["Assumed"], Any]


class Assumed(dict[str, Any]):
    """The names of a page's blocks. A name that no block has made yet comes from its maker."""

    def __init__(self, makers: Mapping[str, Maker]):
        super().__init__()
        self._makers = makers

    def __missing__(self, name: str) -> Any:
        if name not in self._makers:
            raise KeyError(name)
        self[name] = self._makers[name](self)
        return self[name]


def makers(door: str) -> dict[str, Maker]:
    """List the makers, for a rank.

    door: "ddp", where `model` is a DistributedDataParallel, "horovod", where `optimizer` is Horovod's, or none of them.
    """
    import horovod.torch as hvd
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gradcomp

    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    return {
        "torch": lambda names: torch,
        "nn": lambda names: nn,
        "hvd": lambda names: hvd,
        "gradcomp": lambda names: gradcomp,
        "DistributedDataParallel": lambda names: DistributedDataParallel,
        "Net": lambda names: Net,
        "criterion": lambda names: nn.functional.cross_entropy,
        "x": lambda names: torch.ones(2, 8),
        "y": lambda names: torch.tensor([0, 3]),
        "model": lambda names: DistributedDataParallel(Net()) if door == "ddp" else Net(),
        "scaler": lambda names: torch.amp.GradScaler("cpu"),
        "sgd": lambda names: torch.optim.SGD(names["model"].parameters(), lr=0.1, momentum=0.9),
        "optimizer": lambda names: compressed(names) if door == "horovod" else names["sgd"],
        "handle": lambda names: gradcomp.ddp.attach(names["model"], "topk", optimizer=names["optimizer"]),
        "rank": lambda names: dist.get_rank(),
        "step": lambda names: 0,
        "folder": lambda names: Path.cwd(),
    }


def compressed(names: Assumed) -> Any:
    """Make a distributed optimizer of Horovod's."""
    import gradcomp

    return gradcomp.horovod.DistributedOptimizer(names["sgd"], names["model"].named_parameters(), scaler=names["scaler"])
