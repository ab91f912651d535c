"""What CUDA kernels need of a GPU, held against what they are allowed: as nvcc compiles them, so without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from laboratory.kernels import resources
from laboratory.kernels.resources import Budget, Use
from laboratory.refusal import Refused

ROOT = Path(__file__).resolve().parents[2]

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gradcomp::cuda::(anonymous namespace)::find(float const*, long)' for 'sm_90'
ptxas info    : Function properties for gradcomp::cuda::(anonymous namespace)::find(float const*, long)
    448 bytes stack frame, 44 bytes spill stores, 212 bytes spill loads
ptxas info    : Used 80 registers, used 0 barriers, 448 bytes cumulative stack size
ptxas info    : Compiling entry function 'void gradcomp::cuda::add_tiles<true>(gradcomp::Pieces)' for 'sm_90'
ptxas info    : Function properties for void gradcomp::cuda::add_tiles<true>(gradcomp::Pieces)
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 65 registers, used 1 barriers, 4140 bytes smem
"""


def test_a_report_is_read_kernel_by_kernel() -> None:
    find, tiles = resources.parse("x.cu", REPORT)
    assert find == Use("x.cu", "find(float const*, long)", 80, 448, 256, 0)
    assert tiles == Use("x.cu", "add_tiles<true>(Pieces)", 65, 0, 0, 4140)
    assert resources.exceeded([find, tiles]) == ["x.cu: add_tiles<true>(Pieces) uses 65 registers, above the 64 of its budget"]
    with pytest.raises(Refused, match="unknown form"):
        resources.parse("x.cu", REPORT.replace("Used", "Took"))


def test_every_bound_counts() -> None:
    use = Use("x.cu", "f()", 10, 1, 2, 3)
    assert len(Budget(9, 0, 1, 2).exceeded(use)) == 4 and Budget(10, 1, 2, 3).exceeded(use) == []
