"""The calls that sanitizers watch on a GPU, on the emulator: every kernel has some, and a wrong result is named."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz import declared, watched

from gradcomp.native import extension


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
def test_every_kernel_keeps_its_contract(module: Any, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert watched.main(["--calls", "1", "--device", device]) == 0
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
