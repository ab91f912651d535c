"""FSDP2: what attach() and change() refuse late, what is announced, and unlike draws of replicas."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fsdp_models import RANKS, mesh_of, net, wrapped
from ranks import join, launch, once

import gradcomp
import gradcomp.fsdp


class Lines(logging.Handler):
    def __init__(self, into: list[str]):
        super().__init__()
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(record.getMessage())


def edges() -> dict[str, Any]:
    join()
    found, mesh = dict[str, Any](), mesh_of("two by two")
    log = logging.getLogger("gradcomp")
    log.setLevel(logging.INFO)
    log.addHandler(Lines(found.setdefault("lines", [])))
    model = wrapped("two by two", net(), mesh)
    handle: Any = gradcomp.fsdp.attach(model, "qsgd:momentum=0")
    found["seed"] = handle.modules.axis(handle.modules.shards)._seed
    for spec in ("auto", "sdagc:lr_revision=density"):
        with pytest.raises(ValueError, match="FSDP2") as refused:
            handle.change(spec)
        found[spec] = str(refused.value)
    for spec in ("topk", "blocks"):
        gradcomp.fsdp.attach(wrapped("two by two", net(), mesh), spec)
    return found


@once
def launched() -> list[dict[str, Any]]:
    return launch(edges, RANKS)


def test_rank_0_alone_says_what_is_exchanged() -> None:
    first, *others = (rank["lines"] for rank in launched())
    assert first == [
        "gradcomp: qsgd:momentum=0 over FSDP2 exchanges updates, over replicas, and gradients, over shards",
        "gradcomp: topk over FSDP2 exchanges updates, over replicas",
        "gradcomp: blocks over FSDP2 exchanges gradients, over shards and replicas",
    ]
    assert others == [[]] * 3


def test_replicas_draw_apart() -> None:
    first, _, third, _ = (rank["seed"] for rank in launched())
    assert first != third


def test_auto_and_specs_that_need_rates_are_refused_by_change() -> None:
    for rank in launched():
        assert "auto does not choose over FSDP2" in rank["auto"]
        assert "learning rates, which are unknown over FSDP2" in rank["sdagc:lr_revision=density"]
