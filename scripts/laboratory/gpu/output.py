"""The output of a call of gpu_check: one result and one log, flat in one folder, written anew after every stage."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from laboratory import machine
from laboratory.gpu import stages
from laboratory.gpu.gpu import Gpu
from laboratory.report import results

# Bytes of a stage's log that are kept, half of them from its end.
MOST_LOG = 1_000_000


class Output:
    """The files of a call.

    call: its name. found: the GPU; None in a dry run. logs: the folder of the stages' logs. say: prints a line.
    """

    def __init__(self, folder: Path, call: str, found: Gpu | None, logs: Path, say: Callable[[str], object] = print):
        stem = f"gpu-{machine.slug(found.name)}-{call}" if found else f"dry-run-{call}"
        self.result, self.log = folder / f"{stem}.json", folder / f"{stem}.log"
        self._call, self._found, self._logs, self._say = call, found, logs, say
        folder.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")

    def write(self, records: Sequence[stages.Record]) -> None:
        """Write the result, and after a stage its log. This is called before and after each stage."""
        results.write(self.result, result(self._call, records, self._found))
        last = records[-1]
        if last["status"] == stages.RUNNING:
            return
        with self.log.open("a") as log:
            log.write(f"=== {last['name']}: {last['status']}\n{shortened(self._logs / stages.log_name(last['name']))}\n")
        self._say(f"{last['name']:<17} {last['status']:<10} {last['seconds']:>6.1f} s")
        if "reason" in last:
            self._say("  " + last["reason"].replace("\n", "\n  "))


def shortened(path: Path) -> str:
    """Read a log without its middle, if it is long. A log that is too large would not come back."""
    data = path.read_bytes() if path.exists() else b""
    if len(data) > MOST_LOG:
        half = MOST_LOG // 2
        data = data[:half] + b"\n... and so on ...\n" + data[-half:]
    return data.decode(errors="replace")


def result(call: str, records: Sequence[stages.Record], found: Gpu | None) -> dict[str, Any]:
    """Return the content of the result file."""
    device = found._asdict() if found else {"name": "none: a dry run on the CPU, no result of a GPU"}
    first: stages.Record = next((record.get("figures", {}) for record in records if record["name"] == "machine"), {})
    started = machine.origin(f"scripts/gpu_check {call}" + ("" if found else " --dry-run"))
    versions = first.get("versions", {})
    whole = {"what": "gpu_check", "call": call, "device": device, **started, "versions": versions, "stages": [*records]}
    return without_paths(whole)


def without_paths(whole: dict[str, Any]) -> dict[str, Any]:
    """Replace the folders of the machine."""
    text = json.dumps(whole)
    for folder, name in ((machine.ROOT, "."), (Path(sys.prefix), "PYTHON"), (Path.home(), "HOME")):
        text = text.replace(f"{folder}/", f"{name}/")
    kept: dict[str, Any] = json.loads(text)
    return kept
