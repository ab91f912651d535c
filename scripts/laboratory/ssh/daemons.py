"""Hosts that ssh reaches: emulated hosts with a daemon each, whose keys, settings and log lie in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from laboratory.cluster import kernel, network
from laboratory.cluster.kernel import Namespaces

# Seconds until a daemon must listen.
PATIENCE = 20

# Root's home may forbid keys in a folder that others may write to, as a temporary directory's parent is.
DAEMON = """\
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {keys}/key.pub
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
  IdentityFile {keys}/key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


class Daemon:
    """The sshd of one host, with its log."""

    def __init__(self, host: network.Host, folder: Path, keys: Path):
        self.host, self.log = host, folder / "log"
        folder.mkdir()
        make_key(folder / "key")
        settings = folder / "sshd_config"
        settings.write_text(DAEMON.format(address=host.address, folder=folder, keys=keys))
        sshd = network.find("sshd")
        assert sshd
        self._process = subprocess.Popen(
            [sshd, "-D", "-f", str(settings), "-E", str(self.log)],  # sshd asks for its whole path
            stdin=subprocess.DEVNULL,
            preexec_fn=host.namespaces.enter,
        )

    def wait(self) -> None:
        """Wait until it listens."""
        end = time.monotonic() + PATIENCE
        while "Server listening" not in (said := self.log.read_text() if self.log.exists() else ""):
            if self._process.poll() is not None or time.monotonic() > end:
                raise kernel.Refused(f"sshd does not listen on {self.host.name}: {said.strip() or 'it said nothing'}")
            time.sleep(0.05)

    def logins(self) -> int:
        """Count the sessions that it has let in."""
        return len(re.findall(r"^Accepted publickey for root", self.log.read_text(), re.MULTILINE))


def make_key(path: Path) -> None:
    """Make a key pair without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gradcomp", "-f", str(path)], check=True)


def start(hosts: Sequence[network.Host], folder: Path) -> list[Daemon]:
    """Start a daemon on every host but the first. All hosts get the key, and settings by which ssh uses it."""
    make_key(folder / "key")
    client = folder / "ssh_config"
    client.write_text(CLIENT.format(keys=folder))
    middle = Namespaces.current()
    for host in hosts:
        host.namespaces.enter()
        kernel.mount("settings", "/etc/ssh/ssh_config", kernel.BIND, str(client))
        kernel.mount("tmpfs", "/run")  # seen on this host only
        os.mkdir("/run/sshd", 0o755)  # noqa: PTH102 - where the daemon has no rights
    middle.enter()
    daemons = [Daemon(host, folder / host.name, folder) for host in hosts[1:]]
    for daemon in daemons:
        daemon.wait()
    return daemons
