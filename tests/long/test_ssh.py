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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from laboratory.cluster import guard, kernel, network

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("ip", "ssh", "ssh-keygen", "sshd")
LACKING = [program for program in PROGRAMS if not network.find(program)]

# As in docs/clusters.md; torchrun is called on every host, which ssh does here.
HOROVODRUN = "horovodrun -np 4 -H host1:2,host2:2 python examples/stock_horovod.py"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint host1:29500 examples/ddp.py"
RANKS, PATIENCE, TIMEOUT = 4, 20, 300

# Root's home may forbid keys in a folder that others may write to, as a temporary directory's parent is.
DAEMON = """\
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""

# No file of the user is read or written: neither keys nor known hosts.
CLIENT = """\
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def test_the_page_of_clusters_has_these_commands() -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    for command in (HOROVODRUN, TORCHRUN):
        assert " ".join("train.py" if word.startswith("examples/") else word for word in command.split()) in page


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="launchers over ssh were NOT tested: they need root")
@pytest.mark.skipif(bool(LACKING), reason=f"launchers over ssh were NOT tested: {LACKING} missing, install openssh-server")
def test_both_launchers_train_on_hosts_that_ssh_reaches() -> None:
    pytest.importorskip("horovod.torch", reason="launchers over ssh were NOT tested: Horovod is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=700, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    by_horovodrun, by_torchrun = json.loads(done.stdout.splitlines()[-1])
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


def start_daemons(hosts: Sequence[network.Host], folder: Path) -> dict[str, Path]:
    """Start a daemon on every host but the first, and return their logs. All hosts get the key, and settings that use it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    middle, logs = kernel.Namespaces.current(), {}
    for host in hosts:
        host.namespaces.enter()
        kernel.mount("settings", "/etc/ssh/ssh_config", kernel.BIND, str(folder / "ssh_config"))
        kernel.mount("tmpfs", "/run")  # seen on this host only
        os.mkdir("/run/sshd", 0o755)  # noqa: PTH102 - where the daemon has no rights
        if host is not hosts[0]:
            settings, logs[host.name] = folder / f"{host.name}.conf", folder / f"{host.name}.log"
            settings.write_text(DAEMON.format(address=host.address, folder=folder))
            logs[host.name].touch()
            # sshd asks for its whole path.
            subprocess.Popen([str(network.find("sshd")), "-D", "-f", settings, "-E", logs[host.name]], stdin=subprocess.DEVNULL)
    middle.enter()
    end = time.monotonic() + PATIENCE
    while not all("Server listening" in log.read_text() for log in logs.values()):
        assert time.monotonic() < end, f"sshd does not listen: {[log.read_text() for log in logs.values()]}"
        time.sleep(0.05)
    return logs


def variables() -> dict[str, str]:
    """Return what ranks need on every host."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": network.INTERFACE}


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
