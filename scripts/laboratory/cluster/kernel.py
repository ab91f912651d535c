"""Linux calls that Python's standard library lacks before 3.12: namespaces, mounts, death with the parent."""

import ctypes
import os
import signal
from dataclasses import dataclass

from laboratory.options import Refused as Refused

# CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET.
NEW_MOUNTS, NEW_NAMES, NEW_PIDS, NEW_NET = 0x00020000, 0x04000000, 0x20000000, 0x40000000

# MS_BIND, MS_REC, MS_PRIVATE.
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000

# PR_SET_PDEATHSIG.
PARENT_DEATH_SIGNAL = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _call(doing: str, function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        raise Refused(
            f"cannot {doing}: {os.strerror(ctypes.get_errno())}; "
            "run as a root that may make namespaces and mounts (in a container: docker run --privileged)"
        )


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _call("make new namespaces", "unshare", ctypes.c_int(flags))


def mount(kind: str, target: str, flags: int = 0, source: str | None = None) -> None:
    """Mount a file system of this kind, or bind the source."""
    name = os.fsencode(source or kind)
    _call(f"mount {kind} on {target}", "mount", name, os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), None)


def unmount(target: str) -> None:
    """Unmount a folder."""
    _call(f"unmount {target}", "umount2", os.fsencode(target), ctypes.c_int(0))


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    number = ctypes.c_ulong(signal.SIGKILL)
    _call("ask to die with the parent", "prctl", ctypes.c_int(PARENT_DEATH_SIGNAL), number, *[ctypes.c_ulong(0)] * 3)


@dataclass(frozen=True)
class Namespaces:
    """Open files on a network, host-name and mount namespace, which keep them alive."""

    net: int
    names: int
    mounts: int

    @classmethod
    def current(cls, process: str = "self") -> "Namespaces":
        """Open the namespaces of this process, or of the one with this number."""
        return cls(*[os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "mnt")])

    def enter(self) -> None:
        """Move this process into them, and to the folder /."""
        for file in (self.net, self.names, self.mounts):
            _call("enter a namespace", "setns", ctypes.c_int(file), ctypes.c_int(0))
