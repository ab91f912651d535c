"""A measurement of one rank stands for all: its messages are those that real ranks send."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradcomp
from gradcomp.core.requests import World
from gradcomp.prediction import measure
from gradcomp.prediction.recording_network import Bucket, Part, RecordingNetwork

SHAPES = {"a": (300, 100), "b": (100,), "c": (200, 100)}
ENTRIES = 50_100
CPU = torch.device("cpu")
SPECS = [name for name in gradcomp.names() if not gradcomp.make(name).traits.learns]
SPECS += ["topk:route=split", "topk:route=tree", "orq:route=alltoall", "topk:by_host=true", "half:route=alltoall"]


def sent(buckets: list[Bucket]) -> int:
    return sum(part.message.bytes for bucket in buckets for part in bucket.parts if part.message is not None)


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("spec", SPECS)
def test_the_bytes_are_those_that_a_simulation_sends(spec: str, ranks: int) -> None:
    """Rank 0's, over several buckets, with the same gradients in as many steps."""
    by_host = 2 if "by_host" in spec and ranks == 4 else 1
    world = World(0, ranks, tuple(rank // by_host for rank in range(ranks)))
    found = measure.measure(spec, SHAPES, world, 0.1, CPU)
    simulation = gradcomp.Simulation(spec, SHAPES, ranks, bucket_mb=0.1, ranks_per_host=by_host)
    grads = measure.gradients(SHAPES, CPU)
    for _ in range(measure.SETTLING + measure.COUNTED):
        simulation.step([grads] * ranks)
    wanted = simulation._reducers[0].traffic.sent
    assert sorted(name for bucket in found for name in bucket.names) == sorted(SHAPES)
    # A rank's sdagc sends by what it received: recorded ranks are alike, simulated ones are not quite.
    assert sent(found) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("ranks", [16, 64, 256])
@pytest.mark.parametrize(
    "spec", ["dense", "topk", "topk:route=split", "orq:route=alltoall", "gtopk", "sketched_sgd", "topk:by_host=true"]
)
def test_one_rank_sends_what_a_simulated_rank_sends(spec: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring, gathers, parts to all, a tree, a server, and hosts."""
    monkeypatch.setattr(measure, "SETTLING", 0)
    monkeypatch.setattr(measure, "COUNTED", 1)
    (bucket,) = measure.measure(spec, {"w": (64, 64)}, World(0, ranks, tuple(range(ranks))), 25, CPU)
    messages = [part.message for part in bucket.parts if part.message is not None]
    simulation = gradcomp.Simulation(spec, {"w": (64, 64)}, ranks)
    simulation.step([{"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}] * ranks)
    handed_over = sum(sum(each.to.values()) if each.kind == "send" else each.bytes for each in messages)
    assert handed_over == simulation.bytes_sent[0]


@pytest.mark.parametrize("spec", ["topk:warmup=10000", "dense; a=topk:warmup=10000; *=topk", "topk:by_host=true,warmup=10000"])
def test_a_warm_up_is_over_before_the_measurement(spec: str) -> None:
    """Its few steps send more; a training consists of the others."""
    world = World(0, 4, (0, 0, 1, 1))
    without = spec.replace(",warmup=10000", "").replace(":warmup=10000", "")
    assert sent(measure.measure(spec, SHAPES, world, 25, CPU)) == sent(measure.measure(without, SHAPES, world, 25, CPU))


def test_many_ranks_need_little_memory_and_cost_what_their_payloads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply holds some payloads of 1,024; the seconds of the others follow from two sizes."""
    held: list[int] = []
    reply = RecordingNetwork._reply

    def watched(self: RecordingNetwork, request: Any) -> Any:
        answer = reply(self, request)
        held.append(len(answer) if isinstance(answer, list) else 0)
        return answer

    monkeypatch.setattr(RecordingNetwork, "_reply", watched)
    payload = 22_000  # bytes, a little more than 100,000 entries take
    monkeypatch.setattr(measure, "HELD", 32 * payload)
    (few,) = measure.measure("orq:route=allgather", {"a": (100_000,)}, World(0, 16), 25, CPU)
    assert max(held) == 16
    (many,) = measure.measure("orq:route=allgather", {"a": (100_000,)}, World(0, 1024), 25, CPU)
    assert 32 <= max(held) < 64 and sent([few]) == sent([many])
    extended = measure._extended(Part(0.35, None, 33), Part(0.10, None, 8), 1024)
    assert extended.seconds == pytest.approx(0.35 + 0.01 * (1024 - 33))


def test_baselines_are_reductions_of_gradients_in_their_own_type() -> None:
    """DistributedDataParallel has buckets of one type each, and sends bf16 gradients as they are."""
    world, halves = World(0, 4), dict.fromkeys(SHAPES, torch.bfloat16)
    for spec, size in (("none", 0), ("stock", 4), ("bf16", 2), ("fp16", 2), ("accumulate:steps=2", 4)):
        assert sent(measure.measure(spec, SHAPES, world, 25, CPU)) == size * ENTRIES
        assert sent(measure.measure(spec, SHAPES, world, 25, CPU, halves)) == min(2, size) * ENTRIES
    mixed = measure.measure("stock", SHAPES, world, 25, CPU, {"a": torch.bfloat16})
    assert sent(mixed) == 2 * 30_000 + 4 * 20_100
    assert sorted(bucket.names for bucket in mixed) == [("a",), ("c", "b")]
    assert [[part.message is None for part in bucket.parts] for bucket in mixed] == [[False, True]] * 2
