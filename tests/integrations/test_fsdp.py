"""Accelerate with FSDP2 on four real ranks: dense equals the training without gradcomp, to the bit, and blocks is near."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainers import run


@pytest.mark.long
def test_accelerate_trains_by_fsdp2(tmp_path: Path) -> None:
    for own in run(Path(__file__).with_name("by_accelerate_fsdp.py"), 4, tmp_path):
        for mesh, exchanges in (("shards", "gradients, over shards"), ("hybrid", "gradients, over shards and replicas")):
            stock, dense, blocks = (own[f"{mesh} {way}"] for way in (None, "dense", "blocks"))
            assert torch.equal(dense["weights"], stock["weights"]) and dense["losses"] == stock["losses"]
            assert blocks["exchanges"] == exchanges and not torch.equal(blocks["weights"], stock["weights"])
            assert blocks["losses"] == pytest.approx(stock["losses"], rel=0.05)
