"""Where the check builds and looks for things, all of it under build/, which git ignores."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "gpu"
PREPARED = ROOT / "build" / "gpu-prepare"  # what --prepare brought along
PACKAGE = BUILD / "package"  # a copy of gradcomp with the extension for this GPU: the checkout's own stays as it is
SITE = BUILD / "site"  # unpacked wheels that this machine lacked
HOROVOD = BUILD / "horovod"  # Horovod, if it was built here
HOROVOD_NCCL = BUILD / "horovod-nccl"  # and another one, with NCCL
LOGS = BUILD / "logs"
RESULTS = ROOT / "benchmarks" / "results"


def environment(horovod: Path = HOROVOD) -> dict[str, str]:
    """Lets every command find what was built here before what is installed."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(horovod), str(SITE), before]))
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
