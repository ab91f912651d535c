"""horovodrun -H and torchrun --nnodes train on two hosts that ssh reaches from a third, and their losses are equal.

The hosts are network namespaces, two of them with an ssh daemon whose keys and settings are made for the run. Nothing outlives
the test, which uses no key of this machine and changes none of its files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import PROGRAMS, figures_of, start_daemons, variables

from laboratory.cluster import guard, network

ROOT = Path(__file__).resolve().parents[2]
LACKING = [program for program in PROGRAMS if not network.find(program)]

# As in docs/clusters.md; torchrun is called on every host, which ssh does here.
HOROVODRUN = "horovodrun -np 4 -H host1:2,host2:2 python examples/stock_horovod.py"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host1:29500 examples/ddp.py"
RANKS, TIMEOUT = 4, 300


def test_the_page_of_clusters_has_these_commands() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    for command in (HOROVODRUN, TORCHRUN):
        assert " ".join("train.py" if word.startswith("examples/") else word for word in command.split()) in page


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="launchers over ssh were NOT tested: they need root")
@pytest.mark.skipif(bool(LACKING), reason=f"launchers over ssh were NOT tested: {LACKING} missing, install openssh-server")
def test_both_launchers_train_on_hosts_that_ssh_reaches() -> None:
    pytest.importorskip("horovod.torch", reason="launchers over ssh were NOT tested: Horovod is not installed")
    by_horovodrun, by_torchrun = figures_of(__file__, 700)
    for found in (by_horovodrun, by_torchrun):
        assert all(found["logins"].values()), f"a host without a login through ssh: {found}"
        assert found["ranks"] == RANKS and found["losses"][-1] < found["losses"][0], found
    assert by_horovodrun["losses"] == by_torchrun["losses"], "a rank has another's pictures or number"


def inside() -> int:
    """Make the hosts, run both launchers on the first one, and print their figures."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-ssh.") as name:
        first, *others = network.build(3, "none")
        logs = start_daemons([first, *others], Path(name))
        there = f"cd {shlex.quote(str(ROOT))} && env {shlex.join(f'{k}={v}' for k, v in variables().items())} {TORCHRUN}"
        calls = [["ssh", "-o", "StrictHostKeyChecking=no", host.name, there] for host in others]
        print(json.dumps([train([shlex.split(HOROVODRUN)], first, logs), train(calls, first, logs)]))
    return 0


def train(calls: Sequence[Sequence[str]], first: network.Host, logs: dict[str, Path]) -> dict[str, Any]:
    """Make the calls on the first host, at once. Return ranks, logins of each host, and losses."""

    def enter() -> None:
        first.namespaces.enter()
        os.chdir(ROOT)

    def logins() -> dict[str, int]:
        return {name: log.read_text().count("Accepted publickey for root") for name, log in logs.items()}

    before = logins()
    with tempfile.TemporaryDirectory(prefix="gradcomp-home.") as home, tempfile.TemporaryFile("w+") as output:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        # horovodrun remembers in HOME which hosts it has reached.
        environment = {**os.environ, **variables(), "HOME": home}
        started = [subprocess.Popen(call, env=environment, preexec_fn=enter, **options) for call in calls]
        statuses = [each.wait(TIMEOUT) for each in started]
        output.seek(0)
        said = output.read()
    assert not any(statuses), f"{calls[0][0]} ended with status {max(statuses)}:\n{said[-4000:]}"
    return {
        "ranks": int(re.findall(r"each of (\d+) ranks sends", said)[0]),
        "logins": {name: count - before[name] for name, count in logins().items()},
        "losses": [float(loss) for loss in re.findall(r"step \d+: loss (\S+) on rank 0", said)],
    }


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # root leaves no files in the checkout
    sys.exit(guard.supervise(inside))
