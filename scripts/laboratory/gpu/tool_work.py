"""The stages of gpu_check that watch kernels: compute-sanitizer's tools, and the counters of ncu."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys

from laboratory.gpu.place import BUILD, program
from laboratory.gpu.stages import Clock, Failed, Impossible, Record
from laboratory.gpu.work import marked
from laboratory.machine import ROOT

# Every allocation is one of the driver's own: inside torch's, an access outside of an array hits another array.
OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
# The status that compute-sanitizer ends with after an error. The calls end with 1.
FOUND = 99

# ncu's counters of each kernel: time, bytes, registers, instructions, and the share of the memory's and the warps' peaks.
COUNTERS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_bytes.sum",
    "launch__registers_per_thread",
    "smsp__inst_executed.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
# The clocks stay as they are: the machine is shared. Only the marked calls of the cases are counted.
NCU = "--clock-control none --profile-from-start off --csv --page raw --print-units base --kernel-name-base demangled"


def calls(clock: Clock, device: str, each: int, before: tuple[str, ...] = (), **variables: str) -> Record:
    """Make legal calls of every kernel, and compare their results with definitions. `before`: a tool that watches them."""
    path = clock.environment.get("PYTHONPATH", "")
    command = [*before, sys.executable, "-m", "fuzz.watched", "--device", device, "--calls", str(each)]
    variables = {**variables, "PYTHONPATH": f"{path}:{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}"}
    return marked(clock.command(command, cwd=BUILD, **variables))


def sanitized(clock: Clock, tool: str, each: int) -> Record:
    """Make the calls under a tool of compute-sanitizer."""
    sanitizer = program("compute-sanitizer")
    if sanitizer is None:
        raise Impossible("compute-sanitizer is missing; install the CUDA toolkit, or name its folder in CUDA_HOME")
    before = (sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *only_ours(sanitizer))
    try:
        found = calls(clock, "cuda", each, before, **OWN_ALLOCATIONS)
    except Failed as error:
        said = clock.output()
        if "Device not supported" in said:
            raise Impossible("compute-sanitizer refuses this GPU here (Device not supported), as in some sandboxes") from None
        raise Failed(f"{'; '.join(summaries(said)) or 'no summary'}\n{error}") from None
    return {**found, "summary": summaries(clock.output())}


def only_ours(sanitizer: str) -> tuple[str, ...]:
    """Return the option that leaves out torch's kernels. Its name differs between versions."""
    described = subprocess.run([sanitizer, "--help"], capture_output=True, text=True, timeout=30).stdout
    option = next((name for name in ("--kernel-name", "--kernel-regex") if re.search(rf"{name}\b(?!-)", described)), None)
    return (option, "kernel_substring=gradcomp") if option else ()


def summaries(text: str) -> list[str]:
    """Find the summaries in the output of compute-sanitizer."""
    return re.findall(r"^=+ ((?:ERROR|RACECHECK|LEAK) SUMMARY: .*)$", text, re.MULTILINE)


def counted(clock: Clock, device: str, part: str, size: str) -> Record:
    """Run the cases of a part of lab kernels, once each, and count what their kernels do. A CPU only runs them."""
    cases = [sys.executable, "-m", "laboratory.gpu.counted_cases", "--device", device, "--part", part, "--size", size]
    if device == "cpu":
        return marked(clock.command(cases, cwd=BUILD))
    ncu, log = program("ncu"), BUILD / f"counters-{part}.csv"
    if ncu is None:
        raise Impossible("ncu is missing; install Nsight Compute, or name the toolkit's folder in CUDA_HOME")
    log.write_text("")
    options = [*NCU.split(), "--kernel-name", "regex:gradcomp", "--log-file", str(log), "--metrics", ",".join(COUNTERS)]
    try:
        found = marked(clock.command([ncu, *options, *cases], cwd=BUILD))
    except Failed as error:
        raise Failed(f"{log.read_text()[-1000:]}\n{error}") from None
    kernels = read_counters(log.read_text())
    if not kernels:
        raise Failed(f"ncu counted no kernel of gradcomp\n{log.read_text()[-1000:]}")
    return {**found, "kernels": kernels}


def read_counters(text: str) -> list[Record]:
    """Read ncu's table: a row of names, one of units, and one for each kernel. Its messages stand before it."""
    _, first, rest = text.partition('"ID"')
    return [_kernel(row) for row in csv.DictReader(io.StringIO(first + rest)) if (row["ID"] or "").isdecimal()]


def _kernel(row: dict[str, str]) -> Record:
    # Without namespaces, and the casts of template arguments, the first parenthesis begins the parameters.
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|gradcomp::|cuda::|^void ", "", row["Kernel Name"])
    name = re.sub(r"\([a-z ]+\)(?=[\w-])", "", name).partition("(")[0]
    plain = {key: row[key].replace(",", "") for key in COUNTERS if key in row}
    counters = {key: float(text) if re.fullmatch(r"[\d.]+", text) else text for key, text in plain.items()}
    return {"kernel": name, "grid": row["Grid Size"], "block": row["Block Size"], **counters}
