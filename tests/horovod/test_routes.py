"""Both ways into Horovod, and DDP, train to the same weights, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import small_net
import torch
from doors import DDP, DOORS, Training, join
from torch import Tensor

pytestmark = pytest.mark.slow

SPECS = ["topk:ratio=0.05", "blocks", "orq", "half"]
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def program(door: str) -> dict[Any, Tensor]:
    join(door)
    found = {}
    for spec in SPECS:
        for kind, made in OPTIMIZERS.items():
            model = small_net.net()
            found[spec, kind] = Training(door, model, spec, inner=made(model.parameters())).train(12)
    return found


@ranks.once
def found(door: str) -> list[dict[Any, Tensor]]:
    return ranks.launch(program, 2, door)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("spec", SPECS)
def test_horovod_trains_as_ddp_does(spec: str, kind: str, door: str) -> None:
    first = found(DDP)[0][spec, kind]
    for rank in found(door):
        assert torch.equal(rank[spec, kind], first)
