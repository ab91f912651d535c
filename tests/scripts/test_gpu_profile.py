"""lab profile: GPUs whose kernels are predicted, in profiles that come with the package and say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradcomp
from gradcomp.prediction import profile
from laboratory.commands.profile import FILES
from laboratory.kernels import gpu_profile
from laboratory.main import main

SHAPES = {f"layer {i}": (256, 512) for i in range(8)}
TIMES = {"forward": 0.01, "backward": 0.02}


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_the_package_are_up_to_date(name: str) -> None:
    """Their kernels are those that are predicted; the host's work was timed once."""
    found, gpu = profile.load(name), FILES[name]
    assert found.predicted and found.machine == gpu.name and found.host
    assert list(found.costs) == list(gpu_profile.WORK)
    for spec, roles in gpu_profile.WORK.items():
        assert found.costs[spec].keys() == roles.keys()
        for role, work in roles.items():
            kernels, written = work.costs(gpu), found.costs[spec][role]
            assert (written.entry, written.byte) == pytest.approx((kernels.entry, kernels.byte), rel=1e-3)
            assert written.fixed >= 0.999 * kernels.fixed and written.layer >= 0.999 * kernels.layer


def test_launches_are_those_of_the_decisions() -> None:
    for spec, launches in {"topk": 15, "sdagc": 18, "orq": 8, "dense": 5}.items():
        roles = gpu_profile.WORK[spec]
        assert sum(work.launches for role, work in roles.items() if "send" not in role) == launches


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_prediction_for_a_gpu_is_marked(ranks: int, one_thread: None) -> None:
    found = gradcomp.predict(SHAPES, ranks, profile="h100", **TIMES)
    head = str(found).splitlines()[0]
    assert "kernels PREDICTED for an NVIDIA H100, no GPU has confirmed them; host work timed on one thread of an" in head
    assert found.json()["predicted"] is True and "PREDICTED" in found.json()["measured"]
    assert {line.spec for line in found.lines} >= {"none", "stock", "bf16", "dense", "half", "topk", "sdagc", "orq", "bingrad"}
    assert "no times of it; it has stock" in found.left_out["powersgd:rank=1"]
    # 4 MB are read and written in some microseconds. A bucket costs the host some tenths of a millisecond.
    assert 1e-5 < found["topk"].encoding < 5e-3 and 5e-5 < found["stock"].encoding < 5e-3


def test_the_command_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_profile, "TRIALS", 1)
    monkeypatch.setattr(gpu_profile, "SIZES", ((4, 4, 2), (4, 16, 8)))
    monkeypatch.setattr(gpu_profile, "SIZES_OF_PARTS", ((8, 16, 2), (8, 32, 4)))
    assert main(["profile", "--out", str(tmp_path)]) == 0
    for name, gpu in FILES.items():
        found = profile.load(tmp_path / f"{name}.json")
        assert found.machine == gpu.name and found.costs.keys() == gpu_profile.WORK.keys()
        assert json.loads((tmp_path / f"{name}.json").read_text())["predicted"] is True
