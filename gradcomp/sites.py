"""Finds the model and the processes of local steps, and the sites within which a DistributedDataParallel averages gradients."""

from __future__ import annotations

import gc
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from gradcomp.engine.slots import check_optimizer
from gradcomp.engine.updates.steps import exchanged
from gradcomp.networks import Connection
from gradcomp.networks.torch import TorchNetwork

_NO_NETWORK = (
    "LocalSteps() found no ranks: call torch.distributed.init_process_group(), or horovod.torch.init(), before; a training on "
    "one rank does so, too"
)
_WRAPPED = (
    "the model is a {name}, which exchanges gradients among all ranks in every step; pass the model inside it, model.module. "
    "A DistributedDataParallel over the ranks of a site, its process_group=, is taken as it is"
)
_UNEQUAL = (
    "the process groups of the DistributedDataParallel models have {counts} ranks: make all the same size. Or pass the model "
    "inside, model.module: every rank then sends all its weight changes to all others"
)
_SHARDED = "the model has DTensors, as FSDP2's fully_shard() makes them; LocalSteps() takes a model that is whole on each rank"
_ATTACHED = (
    "the model's updates are exchanged in every step already, since attach(): local steps would exchange them again. Call "
    "handle.remove() first, or leave LocalSteps out"
)
_EXCHANGES = "the optimizer is a {name}, which exchanges gradients in every step; pass the optimizer inside it"


def find_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, str]:
    """Refuse what exchanges all ranks' gradients by itself. Return the model inside, and the name of this rank's site."""
    check_optimizer(optimizer)
    site, whole = "", getattr(model, "_orig_mod", model)
    if isinstance(whole, DistributedDataParallel) and (group := whole.process_group).size() < dist.get_world_size():
        model, site = whole.module, f"the site of rank {dist.get_process_group_ranks(group)[0]}"
        whole = model
    if isinstance(whole, (DistributedDataParallel, FullyShardedDataParallel)):
        raise TypeError(_WRAPPED.format(name=type(whole).__name__))
    if any(hasattr(each, "to_local") for each in model.parameters()):
        raise TypeError(_SHARDED)
    if hasattr(optimizer, "synchronize"):  # Horovod's, and gradcomp's
        raise TypeError(_EXCHANGES.format(name=type(optimizer).__name__))
    return model, site


def refuse_attached(model: torch.nn.Module) -> None:
    """Refuse a model whose updates attach() has all ranks exchange."""
    if exchanged().intersection(map(id, model.parameters())):
        gc.collect()  # an exchange that nobody has any more
        if exchanged().intersection(map(id, model.parameters())):
            raise RuntimeError(_ATTACHED)


def find_ranks(device: torch.device, site: str) -> Connection:
    """Find the ranks: torch.distributed's, or Horovod's. site: which takes its host's place, if there is one."""
    if dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None
        network = TorchNetwork(dist.group.WORLD, device)
        network.host = site or network.host
        return network
    try:
        from gradcomp.networks.horovod import everyone
    except ImportError:
        raise RuntimeError(_NO_NETWORK) from None
    horovods: Connection = everyone()
    if not horovods.ready:
        raise RuntimeError(_NO_NETWORK)
    return horovods


def check_sites(network: Connection) -> None:
    """Refuse sites of different sizes, after the ranks have met."""
    if len({*(counts := Counter(network.hosts).values())}) > 1:
        raise ValueError(_UNEQUAL.format(counts=", ".join(map(str, counts))))
