"""Tells each rank who it is and where the others are, in the words of Horovod or of torch.distributed."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import kernel
from .network import INTERFACE, Host

TORCH_PORT = 29500  # always free: the first host's ports are its own


@dataclass(frozen=True)
class World:
    hosts: list[Host]
    ranks_per_host: int

    @property
    def size(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    def places(self) -> Iterator["Place"]:
        for rank in range(self.size):
            yield Place(self, rank, *divmod(rank, self.ranks_per_host))


@dataclass(frozen=True)
class Place:
    """A rank's place in the world: its host's index and its index among that host's ranks."""

    world: World
    rank: int
    cross: int
    local: int

    @property
    def host(self) -> Host:
        return self.world.hosts[self.cross]


def rendezvous(launcher: str, world: World) -> dict[str, str]:
    """The variables that all ranks share; for Horovod it starts the server that they name."""
    common = {"NCCL_SOCKET_IFNAME": INTERFACE}
    if launcher == "torch":
        return common | {"MASTER_ADDR": world.hosts[0].name, "MASTER_PORT": str(TORCH_PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    return common | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": world.hosts[0].address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(_serve(world)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": INTERFACE,
    }


def variables(launcher: str, place: Place) -> dict[str, str]:
    """The variables of one rank: the same that horovodrun or torchrun would set."""
    world = place.world
    own = {"RANK": place.rank, "LOCAL_RANK": place.local}
    if launcher == "torch":
        own |= {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.ranks_per_host}
        return {name: str(value) for name, value in own.items()}
    own |= {"SIZE": world.size, "LOCAL_SIZE": world.ranks_per_host, "CROSS_RANK": place.cross, "CROSS_SIZE": len(world.hosts)}
    return {f"HOROVOD_{name}": str(value) for name, value in own.items()} | {"HOROVOD_HOSTNAME": place.host.name}


def _serve(world: World) -> int:
    """Starts Horovod's rendezvous server on the first host and returns its port."""
    plan = ",".join(f"{host.name}:{world.ranks_per_host}" for host in world.hosts)
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rendezvous.py").resolve()), plan],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=world.hosts[0].namespaces.enter,
    )
    assert server.stdout
    port = server.stdout.readline().strip()
    if not port.isdigit():
        raise kernel.Refused(
            "Horovod's rendezvous server did not start (its message is above); is horovod whole in this Python?"
        )
    return int(port)
