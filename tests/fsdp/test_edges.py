"""FSDP2: what attach() and change() refuse late, a GradScaler beside a residual, and unlike draws of replicas."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import RANKS, inputs, loss, mesh_of, net, whole_grads, wrapped
from ranks import join, launch, once
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import gradcomp
import gradcomp.fsdp

TOPK = "topk:ratio=0.1,momentum=0"


class Twins(nn.Module):
    """Two layers of one size, of which the first may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.second(self.first(x) if both else x)


class Lines(logging.Handler):
    def __init__(self, into: list[str]):
        super().__init__()
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(record.getMessage())


def edges() -> dict[str, Any]:
    join()
    rank, found, mesh = dist.get_rank(), dict[str, Any](), mesh_of("two by two")
    log = logging.getLogger("gradcomp")
    log.setLevel(logging.INFO)
    log.addHandler(Lines(found.setdefault("lines", [])))
    model = wrapped("two by two", net(), mesh)
    handle = gradcomp.fsdp.attach(model, "qsgd:momentum=0")
    found["seed"] = handle._session.reducer.scatter._seed
    for spec in ("auto", "sdagc:lr_revision=density"):
        with pytest.raises(ValueError, match="FSDP2") as refused:
            handle.change(spec)
        found[spec] = str(refused.value)
    model, scaler = wrapped("two by two", net(), mesh), torch.amp.GradScaler("cpu", init_scale=256.0)
    gradcomp.fsdp.attach(model, TOPK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(2):
            scaler.scale(loss(model, inputs(step)[rank])).backward()
            scaler.step(optimizer)
            scaler.update()
    found["scaled"] = [str(each.message) for each in seen if "GradScaler" in str(each.message)]
    twins, plain = Twins(), Twins()
    twins.first.weight.requires_grad_(False)
    fully_shard(twins, mesh=mesh)
    gradcomp.fsdp.attach(twins, TOPK)
    twins.first.weight.requires_grad_(True)
    x = torch.randn(RANKS, 5, 6, generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        twins(x[rank], both=False).square().mean().backward()
    found["unfrozen"] = [str(each.message) for each in seen if "were unfrozen" in str(each.message)]
    (sum(plain(each, both=False).square().mean() for each in x) / RANKS).backward()
    torch.testing.assert_close(whole_grads(twins)["second.weight"], plain.second.weight.grad)
    return found


@once
def launched() -> list[dict[str, Any]]:
    return launch(edges, RANKS)


def test_rank_0_alone_says_what_is_exchanged() -> None:
    first, *others = (rank["lines"] for rank in launched())
    assert len(first) == 3 and first[0] == "gradcomp: qsgd:momentum=0 over FSDP2 exchanges gradients, over shards and replicas"
    assert others == [[]] * 3


def test_replicas_draw_apart() -> None:
    first, _, third, _ = (rank["seed"] for rank in launched())
    assert first != third


def test_auto_and_specs_that_need_rates_are_refused_by_change() -> None:
    for rank in launched():
        assert "auto does not choose over FSDP2" in rank["auto"]
        assert "learning rates, which are unknown over FSDP2" in rank["sdagc:lr_revision=density"]


def test_a_scaler_beside_a_residual_is_warned_of_once() -> None:
    assert len(launched()[0]["scaled"]) == 1


def test_layers_of_one_size_are_not_taken_for_each_other() -> None:
    """One layer has been unfrozen since attach(), and the gradient that comes has the size of the other one's."""
    assert launched()[0]["unfrozen"]
