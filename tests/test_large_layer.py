"""One layer of 60 million entries: more blocks, lines, groups and columns than any other test has. Two simulated ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradcomp

pytestmark = pytest.mark.long

N = 60_000_000 + 37
NAME = "embedding.weight"
# Specs that keep what they do not send, so that nothing may be lost.
CONSERVING = (
    "topk",
    "topk:wire=exact",
    "topk:route=split",
    "gtopk",
    "sdagc",
    "sdagc:scope=layer,lam=3.3",
    "gs_sgd:ratio=0.001",
    "sketched_sgd:ratio=0.001",
    "orq:levels=9,feedback=true",
    "bingrad:sigmas=1.5,feedback=true",
    "sign",
)
# Specs that round without bias, and lose what they round.
UNBIASED = ("orq", "qsgd", "terngrad")


def gradient(seed: int) -> Tensor:
    """Draw a gradient with a few entries that stand out, up to the last one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(N, generator=generator)
    drawn[:: N // 1000] *= 50
    drawn[-1] = 100
    return drawn


@pytest.fixture(scope="module")
def grads() -> list[Tensor]:
    return [gradient(0), gradient(1)]


@pytest.mark.parametrize("spec", CONSERVING)
def test_nothing_of_a_large_layer_is_lost(spec: str, grads: list[Tensor]) -> None:
    simulation = gradcomp.Simulation(spec, {NAME: (N,)}, 2)
    update = simulation.step([{NAME: grad} for grad in grads])[NAME]
    assert update[-1] != 0 and update[: N // 2].any()
    left = simulation.residual(0)[NAME] + simulation.residual(1)[NAME]
    torch.testing.assert_close(update + left / 2, (grads[0] + grads[1]) / 2, rtol=1e-5, atol=1e-4)  # of entries up to 200
    assert 0 < simulation.stats()["bytes_sent"] < 4 * N


@pytest.mark.parametrize("spec", UNBIASED)
def test_a_large_layer_is_rounded_without_bias(spec: str, grads: list[Tensor]) -> None:
    """The errors of millions of entries cancel, in each tenth of the layer alike, up to five of their deviations."""
    update = gradcomp.Simulation(spec, {NAME: (N,)}, 2).step([{NAME: grad} for grad in grads])[NAME]
    wanted = (grads[0] + grads[1]) / 2
    for mean, part in zip(wanted.chunk(10), update.chunk(10), strict=True):
        error = (part - mean).double()
        assert error.any() and abs(error.sum()) < 5 * error.square().sum().sqrt()


def test_the_choice_of_top_k_is_torchs(grads: list[Tensor]) -> None:
    k = 600_001
    update = gradcomp.Simulation(f"topk:ratio={k / N},wire=exact", {NAME: (N,)}, 1).step([{NAME: grads[0]}])[NAME]
    values, places = grads[0].abs().topk(k + 1)
    sent = update.nonzero().view(-1)
    assert values[k - 1] > values[k], "the choice is one"
    assert torch.equal(sent, places[:k].sort().values)
    assert torch.equal(update[sent], grads[0][sent])
