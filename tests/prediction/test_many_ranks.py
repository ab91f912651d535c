"""The bytes of a trial are those that a rank among many simulated ranks hands to the network."""

from __future__ import annotations

import pytest
import torch

import gradcomp
from gradcomp.core.requests import World
from gradcomp.prediction import trial
from gradcomp.prediction.mirror import Message

MODEL = {"w": (64, 64)}
# A ring, gathers, parts to all, a tree, a server, and hosts.
SPECS = ["dense", "topk", "topk:route=split", "orq:route=alltoall", "gtopk", "sketched_sgd", "topk:by_host=true"]


def handed_over(message: Message) -> int:
    """Count the bytes that a rank hands to the network for a message."""
    return sum(message.to.values()) if message.kind == "send" else message.bytes


@pytest.mark.parametrize("ranks", [16, 64, 256])
@pytest.mark.parametrize("spec", SPECS)
def test_a_trial_sends_what_a_simulated_rank_sends(spec: str, ranks: int) -> None:
    world = World(0, ranks, tuple(range(ranks)))
    (bucket,) = trial.try_out(spec, MODEL, world, 25, torch.device("cpu"), trial.Effort(settling=0, counted=1, seconds=0.0))
    messages = [part.message for part in bucket.parts if part.message is not None]
    simulation = gradcomp.Simulation(spec, MODEL, ranks)
    simulation.step([{"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}] * ranks)
    assert sum(map(handed_over, messages)) == simulation.bytes_sent[0]
