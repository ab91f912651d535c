"""scripts/check_ssh: two launchers train an example on two hosts, through ssh from a third, and the losses must be equal.

The hosts are network namespaces with host names, addresses and ssh daemons of their own. Nothing outlives the script. It
uses no key of this machine, and changes none of its files.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laboratory import machine
from laboratory.cluster import guard, kernel, network
from laboratory.report import results
from laboratory.ssh import daemons

PROGRAMS = {"ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
HOSTS, SLOTS, PORT = ("host1", "host2"), 2, 29500
TIMEOUT = 300

# As in docs/clusters.md; torchrun is called on every host, which ssh does here.
HOROVODRUN = "horovodrun -np 4 -H host1:2,host2:2 python examples/stock_horovod.py"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host1:29500 examples/ddp.py"


def main(arguments: Sequence[str]) -> int:
    """Run both launchers. Return 0, 1 if one failed, 2 if they cannot be run."""
    parser = argparse.ArgumentParser(
        prog="scripts/check_ssh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FOLDER", default=machine.ROOT / "benchmarks" / "results", help="where ssh.json goes")
    chosen = parser.parse_args(arguments)
    if sentence := missing():
        print(f"check_ssh: {sentence}", file=sys.stderr)
        return 2
    try:
        return guard.supervise(lambda: inside(Path(chosen.out).resolve()))
    except kernel.Refused as refusal:
        print(f"check_ssh: {refusal}", file=sys.stderr)
        return 1


def missing() -> str | None:
    """Return a sentence if the hosts cannot be made."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces, and to start ssh daemons in them; run it with sudo, or as root"
    for program, package in PROGRAMS.items():
        if not network.find(program):
            return f"the program {program} is missing; apt-get install {package}"
    for program in ("horovodrun", "torchrun"):
        if not (Path(sys.executable).parent / program).exists():
            return f"{program} is not beside {sys.executable}; run scripts/setup, and activate its environment"
    return None


def inside(out: Path) -> int:
    """Make the hosts, run both launchers on the first one, compare, and write the record."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-ssh.") as name:
        hosts = network.build(1 + len(HOSTS), None)
        running = daemons.start(hosts, Path(name))
        found = [horovodrun(hosts[0], running), torchrun(hosts[0], running)]
    print(
        "\n".join(
            f"{each['launcher']}: {each['seconds']} s, logins {each['logins']}, losses {each['losses']}" for each in found
        )
    )
    if wrong := faults(found):
        print(f"check_ssh: {wrong}", file=sys.stderr)
        return 1
    record = out / "ssh.json"
    results.write(record, {"what": "ssh", **machine.origin("scripts/check_ssh"), "launchers": found})
    print(f"written: {record}")
    return 0


def faults(found: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what is wrong with the trainings: a host that ssh did not reach, too few ranks, or losses that differ."""
    for each in found:
        if idle := [host for host, count in each["logins"].items() if count == 0]:
            return f"{each['launcher']} reached no rank by ssh on {', '.join(idle)}"
        if each["ranks"] != len(HOSTS) * SLOTS:
            return f"{each['launcher']} trained on {each['ranks']} ranks, not {len(HOSTS) * SLOTS}"
        if len(each["losses"]) < 2 or each["losses"][-1] >= each["losses"][0]:
            return f"the loss did not fall under {each['launcher']}: {each['losses']}"
    if found[0]["losses"] != found[1]["losses"]:
        return "the launchers trained unlike each other: the losses differ"
    return None


def horovodrun(first: network.Host, running: Sequence[daemons.Daemon]) -> dict[str, Any]:
    """Train under Horovod: horovodrun calls ssh."""
    return train("horovodrun", HOROVODRUN, [shlex.split(HOROVODRUN)], first, running)


def torchrun(first: network.Host, running: Sequence[daemons.Daemon]) -> dict[str, Any]:
    """Train under DDP: the same command on each host, by ssh."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables().items())
    there = f"cd {shlex.quote(str(machine.ROOT))} && env {settings} {TORCHRUN}"
    calls = [["ssh", "-o", "StrictHostKeyChecking=no", daemon.host.name, there] for daemon in running]
    return train("torchrun", TORCHRUN, calls, first, running)


def variables() -> dict[str, str]:
    """Return what ranks need on every host."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(machine.ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": network.INTERFACE,
    }


def train(
    launcher: str, command: str, calls: Sequence[Sequence[str]], first: network.Host, running: Sequence[daemons.Daemon]
) -> dict[str, Any]:
    """Make the calls on the first host, at once. Return the training's figures."""

    def enter() -> None:
        first.namespaces.enter()
        os.chdir(machine.ROOT)

    print(f"{launcher}: {command}", flush=True)
    before, began = [daemon.logins() for daemon in running], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradcomp-home.") as home, tempfile.TemporaryFile("w+") as output:
        # horovodrun remembers in HOME which hosts it has reached.
        environment = {**os.environ, **variables(), "HOME": home}
        started = [
            subprocess.Popen(
                call, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, preexec_fn=enter
            )
            for call in calls
        ]
        try:
            statuses = [each.wait(max(1.0, began + TIMEOUT - time.monotonic())) for each in started]
        except subprocess.TimeoutExpired:
            statuses = [124]
        output.seek(0)
        said = output.read()
    if any(statuses):
        raise kernel.Refused(f"{launcher} ended with status {max(statuses)}; it said:\n{said[-4000:]}")
    sent = re.search(r"each of (\d+) ranks sends", said)
    return {
        "launcher": launcher,
        "command": command,
        "ranks": int(sent[1]) if sent else 0,
        "logins": {daemon.host.name: daemon.logins() - count for daemon, count in zip(running, before, strict=True)},
        "losses": [float(loss) for loss in re.findall(r"step \d+: loss (\S+) on rank 0", said)],
        "seconds": round(time.monotonic() - began, 1),
    }
