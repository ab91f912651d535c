"""The folders of the check, all of them under build/, which git ignores."""

from __future__ import annotations

import os
from pathlib import Path

from laboratory.machine import ROOT

BUILD = ROOT / "build" / "gpu"

# Downloads of --prepare.
PREPARED = ROOT / "build" / "gpu-prepare"

# A copy of gradcomp with the extension for this GPU. The checkout's own stays as it is.
PACKAGE = BUILD / "package"

# Unpacked wheels that this machine lacked.
SITE = BUILD / "site"

# Builds of Horovod, without and with NCCL.
HOROVOD, HOROVOD_NCCL = BUILD / "horovod", BUILD / "horovod-nccl"

LOGS = BUILD / "logs"
RESULTS = ROOT / "benchmarks" / "results"


def environment(horovod: Path = HOROVOD) -> dict[str, str]:
    """Return variables by which every command finds the builds of the check before installed packages, and the laboratory."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(PACKAGE), str(horovod), str(SITE), str(ROOT / "scripts"), before]))
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
