"""What a GPU does in the loops of the CUDA kernels, held against what they are meant to do: read in nvcc's machine code."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from laboratory.kernels import machine_code, resources
from laboratory.kernels.machine_code import Loop
from laboratory.refusal import Refused

ROOT = Path(__file__).resolve().parents[2]

# A loop of two loads, both under way before the first is used; a local load and a division of integers, in a function that
# the loop calls; and behind the loop a load whose address is the one before it.
LISTING = """\
	.section	.text._ZN8gradcomp4cuda4lookEPf,"ax",@progbits
	.align	128
.text._ZN8gradcomp4cuda4lookEPf:
        .type           _ZN8gradcomp4cuda4lookEPf,@function
_ZN8gradcomp4cuda4lookEPf:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDL R2, [R1] ;
        /*0020*/                   BRA.DIV UR4, `(.L_x_9) ;
.L_x_0:
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;
        /*0050*/                   FADD R0, R7, R8 ;
        /*0060*/                   CALL.REL.NOINC `($look$helper) ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
        /*0080*/                   LDG.E.64 R12, desc[UR4][R2.64] ;
        /*0090*/                   LDG.E.128 R16, desc[UR4][R12.64] ;
        /*00a0*/                   LDG.E.128.STRONG.GPU R20, desc[UR4][R2.64] ;
        /*00b0*/                   EXIT ;
.L_x_9:
        /*00c0*/                   WARPSYNC.COLLECTIVE R14, `(.L_x_0) ;
        /*00d0*/                   BRA `(.L_x_0) ;
$look$helper:
        /*00e0*/                   LDL R4, [R1+0x4] ;
        /*00f0*/                   I2F.U32.RP R5, R6 ;
        /*0100*/                   RET.REL.NODEC R4 `(_ZN8gradcomp4cuda4lookEPf) ;
"""


def test_machine_code_is_read_kernel_by_kernel() -> None:
    (look,) = machine_code.parse("x.cu", LISTING)
    assert look.kernel == "look(float*)" and look.instructions == 17
    assert (look.wide, look.bytes) == (2, 32)
    assert (look.local, look.divisions) == (1, 1)
    assert look.loops == [Loop(instructions=5, bytes=32, local=0, divisions=0)]
    (line,) = machine_code.lines([look])
    assert line["loops"] == [look.loops[0]._asdict()]
    assert "look" in machine_code.table([look]) and "5 for 32 B" in machine_code.table([look])


def test_a_load_that_waits_for_another_is_not_beside_it() -> None:
    apart = LISTING.replace("R2.64+0x10", "R4.64")
    (look,) = machine_code.parse("x.cu", apart)
    assert (look.wide, look.bytes) == (1, 16)
    inside = LISTING.replace("FADD R0, R7, R8", "I2F.U32.RP R0, R8")
    assert machine_code.parse("x.cu", inside)[0].loops[0].divisions == 1


def test_an_unknown_listing_is_refused() -> None:
    with pytest.raises(Refused, match="shows no kernel"):
        machine_code.parse("x.cu", "")
    with pytest.raises(Refused, match="unknown form"):
        machine_code.parse("x.cu", LISTING.replace("/*", "--"))


def test_a_missing_disassembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(machine_code, "PACKAGE", "no-such-package")
    with pytest.raises(Refused, match="pip install no-such-package"):
        machine_code.disassembler()


# The 128-bit loads, or the bytes, that a thread of a streaming kernel has in flight before it uses the first, at least. With 64
# registers a thread, four of the first are 64 KB a multiprocessor; an H200 needs 29 KB to reach its bandwidth.
WIDE = {
    r"mark_candidates<ResidualReader>": 8,
    r"mark_passing\(": 8,
    r"count_first_digits<ResidualReader": 8,
    r"add_(and_measure_)?tiles<\(Keeps\)0>": 8,
    r"add_(and_measure_)?tiles<\(Keeps\)1>": 6,
    r"add_(and_measure_)?tiles<\(Keeps\)2>": 4,
    r"(flatten|spread|square)_tiles": 4,
    r"find<.*, true>": 5,
}
# The same in bytes, where a thread reads entries that lie apart.
BYTES = {
    r"(add|settle|round)_words<[359]>": 36,
    r"(add|settle|round)_words<2>": 32,
    # The second cache serves most of these reads, and 1,536 threads are there.
    r"sum_cells": 20,
    r"(mark_candidates|count_first_digits)<EstimateReader<[57]>": 64,
    r"(mark_candidates|count_first_digits)<EstimateReader<[39]>": 48,
}
# Kernels that may read local memory, or divide, in loops around those that read entries.
EXCEPTIONS = {
    r"find<": "a search keeps its levels and what it found of each in local memory, and divides a few times for each look",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found, so what it makes of the kernels is NOT checked")
def test_no_kernel_needs_more_than_it_is_allowed() -> None:
    uses = resources.measure("sm_90")
    kernels = {re.split(r"[<(]", use.kernel)[0] for use in uses}
    written = {
        name
        for file in (ROOT / "csrc" / "cuda").iterdir()
        for name in re.findall(r"__global__ void (?:__launch_bounds__\([\w, ]+\))?\s*(\w+)\(", file.read_text())
    }
    assert kernels == written
    assert resources.exceeded(uses) == []
    assert all(any(re.search(pattern, use.kernel) for use in uses) for pattern in resources.EXCEPTIONS)


@pytest.fixture(scope="module")
def codes() -> list[machine_code.Code]:
    return machine_code.measure("sm_90")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found, so what it makes of loops is NOT checked")
def test_streaming_loops_keep_enough_loads_in_flight(codes: list[machine_code.Code]) -> None:
    for table, what in ((WIDE, "wide"), (BYTES, "bytes")):
        for pattern, least in table.items():
            found = {code.kernel: getattr(code, what) for code in codes if re.match(pattern, code.kernel)}
            assert found, pattern
            assert all(has >= least for has in found.values()), found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found, so what it makes of loops is NOT checked")
def test_no_loop_reads_local_memory_or_divides(codes: list[machine_code.Code]) -> None:
    for code in codes:
        assert all((loop.local, loop.divisions) == (0, 0) for loop in code.loops if loop.bytes), code
    excused = [code for code in codes if any(re.match(pattern, code.kernel) for pattern in EXCEPTIONS)]
    assert [code.kernel for code in codes if (code.local or code.divisions) and code not in excused] == []
    assert all(any(re.match(pattern, code.kernel) for code in excused) for pattern in EXCEPTIONS)
