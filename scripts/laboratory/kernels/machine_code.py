"""What nvcc makes of every CUDA kernel, read from the machine code: loads in flight, loops, local memory and divisions.

A kernel reaches a GPU's bandwidth if enough of its loads are under way at once. The loads that a thread issues before it uses
the first can be counted in the machine code, without a GPU. Loads of other blocks' results (`__ldcg`) do not count: no
streaming loop has them.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from laboratory.kernels import compiled, flow, resources
from laboratory.kernels.flow import Graph, Instruction
from laboratory.refusal import Refused
from laboratory.report.tables import columns

PACKAGE = "nvidia-cuda-nvdisasm"

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^([.$\w]+):")
# A load from global memory, with its bits. STRONG: __ldcg, or an atomic's way round the first cache.
LOAD = re.compile(r"LDG\.E(?!.*STRONG)(?:.*\.(128|64|U16|U8|S8))?")
WIDTHS = {"128": 16, "64": 8, "U16": 2, "U8": 1, "S8": 1, None: 4}
# The reciprocal with which a division of integers begins, and the routines for 64 bits.
DIVISION = re.compile(r"I2F(?:\.[US](?:32|64))?\.RP")
DIVISION_ROUTINE = re.compile(r"cuda_sm20_(?:div|rem)_[us]64")


class Loop(NamedTuple):
    """A loop without another inside: instructions, bytes that a thread loads in a turn, local loads, and divisions."""

    instructions: int
    bytes: int
    local: int
    divisions: int


class Code(NamedTuple):
    """A kernel's machine code. wide, bytes: the most 128-bit loads, and bytes, that a thread has in flight at once."""

    file: str
    kernel: str
    instructions: int
    wide: int
    bytes: int
    local: int  # loads from local memory inside loops
    divisions: int  # of integers, by a number that is not a constant, inside loops
    loops: list[Loop]


def disassembler() -> str:
    """Find nvdisasm: on PATH, or in the Python package of that name."""
    found = shutil.which("nvdisasm")
    if found is not None:
        return found
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise Refused(f"nvdisasm was not found; pip install {PACKAGE}, or put it on PATH") from None
    return next(str(file.locate()) for file in files if file.name == "nvdisasm")


def measure(arch: str, names: Sequence[str] | None = None) -> list[Code]:
    """Compile the files, all unless named, for one architecture, for example sm_90, and read their machine code."""
    reader = disassembler()

    def read(each: compiled.Compiled) -> list[Code]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
            binary.write(each.cubin)
            binary.flush()
            text = subprocess.run([reader, "-c", binary.name], capture_output=True, text=True, check=True).stdout
        return parse(each.file, text)

    with ThreadPoolExecutor(2) as pool:
        return [code for codes in pool.map(read, compiled.every(arch, names)) for code in codes]


def parse(file: str, text: str) -> list[Code]:
    """Read nvdisasm's output, kernel by kernel."""
    parts = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", text, flags=re.MULTILINE)[1:]
    if not parts:
        raise Refused(f"{file}: nvdisasm shows no kernel")
    names = resources.plain_names("\n".join(parts[::2])).splitlines()
    found = []
    for name, body in zip(names, parts[1::2], strict=True):
        instructions = read_instructions(body)
        if not instructions:
            raise Refused(f"{file}: nvdisasm's output has an unknown form:\n{body[:500]}")
        found.append(judge(file, resources.short_name(name), instructions))
    return found


def read_instructions(body: str) -> list[Instruction]:
    """Read the instructions of a kernel, each with the labels before it."""
    found: list[Instruction] = []
    labels: list[str] = []
    for line in body.splitlines():
        if label := LABEL.match(line):
            labels.append(label[1])
        elif match := LINE.match(line):
            found.append(Instruction(match[3], match[4], bool(match[2]), tuple(labels)))
            labels = []
    return found


def judge(file: str, kernel: str, instructions: Sequence[Instruction]) -> Code:
    """Count what one kernel has."""
    graph = Graph(instructions)
    loops = graph.loops()
    wide, most = in_flight(graph)
    inside = flow.with_called(graph, set().union(*loops)) if loops else set()
    inner = [loop for loop in loops if not any(other < loop for other in loops)]
    counted = [Loop(*(sum(of(graph, block) for block in loop) for of in (size, loaded, local, divisions))) for loop in inner]
    return Code(
        file,
        kernel,
        len(instructions),
        wide,
        most,
        sum(local(graph, block) for block in inside),
        sum(divisions(graph, block) for block in inside),
        sorted(counted, reverse=True),
    )


def size(graph: Graph, block: int) -> int:
    """Count a block's instructions."""
    return len(graph.blocks[block])


def loaded(graph: Graph, block: int) -> int:
    """Count the bytes that a block loads from global memory."""
    return sum(WIDTHS[match[1]] for each in graph.blocks[block] if (match := LOAD.match(each.name)))


def local(graph: Graph, block: int) -> int:
    """Count a block's loads from local memory."""
    return sum(each.name.startswith("LDL") for each in graph.blocks[block])


def divisions(graph: Graph, block: int) -> int:
    """Count a block's divisions of integers, each where it begins or is called."""
    return sum(
        bool(DIVISION.match(each.name)) or (each.name.startswith("CALL") and bool(DIVISION_ROUTINE.search(each.rest)))
        for each in graph.blocks[block]
    )


def in_flight(graph: Graph) -> tuple[int, int]:
    """Return the most 128-bit loads, and the most bytes, that are under way before the first of them is used.

    Where ways meet, the one with most bytes under way counts: that of whole, aligned tiles.
    """

    def rank(coming: dict[int, int]) -> tuple[int, int]:
        return sum(coming.values()), sum(its == 16 for its in coming.values())

    wide = most = 0
    after: dict[int, dict[int, int]] = {}
    for block, before in graph.forward():
        # The registers that are still to come, each with the bytes of its load.
        fullest: dict[int, int] = max((after[each] for each in before), key=rank, default={})
        coming = dict(fullest)
        for each in graph.blocks[block]:
            registers = [int(number) for number in re.findall(r"\bR(\d+)", each.rest)]
            match = LOAD.match(each.name)
            if any(register in coming for register in (registers[1:] if match else registers)):
                coming = {}
            if match is None or not registers:
                continue
            bytes_ = WIDTHS[match[1]]
            # A load is noted at its first register, the others only end the run.
            for register in range(registers[0], registers[0] + max(1, bytes_ // 4)):
                coming[register] = 0
            coming[registers[0]] = bytes_
            most, wide = max(most, rank(coming)[0]), max(wide, rank(coming)[1])
        after[block] = coming
    return wide, most


def table(codes: Sequence[Code]) -> str:
    """Write the codes as a table, with the loop that loads most."""
    rows: list[tuple[str, ...]] = [("kernel", "file", "instructions", "128-bit loads", "bytes", "local", "divisions", "loop")]
    for code in codes:
        loop = max(code.loops, key=lambda loop: loop.bytes, default=None)
        inner = f"{loop.instructions} for {loop.bytes} B" if loop is not None and loop.bytes else "none loads"
        name = re.sub(r"(?<=[\w>])\(.*", "", code.kernel)
        rows.append((name, code.file, *(str(figure) for figure in code[2:7]), inner))
    return columns(rows)


def lines(codes: Sequence[Code]) -> list[dict[str, Any]]:
    """Return every code, for the result file: of its loops those that load, or hold what does not belong there."""
    kept = [(code, [loop._asdict() for loop in code.loops if loop.bytes or loop.local or loop.divisions]) for code in codes]
    return [{**code._asdict(), "loops": loops} for code, loops in kept]
