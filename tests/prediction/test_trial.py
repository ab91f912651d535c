"""A trial of one rank stands for all: its messages are those that real ranks send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import gradcomp
from gradcomp.core.requests import World
from gradcomp.prediction import peers, trial
from gradcomp.prediction.mirror import Mirror
from gradcomp.prediction.trial import Bucket

SHAPES = {"a": (300, 100), "b": (100,), "c": (200, 100)}
CPU = torch.device("cpu")
SPECS = [name for name in gradcomp.names() if not gradcomp.make(name).traits.learns]
SPECS += ["topk:route=split", "topk:route=tree", "orq:route=alltoall", "topk:by_host=true", "half:route=alltoall"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "EFFORT", trial.Effort(seconds=0.0))


def sent(buckets: list[Bucket]) -> int:
    return sum(part.message.bytes for bucket in buckets for part in bucket.parts if part.message is not None)


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("spec", SPECS)
def test_the_bytes_are_those_that_a_simulation_sends(spec: str, ranks: int) -> None:
    """Rank 0's, over several buckets, with the same gradients in as many steps."""
    by_host = 2 if "by_host" in spec and ranks == 4 else 1
    world = World(0, ranks, tuple(rank // by_host for rank in range(ranks)))
    found = trial.try_out(spec, SHAPES, world, 0.1, CPU)
    simulation = gradcomp.Simulation(spec, SHAPES, ranks, bucket_mb=0.1, ranks_per_host=by_host)
    grads = trial.gradients(SHAPES, CPU)
    for _ in range(trial.EFFORT.settling + trial.EFFORT.counted):
        simulation.step([grads] * ranks)
    wanted = simulation._reducers[0].bytes_sent
    assert sorted(name for bucket in found for name in bucket.names) == sorted(SHAPES)
    # What a rank receives decides how much sdagc sends next; the mirror's ranks are alike, and a sketch's hashes are not.
    assert sent(found) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("spec", ["topk:warmup=10000", "dense; a=topk:warmup=10000; *=topk", "topk:by_host=true,warmup=10000"])
def test_a_warm_up_is_over_before_the_trial(spec: str) -> None:
    """Its few steps send more; a training consists of the others."""
    world = World(0, 4, (0, 0, 1, 1))
    without = spec.replace(",warmup=10000", "").replace(":warmup=10000", "")
    assert sent(trial.try_out(spec, SHAPES, world, 25, CPU)) == sent(trial.try_out(without, SHAPES, world, 25, CPU))


def test_steps_that_change_in_the_trial_count_from_the_change_on() -> None:
    """lgc ends its dense steps at the 200th; a tiny model gets there while steps are timed."""
    effort = trial.Effort(settling=150, counted=100, seconds=0.0)
    (bucket,) = trial.try_out("lgc", {"a": (20, 10)}, World(0, 2), 25, CPU, effort)
    dense = trial.try_out("dense", {"a": (20, 10)}, World(0, 2), 25, CPU)
    assert sent([bucket]) != sent(dense)


@pytest.mark.usefixtures("one_thread")
def test_many_ranks_need_little_memory_and_cost_what_their_payloads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply holds some payloads of 1,024; the seconds of the others follow from two sizes."""
    held: list[int] = []
    reply = Mirror._reply

    def watched(self: Mirror, request: Any) -> Any:
        answer = reply(self, request)
        held.append(len(answer) if isinstance(answer, list) else 0)
        return answer

    monkeypatch.setattr(Mirror, "_reply", watched)
    payload = 22_000  # bytes, a little more than 100,000 entries take
    monkeypatch.setattr(trial, "HELD", 32 * payload)
    (few,) = trial.try_out("orq:route=allgather", {"a": (100_000,)}, World(0, 16), 25, CPU)
    assert max(held) == 16
    (many,) = trial.try_out("orq:route=allgather", {"a": (100_000,)}, World(0, 1024), 25, CPU)
    assert 32 <= max(held) < 64 and sent([few]) == sent([many])
    assert 16 < many.parts[-1].seconds / few.parts[-1].seconds < 128  # 64 payloads for one


def test_a_peers_parts_are_its_reductions() -> None:
    entries = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert sent(peers.buckets_of("stock", SHAPES, CPU)) == 4 * entries
    assert sent(peers.buckets_of("bf16", SHAPES, CPU)) == 2 * entries
    assert peers.buckets_of("none", SHAPES, CPU) == []
    # Rank 2: (300 + 100) x 2 and (200 + 100) x 2, and the bias.
    assert sent(peers.buckets_of("powersgd:rank=2", SHAPES, CPU)) == 4 * (800 + 600 + 100)


def test_a_peer_sends_gradients_in_their_own_type() -> None:
    """DistributedDataParallel has buckets of one type each, and sends bf16 gradients as they are."""
    types = {"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.bfloat16}
    entries = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for spec in ("stock", "bf16", "fp16"):
        assert sent(peers.buckets_of(spec, SHAPES, CPU, types)) == 2 * entries
    mixed = peers.buckets_of("stock", SHAPES, CPU, {"a": torch.bfloat16})
    assert sent(mixed) == 2 * 30_000 + 4 * 20_100
    assert sorted(bucket.names for bucket in mixed) == [("a",), ("c", "b")]


@pytest.mark.parametrize("rank", [1, 2, 4, 30])
def test_powersgd_compresses_the_matrices_that_torchs_hook_compresses(rank: int) -> None:
    """The hook leaves a matrix whole unless it gets more than twice as small, and reduces what is whole by itself."""
    shapes = {"wide": (300, 100), "square": (16, 16), "thin": (64, 3), "bias": (100,), "kernel": (32, 16, 3, 3)}
    rest = left = right = 0
    for shape in shapes.values():
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        chosen, whole, _ = powerSGD_hook._should_compress(rows, columns, min(rows, columns, rank), 2)
        rest += 0 if chosen else whole
        left += min(rows, columns, rank) * rows if chosen else 0
        right += min(rows, columns, rank) * columns if chosen else 0
    for form in (torch.float32, torch.bfloat16):
        (bucket,) = peers.buckets_of(f"powersgd:rank={rank}", shapes, CPU, dict.fromkeys(shapes, form))
        messages = [part.message.bytes for part in bucket.parts if part.message is not None]
        assert messages == [form.itemsize * size for size in (rest, left, right) if size]
