"""The cells of the matrix: each a distribution, a compiler, a user, and nvcc or none."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """One bare machine.

    suite: Debian's name of the release, for debootstrap.
    packages: what its user has installed beforehand.
    compiler: CXX; empty where it is left to set-up.
    user: who runs the demo: root, or a user without rights.
    nvcc: whether this machine's CUDA toolkit is there, too.
    """

    name: str
    distribution: str
    suite: str
    packages: tuple[str, ...]
    compiler: str
    user: str
    nvcc: bool


CELLS = (
    Cell("debian12-gcc12-root", "Debian 12", "bookworm", (), "", "root", False),
    Cell("debian12-gcc12-user", "Debian 12", "bookworm", (), "", "newcomer", False),
    Cell("debian13-gcc14-user", "Debian 13", "trixie", (), "", "newcomer", False),
    Cell("debian13-gcc12-root", "Debian 13", "trixie", ("g++-12",), "g++-12", "root", False),
    Cell("debian13-clang19-user", "Debian 13", "trixie", ("clang",), "clang++", "newcomer", False),
    Cell("debian13-gcc14-nvcc-user", "Debian 13", "trixie", (), "", "newcomer", True),
)
