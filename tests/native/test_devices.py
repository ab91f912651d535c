"""The binding's handling of devices (csrc/bind_device.h), compiled against a CUDA that has four devices and no GPU."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "native" / "fake_cuda"


def test_the_device_before_a_call_is_current_again_and_a_capture_loads_nothing(tmp_path: Path) -> None:
    program = tmp_path / "calls"
    compiler = [os.environ.get("CXX") or "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command = [*compiler, f"-I{FAKE}", f"-I{ROOT / 'csrc'}", str(FAKE / "calls.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.stdout == "all hold\n"
