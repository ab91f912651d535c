"""The calls that sanitizers watch on a GPU, on the emulator: every kernel has some, and a wrong result is named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz import declared, watched
from fuzz.drawn import Draw

from gradcomp.native import extension


def run(*options: str) -> int:
    return watched.main(["--calls", "1", *options])


@pytest.fixture
def module(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The emulator's kernels, whose device claims to be a GPU: arrays are copied to it and back."""
    monkeypatch.setattr(extension, "native", extension.native)  # restored after the test
    monkeypatch.setattr(watched, "module_of", lambda device: emulator)
    monkeypatch.setattr(watched, "DEVICE", "cpu")
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return emulator


@pytest.mark.parametrize("options", [["simt"], ["cuda"], ["cuda", "--uninitialised"]])
def test_every_kernel_keeps_its_contract(module: Any, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", *options) == 0
    *calls, result = capsys.readouterr().out.splitlines()
    kernels = list(declared.kernels())
    assert sorted(calls) == sorted(f"{kernel} 0" for kernel in kernels)
    assert json.loads(result[1:]) == {"calls": len(kernels), "kernels": len(kernels), "failures": []}


@pytest.mark.parametrize("device", ["simt", "cuda"])
def test_a_kernel_that_does_nothing_is_named(
    module: Any, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lying = SimpleNamespace(flatten=lambda *arguments, **options: None)
    monkeypatch.setattr(watched, "module_of", lambda device: lying)
    assert watched.main(["--device", device, "--only", "flatten"]) == 1
    assert "flat is not the gradients" in capsys.readouterr().err


@pytest.mark.parametrize("uninitialised", [False, True])
def test_what_a_kernel_is_to_write_first_gets_no_contents_for_initcheck(module: Any, uninitialised: bool) -> None:
    draw = Draw("seed")
    values = {"flat": draw.garbage(100, "float32"), "grads": [draw.lend(draw.floats(100, 0))]}
    empty, torch.empty = torch.empty, lambda *shape, **options: empty(*shape, **options).fill_(7)
    try:
        (garbage, memory), (filled, other) = watched.move(values, uninitialised)
    finally:
        torch.empty = empty
    assert bool((memory[garbage._at : garbage._end] == 7).all()) == uninitialised
    assert other[filled._at : filled._end].numpy().tobytes() == filled.was.tobytes()
    for lent, there in ((garbage, memory), (filled, other)):  # bands are always filled
        lent._memory[:] = there.numpy()
        assert lent.guarded()
