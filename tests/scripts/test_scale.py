"""scripts/lab scale: what messages cost a host, by hand, and beside what hosts have measured."""

from __future__ import annotations

import json

import pytest
from documents import ROOT

from laboratory.commands import scale
from laboratory.tasks import texts

SHAPES = {"matrix": (64, 96), "vector": (64,)}
N = 64 * 96 + 64


@pytest.mark.parametrize("hosts", [2, 16, 1024])
def test_the_costs_of_a_reduction_and_of_a_gather(hosts: int) -> None:
    stock, topk = (scale.costs(spec, SHAPES, hosts) for spec in ("stock", "topk"))
    assert stock["interface_bytes"] == pytest.approx(2 * (hosts - 1) / hosts * 4 * N)
    assert stock["messages"] == 2 * (hosts - 1) and stock["received_bytes"] == 4 * N
    payload = topk["interface_bytes"] / (hosts - 1)
    assert 2 * N / 100 < payload < 4 * N / 100
    assert topk["messages"] == hosts - 1 and topk["received_bytes"] == pytest.approx(hosts * payload)


def test_powersgd_reduces_two_factors_and_the_vectors() -> None:
    assert [message.bytes for message in scale.powersgd(SHAPES, 4)] == [4 * 64, 4 * 4 * 64, 4 * 4 * 96]
    assert [message.bytes for message in scale.powersgd({"small": (4, 4)}, 4)] == [64, 0, 0]


@pytest.mark.parametrize("hosts", [4, 16])
def test_the_computed_bytes_are_those_that_interfaces_have_counted(hosts: int) -> None:
    """Headers of packets, and the trainings' own messages, are counted, too."""
    record = json.loads((ROOT / "benchmarks" / "results" / f"train-scale-{hosts}.json").read_text())
    (run,) = record["runs"]
    model = texts.Transformer(0, int(run["settings"]["width"]), int(run["settings"]["depth"]))
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    counted = {line["way"]: line["interface_bytes_per_step"] for line in run["lines"]}
    assert run["hosts"] == hosts and {"stock", "topk", "blocks", "topk:route=split", "gs_sgd"} < counted.keys()
    for way, measured in counted.items():
        computed = scale.costs(way, shapes, hosts)["interface_bytes"]
        least = 0.5 if "tree" in way else 0.97  # rank 0 is the root, and sends the most
        assert least * computed < measured < 1.25 * computed + 20_000, (way, measured, computed)
