"""torch.distributed.checkpoint saves the states of all ranks as one, which goes on to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from doors import DDP, Training
from rank_server import FOLDER
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = pytest.mark.slow

SPECS = ["topk:ratio=0.05,momentum=0.9", "sdagc:lam=1.5,small=pool", "lgc:dense=1,learn=2,ratio=0.05"]


def program(spec: str) -> dict[str, Any]:
    """Save with both ranks, load on both, and go on."""
    ranks.join()
    run, folder = Training(DDP, spec=spec, bucket_mb=0.02), Path(os.environ[FOLDER])
    run.train(4)
    dcp.save({"gradcomp": run.handle.state_dict()}, checkpoint_id=folder / "state")
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder / "state", folder / "whole.pt")
    dist.barrier()
    whole = torch.load(folder / "whole.pt", weights_only=True)["gradcomp"]
    again = Training(DDP, spec=spec, bucket_mb=0.02)
    again.model.load_state_dict(run.model.state_dict())
    again.handle.load_state_dict(whole)
    batches = [next(run.data) for _ in range(3)]
    run.data, again.data = iter(batches), iter(batches)
    return {"ranks": [*whole["of_rank"]], "wanted": run.train(3), "came": again.train(3)}


@pytest.mark.parametrize("spec", SPECS)
def test_training_goes_on_to_the_bit(spec: str) -> None:
    for own in ranks.launch(program, 2, spec):
        assert own["ranks"] == ["0", "1"] and torch.equal(own["came"], own["wanted"])
