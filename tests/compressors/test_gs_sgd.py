"""gs_sgd: one sketch of the whole gradient, summed over the ranks; then exact values of its heaviest entries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import gradcomp
from gradcomp.compressors.gs_sgd import GsSgd
from gradcomp.engine.feedback import Feedback
from gradcomp.exchanges import sketched


def _bytes(ratio: float, rows: int = 5, columns: int = 0, candidates: int = 4) -> Callable[[int], int]:
    """A table, a value for each candidate, behind both a flag; everything, where that is no more."""

    def promised(n: int) -> int:
        k = max(1, math.ceil(ratio * n))
        looked_at = min(n, candidates * k)
        cells = rows * (columns or max(1, 5 * k // 16) * 16)
        return 4 * (n if cells + looked_at >= n else cells + 1 + looked_at + 1)

    return promised


PROMISED_BYTES = {
    "gs_sgd": _bytes(0.01),
    "gs_sgd:ratio=0.01,rows=3,columns=160,candidates=2": _bytes(0.01, 3, 160, 2),
    "gs_sgd:ratio=0.002,rows=7": _bytes(0.002, 7),
}


def skewed(n: int, seed: int) -> torch.Tensor:
    """A few entries that stand out, and noise."""
    generator = torch.Generator().manual_seed(seed)
    flat = 0.01 * torch.randn(n, generator=generator)
    flat[torch.randperm(n, generator=torch.Generator().manual_seed(0))[:20]] += 5.0
    return flat


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_the_update_is_the_exact_mean_of_the_heaviest_entries_of_the_sum(world: int) -> None:
    n = 20_000
    simulation = gradcomp.Simulation("gs_sgd:ratio=0.001,columns=320", {"w": (n,)}, world)
    grads = [skewed(n, rank + 1) for rank in range(world)]
    mean = torch.stack(grads).double().mean(0)
    update = simulation.step([{"w": grad} for grad in grads])["w"]
    wanted = mean.abs().topk(20).indices
    assert set(update.nonzero().flatten().tolist()) == set(wanted.tolist())
    torch.testing.assert_close(update[wanted].double(), mean[wanted], rtol=1e-6, atol=0)  # sums of a few floats
    for rank, grad in enumerate(grads):
        grad[wanted] = 0
        assert torch.equal(simulation.residual(rank)["w"], grad)


@pytest.mark.parametrize("world", [3, 4])
def test_a_divided_search_finds_the_entries_of_an_undivided_one(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but a few: a part may hold more of the heaviest than its share, and candidates may miss one of the k."""
    n, k = 300_000, 1500
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(rank)) ** 3 for rank in range(world)]

    def sent() -> tuple[torch.Tensor, gradcomp.Simulation]:
        simulation = gradcomp.Simulation(f"gs_sgd:ratio={k / n}", {"w": (n,)}, world)
        return simulation.step([{"w": grad} for grad in grads])["w"], simulation

    divided, simulation = sent()
    monkeypatch.setattr(sketched, "LEAST_OF_A_PART", n)
    whole, alone = sent()
    assert simulation.bytes_sent[0] == alone.bytes_sent[0] + 8 * math.ceil(4 * k / world / 2)
    both = (divided != 0) & (whole != 0)
    assert both.sum() >= 0.98 * k
    torch.testing.assert_close(divided[both], whole[both])
    for rank, grad in enumerate(grads):  # exactly the sent entries are gone
        assert torch.equal(simulation.residual(rank)["w"] != grad, (divided != 0) & (grad != 0))


def test_of_what_was_sent_the_momentum_stays() -> None:
    """Half of the whole effect in the first step. The age of the others grows."""
    n = 20_000
    simulation = gradcomp.Simulation("gs_sgd:ratio=0.001,columns=320,momentum=0.5", {"w": (n,)}, 2)
    grads = [skewed(n, 1), skewed(n, 2)]
    sent = simulation.step([{"w": grad.clone()} for grad in grads])["w"] != 0
    assert 0 < int(sent.sum()) < n
    for rank, reducer in enumerate(simulation._reducers):
        (bucket,) = reducer.buckets
        assert torch.equal(bucket.progress.ages == 0, sent)
        assert torch.equal(simulation.residual(rank)["w"], torch.where(sent, 1, 2) * grads[rank])


@pytest.mark.parametrize(
    "spec,n,columns",
    [("ratio=0.001", 1_000_000, 4992), ("columns=640", 1_000_000, 640), ("ratio=0.001,compression=50", 1_000_000, 2784)],
)
def test_columns_follow_from_the_number_of_winners(spec: str, n: int, columns: int) -> None:
    compressor = gradcomp.make(f"gs_sgd:{spec}")
    assert isinstance(compressor, Feedback) and isinstance(compressor.inner, GsSgd)
    assert compressor.inner.sizes(n).columns == columns


@pytest.mark.parametrize("candidates", [1, 4])
def test_compression_is_kept(candidates: int) -> None:
    n = 500_000
    simulation = gradcomp.Simulation(f"gs_sgd:ratio=0.001,compression=60,candidates={candidates}", {"w": (n,)}, 2)
    simulation.step([{"w": torch.randn(n)}] * 2)
    assert 60 <= simulation.stats()["compression"] < 61
