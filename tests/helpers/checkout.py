"""A checkout with the scripts only, in which set-up meets whatever machine a test wants."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL_PYTHON = os.path.realpath(sys.executable)
PLENTY = 900_000


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # it may be a link to the system's program, which must stay as it is
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


class Checkout:
    """A checkout with the scripts only, and a PATH of stand-ins for what set-up looks for, in front of the system's tools."""

    def __init__(self, folder: Path):
        self.root, self.bin = folder / "checkout", folder / "bin"
        shutil.copytree(ROOT / "scripts" / "setting_up", self.root / "scripts" / "setting_up")
        for name in ("setup", "demo", "lib.sh"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts" / name)
        self.has_home = True
        self.bin.mkdir()
        wanted = ("python3", "c++", "g++", "cmake", "nvcc", "nvidia-smi", "df", "ccache", "id", "sudo", "apt-get", "tc")
        for place in ("/usr/bin", "/bin"):
            for tool in Path(place).iterdir():
                if tool.name not in wanted and not os.path.lexists(self.bin / tool.name):
                    (self.bin / tool.name).symlink_to(tool)
        self.has("df", f"printf 'header\\n/dev/x 1 1 {PLENTY} 1%% /\\n'")
        self.has("id", "echo 1000")
        # Set-up must not get as far as a download. If it does, it finds nobody to download from.
        self.variables = {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}

    def has(self, name: str, text: str) -> None:
        program(self.bin / name, text)

    def has_all(self) -> None:
        """Have what a machine needs."""
        self.has("python3", f'exec {REAL_PYTHON} "$@"')
        for name in ("c++", "cmake"):
            found = shutil.which(name)
            assert found is not None
            self.has(name, f'exec {found} "$@"')

    def has_environment(self) -> None:
        """Have a .venv with a pip that writes down what it is to install, says what stands in `heard`, and fails.

        It can update itself but offline.
        """
        update = f'case "$*" in *"--upgrade pip"*) [ ! -e {self.root}/offline ] && touch {self.root}/updated; exit ;; esac'
        pip = (
            f'{update}\ncase "$*" in *"pip --disable-pip-version-check install"*) echo "$*" >>{self.root}/asked'
            f"\ncat {self.root}/heard; exit 7 ;; esac"
        )
        program(self.root / ".venv" / "bin" / "python", f'{pip}\nexec {sys.executable} "$@"')

    def setup(self, *arguments: str) -> tuple[int, str]:
        variables = {"PATH": str(self.bin), **self.variables, **({"HOME": str(self.root)} if self.has_home else {})}
        done = subprocess.run(
            ["bash", str(self.root / "scripts" / "setup"), *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout == ""
        return done.returncode, done.stderr

    def untouched(self) -> bool:
        """Whether neither an environment was made nor anything installed."""
        return not (self.root / ".venv" / "pyvenv.cfg").exists() and not list((self.root / "build" / "logs").glob("*.log"))
