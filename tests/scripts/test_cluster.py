"""The emulated cluster, run for real: its hosts and links, its ends by every signal, torch and Horovod on it. Needs root."""

import ast
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from clusters import CLUSTER, MARKS, ROOT, cluster, lines, program

pytestmark = MARKS


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not (reached := true()) and time.monotonic() < end:
        time.sleep(0.02)
    return reached


def processes_with(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if marker.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def traces() -> dict[str, list[str]]:
    """All that a cluster could leave on this machine, except processes."""
    folders = [Path(name) for name in ("/run/netns", "/etc/netns", "/sys/class/net")]
    seen = {str(folder): sorted(str(entry) for entry in folder.glob("*")) for folder in folders}
    files = [Path(name).read_text() for name in ("/proc/self/mounts", "/etc/hosts")]
    return seen | {"files": files, "shared memory": [str(path) for path in Path("/dev/shm").glob("left-by-cluster-test")]}


class Running:
    """A cluster that runs until a signal, its output read up to the ranks' "ready"."""

    def __init__(self, marker: str, *arguments: str) -> None:
        self.marker = marker
        command = [*CLUSTER, "--hosts", "2", "--launcher", "torch", "--", *program("stay", marker, *arguments)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
        )
        assert self.process.stdout
        self.ready = sorted(self.process.stdout.readline() for _ in range(2))

    def end(self, number: int) -> tuple[int, str]:
        """Sends the signal and returns the exit status and what was written to stderr."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=20)[1]
        return self.process.returncode, said


@pytest.fixture
def running(request: pytest.FixtureRequest) -> Iterator[Callable[..., Running]]:
    """Starts clusters, and ends those that a failed test left."""
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(f"{request.node.name}-{os.getpid()}-{len(started)}", *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate(timeout=10)


def test_each_rank_has_a_host_of_its_own() -> None:
    before = traces()
    done = cluster("--hosts 2 --ranks-per-host 2 --launcher torch", ["env", "COLOUR=a=b", *program("report")])
    said = {rank: json.loads(line) for rank, [line] in lines(done, 4).items()}
    assert "2 hosts (host0 10.77.0.1 to host1 10.77.0.2), 2 ranks each, links 1gbit" in done.stderr.splitlines()[0]
    for rank, report in said.items():
        host = rank // 2
        assert report["hostname"] == f"host{host}"
        assert report["addresses"] == {"host0": "10.77.0.1", "host1": "10.77.0.2", "localhost": "127.0.0.1"}
        assert report["interfaces"] == ["eth0", "lo"]
        assert report["directory"] == str(Path.cwd())
        expected = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
        expected |= {"MASTER_ADDR": "host0", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "COLOUR": "a=b"}
        assert expected.items() <= report["variables"].items()
    assert traces() == before


def test_the_first_failure_ends_the_rest_and_gives_the_status() -> None:
    script = "if [ $RANK = 1 ]; then echo broke >&2; exit 7; fi; sleep 300"
    start = time.monotonic()
    done = cluster("--hosts 3 --launcher torch", ["sh", "-c", script])
    assert time.monotonic() - start < 5
    assert done.returncode == 7
    assert "rank 1 on host1 failed with status 7; ending rank 0 on host0, rank 2 on host2" in done.stderr
    assert done.stderr.endswith("the first to fail:\n[1] broke\n")


def test_a_rank_killed_by_a_signal_gives_128_and_its_number() -> None:
    done = cluster("--hosts 1 --launcher torch", ["sh", "-c", "kill -SEGV $$"])
    assert done.returncode == 128 + signal.SIGSEGV and "killed by SIGSEGV" in done.stderr


def test_output_of_rank_0_alone_is_passed_on_as_it_is() -> None:
    bar = r"printf '\r10%%\r20%%\r\nrank '$RANK; printf error >&2"
    alone = cluster("--hosts 2 --launcher torch --output 0", ["sh", "-c", bar])
    assert alone.stdout.encode() == b"\n10%\n20%\nrank 0"  # text mode reads \r as \n
    assert alone.stderr.endswith("error") and alone.stderr.count("error") == 1
    assert lines(cluster("--hosts 2 --launcher torch", ["sh", "-c", bar]), 2) == {
        0: ["10%", "20%", "rank 0"],
        1: ["10%", "20%", "rank 1"],
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_leaves_nothing(number: signal.Signals, running: Callable[..., Running]) -> None:
    before = traces()
    it = running()
    assert it.ready == ["[0] ready\n", "[1] ready\n"]
    assert len(processes_with(it.marker)) == 6  # two of the script, two a rank
    status, said = it.end(number)
    assert status == 128 + number and f"ended by {number.name}" in said
    assert processes_with(it.marker) == []
    assert traces() == before


def test_kill_leaves_nothing(running: Callable[..., Running]) -> None:
    before = traces()
    it = running("stubborn")
    assert it.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert until(lambda: not processes_with(it.marker)), "ranks or their children outlived the script"
    assert traces() == before


@pytest.mark.slow
def test_a_rank_that_ignores_term_is_killed(running: Callable[..., Running]) -> None:
    it = running("stubborn")
    status, said = it.end(signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and said.count("did not end in 5 seconds: killed") == 2
    assert processes_with(it.marker) == []


def test_a_second_signal_does_not_wait(running: Callable[..., Running]) -> None:
    it = running("stubborn")
    start = time.monotonic()
    it.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert it.end(signal.SIGINT)[0] == 128 + signal.SIGINT
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("options", "command", "sentence"),
    [
        ("--hosts 2", [], "no command to run; put it after --"),
        ("--hosts 0", ["true"], "argument --hosts: '0' is not a whole number above 0"),
        ("--hosts 251", ["true"], "argument --hosts: '251': an emulated cluster has at most 250 hosts"),
        ("--hosts 2 --rate fast", ["true"], "argument --rate: 'fast' is not a rate; write for example 1gbit"),
        ("--hosts 2 --rate 0gbit", ["true"], "argument --rate: '0gbit' is not a rate"),
        ("--hosts 2 --later 1gbit", ["true"], "argument --later: '1gbit' is not a rate and seconds"),
        ("", ["true"], "the following arguments are required: --hosts"),
    ],
)
def test_bad_input_gets_a_sentence(options: str, command: list[str], sentence: str) -> None:
    done = cluster(options, command)
    assert done.returncode == 2 and sentence in done.stderr.splitlines()[-1], done.stderr


def test_a_command_that_cannot_start_gets_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    for command in (str(broken), "no-such-command"):
        done = cluster("--hosts 2 --launcher torch", [command])
        assert done.returncode == 1 and "cannot start rank 0" in done.stderr and "Traceback" not in done.stderr


def test_without_root_it_says_so() -> None:
    # It becomes nobody after loading the script: a checkout or a Python under /root is closed to nobody.
    become = (
        "import os, runpy, sys; main = runpy.run_path(sys.argv[1])['main']; os.setuid(65534); del sys.argv[0]; sys.exit(main())"
    )
    command = [sys.executable, "-c", become, CLUSTER[1], "--hosts", "2", "--launcher", "torch", "--", "true"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "needs root" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_horovod_with_process_sets() -> None:
    assert importlib.util.find_spec("horovod"), "the cluster under Horovod was NOT tested: horovod is not installed"
    said = lines(cluster("--hosts 2 --ranks-per-host 2", program("horovod")), 4)
    for rank, [line] in said.items():
        found = ast.literal_eval(line)
        assert found.pop("place") == [rank % 2, 2, rank // 2, 2]
        assert found.pop("sum") == [10.0] and found.pop("gather") == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
        members = [ranks for ranks in ([0, 2], [1, 3], [0, 3]) if rank in ranks]
        expected: dict[str, list[int]] = {}
        for a, b in members:
            expected |= {f"sum {a}-{b}": [a + b + 2], f"gather {a}-{b}": [a] * (a + 1) + [b] * (b + 1)}
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("door", ["torch", pytest.param("horovod", marks=pytest.mark.long)])
def test_auto_on_a_slow_link(door: str) -> None:
    """Nothing is patched: the ranks measure, try and choose. Their steps get twice as fast, or more."""
    if door == "horovod":
        assert importlib.util.find_spec("horovod"), "auto under Horovod was NOT tested: horovod is not installed"
    command = program("auto", "ddp" if door == "torch" else door)
    done = cluster(f"--hosts 2 --launcher {door} --rate 50mbit", command)
    slow = [json.loads(line) for [line] in lines(done, 2).values()]
    assert len({each["weights"] for each in slow}) == 1
    assert all(each["way"] == "blocks" and each["after"] < each["stock"] / 2 for each in slow), slow


def test_links_have_the_rate() -> None:
    rates = lines(cluster("--hosts 2 --rate 100mbit --launcher torch", program("transfer", "8000000")), 2)
    # Headers take 4 % and a full bucket (256 KB) gives 3 % back: never above 99. Below: slack for a busy machine.
    assert all(70 <= float(rate) <= 100 for [rate] in rates.values()), rates


@pytest.mark.parametrize(("before", "later"), [("100mbit", "none"), ("none", "100mbit"), ("1gbit", "100mbit")])
def test_links_change_their_rate_later(before: str, later: str) -> None:
    """One way is sent before the change, the other one after it."""
    send = shlex.join(program("transfer", "4000000"))
    done = cluster(f"--hosts 2 --rate {before} --later {later}:2.5 --launcher torch", ["sh", "-c", f"{send}; sleep 3; {send}"])
    said = lines(done, 2)
    assert f"links {'unshaped' if later == 'none' else later} from now on" in done.stderr
    for first, second in said.values():
        slow, fast = (float(second), float(first)) if later == "100mbit" else (float(first), float(second))
        assert 50 <= slow <= 105 and fast > 150, said
