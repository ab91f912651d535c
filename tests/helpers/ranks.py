"""Real ranks: a test's function as N processes on this machine, with Horovod or DDP, and every rank's findings.

The ranks find each other as those of horovodrun do, around the same rendezvous server. They are forked from a process that has
imported everything (`rank_server`), their outputs are kept apart, and a rank may die without horovodrun ending the others.
A rank that hangs, fails or reports nothing fails the test, which then shows the output of every rank and where it stood.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rank_server import FOLDER, Order, Outcome, end_together, report

__all__ = ["end_together", "join", "launch", "once", "report", "start_anew"]

ROOT = Path(__file__).resolve().parents[2]
# The variable that holds the ports of the rendezvous servers that are still unused.
PORTS = "GRADCOMP_TEST_PORTS"

# For a rank.


def join() -> None:
    """Make torch.distributed's group of these ranks."""
    import torch.distributed as dist

    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    dist.init_process_group("gloo", init_method=f"file://{os.environ[FOLDER]}/group", rank=rank, world_size=size)


def start_anew() -> None:
    """Call hvd.shutdown() and hvd.init() on all ranks, around the next rendezvous server, as after an elastic reset.

    (Around the same one, a fast rank could find the addresses that a slow one left there.)
    """
    import horovod.torch as hvd

    hvd.shutdown()
    port, _, rest = os.environ[PORTS].partition(",")
    os.environ |= {"HOROVOD_GLOO_RENDEZVOUS_PORT": port, PORTS: rest}
    hvd.init()


# For a test.


def launch(
    program: Callable[..., Any],
    count: int,
    *arguments: Any,
    seconds: float = 200,
    dies: Mapping[int, int] | None = None,
    anew: int = 0,
    hosts: int = 1,
) -> list:
    """Run a function of a test file on each of so many ranks; return what the ranks return, in rank order.

    seconds: the time by which all must have ended. dies: ranks that are meant to end with these exit codes, without a report.
    anew: how often the program calls start_anew(). hosts: those that Horovod takes the ranks to be on, equally many on each.
    """
    dies = dict(dies or {})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        shared, *later = [servers.enter_context(_rendezvous(count, hosts)) for _ in range(1 + anew)]
        shared[PORTS] = ",".join(each["HOROVOD_GLOO_RENDEZVOUS_PORT"] for each in later)
        environments = []
        for rank in range(count):
            host, local = divmod(rank, count // hosts)
            own = {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(local)}
            own |= {"HOROVOD_CROSS_RANK": str(host), "HOROVOD_HOSTNAME": _names(hosts)[host]}
            environments.append(_environment(folder) | shared | own)
        codes = [dies.get(rank, 0) for rank in range(count)]
        order = Order(inspect.getfile(program), program.__name__, arguments, environments, codes, seconds)
        outcome = _server()(order)
        said = "".join(
            f"\n--- rank {rank} (exit code {code}):\n" + (Path(folder) / f"{rank}.out").read_text(errors="replace")
            for rank, code in enumerate(outcome.codes)
        )
        assert not outcome.trouble, f"{order.file}, {order.function} on {count} ranks: {outcome.trouble}{said}"
        return _reports(folder, [rank for rank in range(count) if rank not in dies], said)


def once(launching: Callable[..., list]) -> Callable[..., list]:
    """Launch at the first call; return the same reports, or raise the same failure at once, at later calls."""
    outcomes: dict[Any, Any] = {}

    @functools.wraps(launching)
    def outcome(*args: Any) -> list:
        if args not in outcomes:
            try:
                outcomes[args] = launching(*args)
            except AssertionError as failure:
                outcomes[args] = failure
        if isinstance(outcomes[args], AssertionError):
            raise outcomes[args]
        return outcomes[args]

    return outcome


@functools.cache
def _server() -> Callable[[Order], Outcome]:
    """Start the process that forks ranks, for this test process."""
    said = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it lives as long as the server
    running = subprocess.Popen(
        [sys.executable, "-c", "import rank_server; rank_server.serve()"],
        env=_environment(""),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
    )
    orders, outcomes = running.stdin, running.stdout
    assert orders is not None and outcomes is not None

    def end() -> None:
        orders.close()
        outcomes.close()
        running.wait()
        said.close()

    atexit.register(end)

    def carry_out(order: Order) -> Outcome:
        try:
            pickle.dump(order, orders)
            orders.flush()
            return pickle.load(outcomes)
        except (OSError, EOFError) as error:
            text = Path(said.name).read_text(errors="replace")
            raise AssertionError(f"the process that forks ranks has ended:\n{text}") from error

    return carry_out


def _environment(folder: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD_")}
    return inherited | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that hangs is ended by SIGABRT and shows where it stood
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        FOLDER: folder,
    }


def _names(hosts: int) -> list[str]:
    return ["localhost", *(f"127.0.0.{1 + host}" for host in range(1, hosts))]


@contextmanager
def _rendezvous(count: int, hosts: int) -> Iterator[dict[str, str]]:
    """Run the server by which the ranks find one another; yield the variables that lead them to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(",".join(f"{name}:{count // hosts}" for name in _names(hosts))), count))
    try:
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_SIZE": str(count),
            "HOROVOD_LOCAL_SIZE": str(count // hosts),
            "HOROVOD_CROSS_SIZE": str(hosts),
        }
    finally:
        server.stop()
        server._httpd.server_close()


def _reports(folder: str, ranks: Sequence[int], said: str) -> list:
    files = {rank: Path(folder) / f"{rank}.pickle" for rank in ranks}
    silent = [rank for rank, file in files.items() if not file.exists()]
    assert not silent, f"ranks {silent} reported nothing\n{said}"
    return [pickle.loads(file.read_bytes()) for file in files.values()]
