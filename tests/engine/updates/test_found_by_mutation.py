"""Small promises of an exchange of updates, each of which a fault in tests/mutations breaks unseen by other tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replicas
from torch import Tensor
from torch.optim import SGD, AdamW

from gradcomp.engine.updates.step_exchange import PASSES_BEFORE_WARNING
from gradcomp.spec import make

ALL = "topk:ratio=1,wire=exact"
plain = partial(SGD, lr=0.1)


def noise(step: int, ranks: int, count: int) -> list[dict[str, Tensor]]:
    """Draw a gradient for each rank, of which nothing is common to all."""
    torch.manual_seed(step)
    return [{"w": torch.randn(count)} for _ in range(ranks)]


def test_the_weight_decay_of_ranks_with_noise_is_that_of_ranks_without() -> None:
    """The ranks' steps are lengthened, and what the decay takes away is not."""
    left = []
    for alike in (False, True):
        ours = Replicas(ALL, partial(AdamW, lr=0.01, weight_decay=0.3), {"w": (2000,)}, 4)
        for rank in ours.ranks:
            rank.weights["w"].data.fill_(1.0)
        for step in range(40):
            grads = noise(step, 4, 2000)
            ours.step(grads[:1] * 4 if alike else grads)
        left.append(float(ours.copied()["w"].mean()))
    assert left[0] == pytest.approx(left[1], abs=0.01)
    assert left[0] < 0.95


def test_an_entry_that_has_waited_moves_by_what_its_momentum_has_delivered() -> None:
    """The second one waits for four steps. Its share in the fifth is 1 - 0.9^5."""
    ours = Replicas("topk:ratio=0.5,wire=exact", partial(SGD, lr=0.1, momentum=0.9), {"w": (2,)})
    for _ in range(4):
        ours.step([{"w": torch.tensor([8.0, 0.1])}])
    waits, before = float(ours.residual()["w"][1]), float(ours.copied()["w"][1])
    assert waits == pytest.approx(0.4)
    ours.step([{"w": torch.tensor([0.0, 100.0])}])
    assert before - float(ours.copied()["w"][1]) == pytest.approx((waits + 100) * (1 - 0.9**5))


def test_a_decay_lets_what_waits_fade() -> None:
    ours = Replicas("topk:ratio=0.5,decay=0.5,wire=exact", plain, {"w": (2,)})
    for waits in (0.1, 0.15, 0.175):
        ours.step([{"w": torch.tensor([8.0, 1.0])}])
        assert ours.residual()["w"].tolist() == pytest.approx([0, waits], abs=1e-6)


@pytest.mark.parametrize("by", ["layer", "model"])
def test_a_clip_cuts_each_ranks_gradient_to_its_share(by: str) -> None:
    """Of 4 ranks whose gradients have nothing in common, the mean is then at most as long as a clip of it allows."""
    ours = Replicas(f"{ALL},clip=1,clip_by={by}", plain, {"w": (4,)}, 4)
    before = ours.copied()["w"]
    ours.step([{"w": torch.tensor([0.0, 30.0, 0.0, 40.0])}] * 4)
    assert (before - ours.copied()["w"]).tolist() == pytest.approx([0, 0.03, 0, 0.04], rel=1e-4)


def test_sums_move_the_weights_as_far_as_all_ranks_together() -> None:
    ours = Replicas(ALL, plain, {"w": (4,)}, 3)
    for rank in ours.ranks:
        rank.session.sums = True
    before = ours.copied()["w"]
    ours.step([{"w": torch.full((4,), each)} for each in (1.0, 2.0, 3.0)])
    assert (before - ours.copied()["w"]).tolist() == pytest.approx([0.6] * 4)


def test_a_program_whose_weights_no_optimizer_moves_is_warned() -> None:
    ours = Replicas("topk", plain, {"w": (4,)}, 2)
    grads = noise(0, 2, 4)
    for _ in range(PASSES_BEFORE_WARNING - 1):
        ours.exchange(grads)
    with pytest.warns(UserWarning, match="no torch optimizer has stepped"):
        ours.exchange(grads)


class Searches(SGD):
    """Calls its closure several times before it steps, as a line search does. calls: so many."""

    calls = 1

    def step(self, closure: Any = None) -> Any:
        for _ in range(self.calls):
            closure()
        return super().step()


def test_ranks_may_call_their_closures_as_often_as_each_likes() -> None:
    ours, theirs = (Replicas(spec, partial(Searches, lr=0.1), {"w": (4,)}, 2) for spec in (ALL, None))
    searches: Any = ours.ranks[1].optimizer
    searches.calls = 3
    for step in range(3):
        grads = noise(step, 2, 4)
        of_rank = {id(rank): own for rank, own in zip(ours.ranks, grads, strict=True)}
        ours.each(lambda rank: rank.step(closure=lambda: rank.backward(of_rank[id(rank)])))  # noqa: B023
        ours.check_equal()
        mean = {"w": (grads[0]["w"] + grads[1]["w"]) / 2}
        theirs.each(lambda rank: rank.step(closure=lambda: rank.backward(mean)))  # noqa: B023
    ours.ends_as(theirs)


@pytest.mark.parametrize(
    ("spec", "act_on_updates"),
    [
        ("dense", False),
        ("half", False),
        ("blocks", False),
        ("topk:feedback=false", False),
        ("orq:levels=9", False),
        ("orq:levels=3", True),
        ("terngrad", True),
        ("qsgd", True),
        ("topk", True),
        ("sign", True),
        ("blocks:feedback=true", True),
    ],
)
def test_what_is_rounded_finely_travels_as_gradients_and_what_is_late_or_coarse_as_updates(
    spec: str, act_on_updates: bool
) -> None:
    assert make(spec).traits.acts_on_updates is act_on_updates
