"""The fuzzer: thousands of calls of every kernel, calls to be watched on a GPU, and its way of naming a call that failed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz import call, declared, run, watched

from gradcomp.native import extension

ROOT = Path(__file__).resolve().parents[2]
CALLS = 7568


def fuzzed(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "fuzz.run", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_every_function_of_the_extension_is_declared_and_fuzzed() -> None:
    names = {name for name in dir(extension.native) if callable(getattr(extension.native, name)) and not name.startswith("_")}
    assert set(run.kernels()) == {*declared.kernels(), *declared.scratches()} == names


def test_thousands_of_calls_keep_their_contracts() -> None:
    done = fuzzed(f"--calls={CALLS}", "--seed=1")
    found = re.search(r"(\d+) calls of (\d+) functions in .* s: (\d+) refused, (\d+) compared", done.stdout)
    assert done.returncode == 0 and found is not None, done.stderr
    calls, functions, refused, compared = map(int, found.groups())
    assert calls == CALLS and functions == len(run.kernels())
    assert refused > CALLS / 6 and compared > CALLS / 3


LYING = """
import sys
from gradcomp.native import extension

class Lying:
    def __getattr__(self, name):
        if name == "offer_all":
            return {body}
        return getattr(real, name)

real, extension.native = extension.native, Lying()
from fuzz import run
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("lambda *arguments, **_: None", "taken is wrong"),
        ("lambda residual, flag, taken, scale, **_: residual.__setitem__(slice(0, 1), 5)", "it wrote into residual"),
        ("lambda *arguments, **_: 1 / 0", "ZeroDivisionError"),
        ("lambda *arguments, **_: __import__('os').abort()", "ended with status -6"),
    ],
)
def test_a_call_that_failed_is_named_and_fails_again(body: str, reason: str) -> None:
    """A function that breaks the contract takes the kernel's place."""
    program = [sys.executable, "-c", LYING.format(body=body), "--only=offer_all"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'tests' / 'helpers'}"}
    done = subprocess.run([*program, "--calls=100"], capture_output=True, text=True, env=environment)
    again = re.search(r"again: python -m fuzz.run (--seed \d+ --only offer_all --call \d+)", done.stderr)
    assert done.returncode == 1 and again is not None and reason in done.stderr, done.stderr
    done = subprocess.run([*program, *again[1].split()], capture_output=True, text=True, env=environment)
    assert done.returncode != 0 and done.stdout.startswith("offer_all(residual=")


def test_a_new_argument_of_a_kernel_needs_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    more = declared.Argument("more_of_it", "int64_t", "", False, False)
    assert "wipe" in run.kernels()  # which loads their makers
    monkeypatch.setitem(call.KERNELS, "wipe", [*call.KERNELS["wipe"], more])
    with pytest.raises(call.Wrong, match="no value is made for more_of_it"):
        for number in range(10):
            run.fuzz_one(0, "wipe", number)


# ---- Calls that sanitizers watch on a GPU, on the emulator


@pytest.fixture
def module(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emulator's kernels on a device that claims to be a GPU: arrays are copied to it and back."""
    monkeypatch.setattr(extension, "native", extension.native)  # restored after the test
    monkeypatch.setattr(watched, "module_of", lambda device: emulator)
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return emulator


@pytest.mark.parametrize("device", ["simt", "cuda"])
def test_every_watched_kernel_keeps_its_contract(module: Any, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert watched.main(["--calls", "1", "--device", device]) == 0
    *calls, result = capsys.readouterr().out.splitlines()
    kernels = list(declared.kernels())
    assert sorted(calls) == sorted(f"{kernel} 0" for kernel in kernels)
    assert json.loads(result[1:]) == {"calls": len(kernels), "kernels": len(kernels), "failures": []}


class Placed:
    """Kernels that take only arrays which were copied to the GPU."""

    def __init__(self, module: Any, copies: list[torch.Tensor]):
        self._module, self._copies = module, copies

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            arrays = [each for value in arguments for each in (value if isinstance(value, list) else [value])]
            places = {copy.untyped_storage().data_ptr() for copy in self._copies}
            for array in arrays:
                assert not hasattr(array, "__dlpack__") or array.untyped_storage().data_ptr() in places, name
            return found(*arguments, **options)

        return call


@pytest.mark.parametrize("kernel", ["take_above_and_pack", "find_and_take_levels"])
def test_a_chain_on_a_gpu_is_held_to_the_kernels_of_the_gpu(module: Any, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.Tensor] = []

    def cuda(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    monkeypatch.setattr(torch.Tensor, "cuda", cuda)
    monkeypatch.setattr(watched, "module_of", lambda device: Placed(module, copies))
    assert watched.main(["--calls", "4", "--device", "cuda", "--only", kernel]) == 0


@pytest.mark.parametrize("device", ["simt", "cuda"])
def test_a_kernel_that_does_nothing_is_named(
    module: Any, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lying = SimpleNamespace(flatten=lambda *arguments, **options: None)
    monkeypatch.setattr(watched, "module_of", lambda device: lying)
    assert watched.main(["--device", device, "--only", "flatten"]) == 1
    assert "flat is not the gradients" in capsys.readouterr().err
