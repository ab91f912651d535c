"""The messages of a trial are those that simulated ranks send by the formula of traffic, up to 1,024 of them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from gradcomp.core.requests import World
from gradcomp.prediction import trial
from gradcomp.prediction.mirror import Message
from laboratory.traffic import formula
from laboratory.traffic.formula import Sent

MODEL = {"w": (64, 64)}
KINDS = {"gather": "Gather", "reduce": "Reduce", "send": "Send"}
# A ring, gathers, parts to all, a tree, a server, and hosts.
SPECS = ["dense", "topk", "topk:route=split", "orq:route=alltoall", "gtopk", "sketched_sgd", "topk:by_host=true"]


def wire(message: Message, world: World) -> Sent:
    """Count what a rank sends for a message."""
    others = world.size - 1
    if message.kind == "gather":
        return Sent(others, others * message.bytes)
    if message.kind == "reduce":
        return formula.ring(message.bytes // 4, 4, world)
    size = sum(size for rank, size in message.to.items() if rank != world.rank)
    return Sent(2 * others, size, others)


@pytest.mark.parametrize("ranks", [16, 64, 1024])
@pytest.mark.parametrize("spec", SPECS)
def test_a_trial_sends_what_the_formula_counts(spec: str, ranks: int) -> None:
    world = World(0, ranks, tuple(range(ranks)))
    (bucket,) = trial.try_out(spec, MODEL, world, 25, torch.device("cpu"), trial.Effort(settling=0, counted=1, seconds=0.0))
    messages = [part.message for part in bucket.parts if part.message is not None]
    counted = formula.simulate(spec, MODEL, ranks)[0]
    assert Counter(KINDS[message.kind] for message in messages) == counted.operations
    assert sum((wire(message, world) for message in messages), Sent()) == counted.sent
