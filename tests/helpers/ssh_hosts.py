"""Emulated hosts that ssh reaches: a daemon on each, with keys and settings that are made for the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laboratory.cluster import kernel, network

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("ip", "ssh", "ssh-keygen", "sshd")
PATIENCE = 20

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


def figures_of(test: str, seconds: float) -> Any:
    """Run a test's file as a program, which makes hosts of its own. Return what its last line says."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT / 'tests' / 'helpers'}"}
    done = subprocess.run([sys.executable, test], capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
