"""Trainers with FSDP2 on real ranks: dense equals training without gradcomp to the bit; blocks is near it, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import run

pytestmark = pytest.mark.long


def check(found: dict[str, Any], exchanges: str) -> None:
    """Check the trainings over one mesh."""
    stock, dense, blocks, gathered, resumed = (found[way] for way in ("None", "dense", "blocks", "gathered", "resumed"))
    assert torch.equal(dense["weights"], stock["weights"]) and dense["losses"] == stock["losses"]
    for way, wanted in ((blocks, exchanges), (gathered, f"{exchanges}, and gathers weights as blocks:bits=8")):
        assert way["stats"]["exchanges"] == wanted and not torch.equal(way["weights"], stock["weights"])
        assert way["losses"] == pytest.approx(stock["losses"], rel=0.05)
        assert way["norms"] == pytest.approx(stock["norms"], rel=0.1)
    assert gathered["stats"]["weight_bytes_sent"] and not torch.equal(gathered["weights"], blocks["weights"])
    assert torch.equal(resumed["weights"], gathered["weights"])
    assert resumed["losses"] == gathered["losses"][len(stock["losses"]) // 2 :]


def check_topk(found: dict[str, Any]) -> None:
    assert found["stats"]["exchanges"] == "updates, over replicas, and gathers weights as blocks:bits=8"
    assert found["losses"][-1] < 0.95 * found["losses"][0]


def test_accelerate_trains_by_fsdp2(tmp_path: Path) -> None:
    for own in run(Path(__file__).with_name("by_accelerate_fsdp.py"), 4, tmp_path):
        for mesh, exchanges in (("shards", "gradients, over shards"), ("hybrid", "gradients, over shards and replicas")):
            check({name.removeprefix(f"{mesh} "): each for name, each in own.items() if name.startswith(mesh)}, exchanges)
        check_topk(own["hybrid topk"])


@pytest.mark.parametrize(("ranks", "exchanges"), [(2, "gradients, over shards"), (4, "gradients, over shards and replicas")])
def test_hugging_faces_trainer_trains_by_fsdp2(ranks: int, exchanges: str, tmp_path: Path) -> None:
    for own in run(Path(__file__).with_name("by_transformers_fsdp.py"), ranks, tmp_path):
        check(own, exchanges)
        if ranks == 4:
            check_topk(own["topk"])
