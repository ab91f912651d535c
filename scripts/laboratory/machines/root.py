"""A bare machine in a folder: made by debootstrap, entered in name spaces of its own, removed without a trace.

Mounts exist in the mount name space of the commands inside only. They end with the last of these, however it ends.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from laboratory.machine import ROOT
from laboratory.refusal import Refused

HOST = "fresh"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UID = 1000

# This machine's settings of proxies, certificates and package indexes, and what a user tells scripts/setup about torch.
SETTINGS = re.compile(r"(?i)(https?|ftp|all|no)_proxy|PIP_\w+|SSL_CERT_FILE|(REQUESTS|CURL)_CA_BUNDLE|GRADCOMP_TORCH\w*")

# $1 is the root, then come pairs of folders to bind read-only (or, after "rw", to be written), then "--" and the command.
ENTER = f"""set -e
root=$1; shift
hostname {HOST}
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do
  mkdir -p "$root$3"
  mount --bind "$2" "$root$3"
  [ "$1" = rw ] || mount -o remount,bind,ro "$root$3"
  shift 3
done
shift
exec chroot "$root" "$@"
"""


def settings() -> dict[str, str]:
    """Return the variables that the inside needs to reach what this machine reaches."""
    return {name: value for name, value in os.environ.items() if SETTINGS.fullmatch(name)}


def named_paths(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files and folders that settings name."""
    for value in variables.values():
        for word in value.split():
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                yield path


def toolkit() -> Path:
    """Return the folder of this machine's CUDA toolkit."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Refused("a cell with nvcc needs it on this machine, too: put it on PATH, or choose other cells with --cell")
    told = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    found = re.search(r"^#\$ TOP=(\S+)", told, re.MULTILINE)
    if found is None:
        raise Refused(f"{nvcc} --dryrun does not name its folder (TOP=...): is it NVIDIA's nvcc?")
    return Path(found[1]).resolve()


class Failed(RuntimeError):
    """A command in the root that failed."""


class Root:
    """One root, below `folder`, with a log of all that runs in it beside it."""

    def __init__(self, folder: Path, name: str, show: Callable[[str], None]):
        self.path = folder / name
        self.log = folder / f"{name}.log"
        self._cache = folder / "pip-cache"
        self._show = show

    def make(self, suite: str) -> None:
        """Make the root out of a base, which debootstrap makes once for each suite."""
        base = self.path.parent / f"base-{suite}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._cache.mkdir(exist_ok=True)
        self.log.write_text("")
        if not (base / "made").exists():
            remove(base)
            self._run(["debootstrap", "--variant=minbase", suite, str(base)], f"debootstrap {suite}", dict(os.environ))
            (base / "made").touch()
        remove(self.path)
        self._run(["cp", "-a", str(base), str(self.path)], "copying the base", dict(os.environ))
        (self.path / "etc/hostname").write_text(f"{HOST}\n")
        # As Debian's installer writes it.
        (self.path / "etc/hosts").write_text(f"127.0.0.1\tlocalhost\n127.0.1.1\t{HOST}\n")
        shutil.copy("/etc/resolv.conf", self.path / "etc/resolv.conf")

    def add_checkout(self, user: str) -> Path:
        """Put the committed files into the user's home, and return the path inside."""
        home = Path("/root" if user == "root" else f"/home/{user}")
        if user != "root":
            self.enter(["useradd", "--create-home", "--uid", str(UID), "--shell", "/bin/bash", user], "root", "a user")
        checkout = self.path / str(home).lstrip("/") / "gradcomp"
        checkout.mkdir()
        with subprocess.Popen(["git", "-C", str(ROOT), "archive", "HEAD"], stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", str(checkout)], stdin=archive.stdout, check=True)
        if archive.returncode != 0:
            raise Refused(f"git archive HEAD failed in {ROOT}: the cells run the committed files of a git checkout")
        if user != "root":
            subprocess.run(["chown", "-R", f"{UID}:{UID}", str(checkout)], check=True)
        return home / "gradcomp"

    def enter(
        self,
        command: Sequence[str],
        user: str,
        what: str,
        nvcc: Path | None = None,
        fine: bool = True,
        variables: Mapping[str, str] = {},
    ) -> tuple[int, str]:
        """Run a command inside, and return its status and output. fine: a failure is an error."""
        home, carried = "/root" if user == "root" else f"/home/{user}", settings()
        binds = ["rw", str(self._cache), f"{home}/.cache/pip"]
        path = PATH
        for found in named_paths(carried):
            if found.is_dir():
                binds += ["ro", str(found), str(found)]
            else:
                copy = self.path / str(found).lstrip("/")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, copy)
        if nvcc is not None:
            binds += ["ro", str(nvcc), str(nvcc)]
            path = f"{nvcc}/bin:{path}"
        if user != "root":
            # pip leaves a cache alone that is not its user's, and mkdir made ~/.cache root's.
            (self.path / f"{home}/.cache/pip".lstrip("/")).mkdir(parents=True, exist_ok=True)
            subprocess.run(["chown", f"{UID}:{UID}", str(self.path / f"{home}/.cache".lstrip("/"))], check=True)
        subprocess.run(["chown", "-R", "0:0" if user == "root" else f"{UID}:{UID}", str(self._cache)], check=True)
        environment = {"PATH": path, "HOME": home, "USER": user, "LANG": "C.UTF-8", **carried, **variables}
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"] if user != "root" else []
        # Values may hold tokens, and every user reads command lines: they travel in the environment. bash adds the names below.
        inside = ["env", "-u", "PWD", "-u", "OLDPWD", "-u", "SHLVL", *as_user, *command]
        words = ["bash", "-c", ENTER, "enter", str(self.path), *binds, "--", *inside]
        return self._run(words, what, environment, fine)

    def _run(self, words: Sequence[str], what: str, variables: Mapping[str, str], fine: bool = True) -> tuple[int, str]:
        apart = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--propagation", "private"]
        before = self.log.stat().st_size
        with self.log.open("ab") as log:
            job = subprocess.Popen(
                [*apart, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
            )
            try:
                while job.poll() is None:
                    self._show(f"{what}: {_last_line(self.log)}")
                    time.sleep(0.5)
            finally:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)  # the first process inside ends with unshare, and all others with it
                    job.wait()
        with self.log.open("rb") as log:
            log.seek(before)
            output = log.read().decode(errors="replace")
        if job.returncode != 0 and fine:
            raise Failed(f"{what} failed with status {job.returncode}: {_last_line(self.log)}")
        return job.returncode, output

    def megabytes(self) -> int:
        """Return the disk that the root takes."""
        told = subprocess.run(["du", "-smx", str(self.path)], capture_output=True, text=True).stdout
        return int(told.split()[0])


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = re.split(r"[\r\n]+", file.read().decode(errors="replace").strip())
    return lines[-1][:100]


def remove(path: Path) -> None:
    """Remove a root, unless something is mounted in it."""
    if not path.exists():
        return
    # An interrupted command's processes may take a moment to end, and their mounts end with them.
    for _ in range(50):
        if f" {path.resolve()}/" not in Path("/proc/self/mountinfo").read_text():
            shutil.rmtree(path)
            return
        time.sleep(0.1)
    raise Refused(f"something is mounted in {path}: unmount it, then remove the folder")
