"""Real ranks: a program of tests/programs as N processes on this machine, of Horovod or of DDP, and what each reported.

The ranks are started as horovodrun starts them, around the same rendezvous server, but by this process: that saves two seconds
a launch, keeps their outputs apart, and lets a rank die without horovodrun ending the others (`by_horovodrun` is there too).
Strict: a rank that hangs, fails or reports nothing fails the test, which then shows what every rank said and where it stood.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
FOLDER, PORTS = "GRADCOMP_TEST_REPORTS", "GRADCOMP_TEST_PORTS"

# What a rank does.


def report(facts: Any) -> None:
    """Hands this rank's findings to the test."""
    (Path(os.environ[FOLDER]) / f"{os.environ['HOROVOD_RANK']}.pickle").write_bytes(pickle.dumps(facts))


def arguments() -> Any:
    """What the test gave to launch()."""
    return json.loads(sys.argv[1])


def join() -> None:
    """torch.distributed's group of these ranks."""
    import torch.distributed as dist

    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    dist.init_process_group("gloo", init_method=f"file://{os.environ[FOLDER]}/group", rank=rank, world_size=size)


def start_anew() -> None:
    """hvd.shutdown() and hvd.init() on all ranks, around the next rendezvous server, as after an elastic reset.

    (Around the same one, a fast rank could find the addresses that a slow one left there.)
    """
    import horovod.torch as hvd

    hvd.shutdown()
    port, _, rest = os.environ[PORTS].partition(",")
    os.environ |= {"HOROVOD_GLOO_RENDEZVOUS_PORT": port, PORTS: rest}
    hvd.init()


# What the test does.


def launch(
    program: str,
    count: int,
    argument: Any = None,
    *,
    seconds: float = 200,
    dies: Mapping[int, int] | None = None,
    anew: int = 0,
    hosts: int = 1,
) -> list:
    """Runs tests/programs/<program>.py on so many ranks; gives their reports in rank order.

    seconds: the time by which all must have ended. dies: ranks that are meant to end with these exit codes, without a report.
    anew: how often the program calls start_anew(). hosts: that Horovod takes the ranks to be on, equally many on each.
    """
    dies = dict(dies or {})
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), json.dumps(argument)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        shared, *later = [servers.enter_context(_rendezvous(count, hosts)) for _ in range(1 + anew)]
        shared[PORTS] = ",".join(each["HOROVOD_GLOO_RENDEZVOUS_PORT"] for each in later)
        running = []
        for rank in range(count):
            host, local = divmod(rank, count // hosts)
            own = {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(local)}
            own |= {"HOROVOD_CROSS_RANK": str(host), "HOROVOD_HOSTNAME": _names(hosts)[host]}
            with (Path(folder) / f"{rank}.out").open("wb") as output:
                environment = _environment(folder) | shared | own
                running.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
                )
        trouble = _watch(running, [dies.get(rank, 0) for rank in range(count)], time.monotonic() + seconds)
        said = "".join(
            f"\n--- rank {rank} (exit code {process.returncode}):\n"
            + (Path(folder) / f"{rank}.out").read_text(errors="replace")
            for rank, process in enumerate(running)
        )
        assert not trouble, f"{program} on {count} ranks: {trouble}{said}"
        return _reports(folder, [rank for rank in range(count) if rank not in dies], said)


def once(launching: Callable[..., list]) -> Callable[..., list]:
    """Launches at the first call; later calls get the same reports, or the same failure at once."""
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


def by_horovodrun(program: str, count: int, argument: Any = None, *, seconds: float = 200) -> list:
    """The same by the command that users type."""
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    command = [horovodrun, "-np", str(count), sys.executable, str(PROGRAMS / f"{program}.py"), json.dumps(argument)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        with output.open("wb") as file:
            running = subprocess.Popen(
                command, env=_environment(folder), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        trouble = _watch([running], [0], time.monotonic() + seconds)
        said = output.read_text(errors="replace")
        assert not trouble, f"{program} by horovodrun: {trouble}\n{said}"
        return _reports(folder, list(range(count)), said)


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
    """The server by which the ranks find one another, and the variables that lead them to it."""
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


def _watch(running: Sequence[subprocess.Popen[bytes]], codes: Sequence[int], end: float) -> str:
    """Waits for all processes; says what went wrong, and leaves none behind."""
    trouble = ""
    while None in (ended := [_code(process) for process in running]):
        wrong = [i for i, code in enumerate(ended) if code not in (None, codes[i])]
        if wrong and not trouble:
            trouble = f"{wrong} failed"
            end = min(end, time.monotonic() + 2)  # the others are given the time to say why
        if time.monotonic() > end:
            hanging = [i for i, code in enumerate(ended) if code is None]
            trouble = trouble or f"{hanging} hang"
            for number in (signal.SIGABRT, signal.SIGKILL):
                for i in hanging:
                    _signal(running[i], number)
                time.sleep(0.5)
        time.sleep(0.01)
    for process in running:
        _signal(process, signal.SIGKILL)  # what the process may have started
    wrong = [i for i, process in enumerate(running) if process.wait() != codes[i]]
    return trouble or (f"{wrong} failed" if wrong else "")


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """How the process ended, without collecting it: until then nobody else gets its number, and its group can be signalled."""
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _reports(folder: str, ranks: Sequence[int], said: str) -> list:
    files = {rank: Path(folder) / f"{rank}.pickle" for rank in ranks}
    silent = [rank for rank, file in files.items() if not file.exists()]
    assert not silent, f"ranks {silent} reported nothing\n{said}"
    return [pickle.loads(file.read_bytes()) for file in files.values()]
