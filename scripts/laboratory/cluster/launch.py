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


def places(hosts: list[Host], each: int) -> list[Place]:
    """List the places of so many ranks on each host."""
    return [Place(host, cross * each + local, cross, local) for cross, host in enumerate(hosts) for local in range(each)]


def rendezvous(launcher: str, hosts: list[Host], each: int) -> dict[str, str]:
    """Return the variables that all ranks share. For Horovod, start the server that they name."""
    common = {"NCCL_SOCKET_IFNAME": INTERFACE}
    if launcher == "torch":
        return common | {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(TORCH_PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
    return common | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0].address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(_serve(hosts, each)),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": INTERFACE,
    }


def variables(launcher: str, hosts: int, each: int, place: Place) -> dict[str, str]:
    """Return one rank's variables, as horovodrun or torchrun sets them."""
    own = {"RANK": place.rank, "LOCAL_RANK": place.local}
    if launcher == "torch":
        own |= {"WORLD_SIZE": hosts * each, "LOCAL_WORLD_SIZE": each}
        return {name: str(value) for name, value in own.items()}
    own |= {"SIZE": hosts * each, "LOCAL_SIZE": each, "CROSS_RANK": place.cross, "CROSS_SIZE": hosts}
    return {f"HOROVOD_{name}": str(value) for name, value in own.items()} | {"HOROVOD_HOSTNAME": place.host.name}


def _serve(hosts: list[Host], each: int) -> int:
    """Start Horovod's rendezvous server on the first host. Return its port."""
    plan = ",".join(f"{host.name}:{each}" for host in hosts)
    server = subprocess.Popen(
        [sys.executable, "-c", RENDEZVOUS, plan],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=hosts[0].namespaces.enter,
    )
    assert server.stdout
    port = server.stdout.readline().strip()
    if not port.isdigit():
        raise kernel.Refused(
            "Horovod's rendezvous server did not start (its message is above); run scripts/setup to install Horovod again"
        )
    return int(port)
