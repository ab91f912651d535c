"""The environment variables of ranks: their place, and the rendezvous, for Horovod or torch.distributed."""

import subprocess
import sys
from dataclasses import dataclass

from laboratory.cluster import kernel
from laboratory.cluster.network import INTERFACE, Host

# Always free: the first host has ports of its own.
TORCH_PORT = 29500

# Horovod's rendezvous server, for hosts given as host0:1,host1:1. It prints its port, and runs until it is killed.
RENDEZVOUS = """
import signal, sys
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

hosts, server = parse_hosts(sys.argv[1]), RendezvousServer()
port = server.start()
server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
print(port, flush=True)
signal.pause()
"""


@dataclass(frozen=True)
class Place:
    """A rank's place in the world: its host's index (cross), and its index among that host's ranks (local)."""

    host: Host
    rank: int
    cross: int
    local: int


@dataclass(frozen=True)
class World:
    """The hosts, and the ranks on each."""

    hosts: list[Host]
    ranks_per_host: int

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.hosts) * self.ranks_per_host

    def places(self) -> list[Place]:
        """List the ranks' places."""
        each = self.ranks_per_host
        return [Place(self.hosts[rank // each], rank, rank // each, rank % each) for rank in range(self.size)]


def rendezvous(launcher: str, world: World) -> dict[str, str]:
    """Return the variables that all ranks share. For Horovod, start the server that they name."""
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


def variables(launcher: str, world: World, place: Place) -> dict[str, str]:
    """Return one rank's variables, as horovodrun or torchrun sets them."""
    own = {"RANK": place.rank, "LOCAL_RANK": place.local}
    if launcher == "torch":
        own |= {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.ranks_per_host}
        return {name: str(value) for name, value in own.items()}
    own |= {"SIZE": world.size, "LOCAL_SIZE": world.ranks_per_host, "CROSS_RANK": place.cross, "CROSS_SIZE": len(world.hosts)}
    return {f"HOROVOD_{name}": str(value) for name, value in own.items()} | {"HOROVOD_HOSTNAME": place.host.name}


def _serve(world: World) -> int:
    """Start Horovod's rendezvous server on the first host. Return its port."""
    plan = ",".join(f"{host.name}:{world.ranks_per_host}" for host in world.hosts)
    server = subprocess.Popen(
        [sys.executable, "-c", RENDEZVOUS, plan],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=world.hosts[0].namespaces.enter,
    )
    assert server.stdout
    port = server.stdout.readline().strip()
    if not port.isdigit():
        raise kernel.Refused(
            "Horovod's rendezvous server did not start (its message is above); run scripts/setup to install Horovod again"
        )
    return int(port)
