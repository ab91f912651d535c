"""Steps as long as Adam's: a rank's second moment holds noise that the mean of all ranks has not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replicas
from torch import Tensor
from torch.optim import AdamW
from training import Named

STEPS = 64
ALL_SENT = "topk:ratio=1,wire=exact"
ADAMW = partial(AdamW, lr=1e-3, betas=(0.9, 0.95))
ONE_LAYER = {"w": (1000,)}


def noisy(step: int, noise: list[float], shapes: Any = ONE_LAYER, signal: float = 0.3) -> list[Named]:
    """Draw gradients of a signal, which all ranks share, and each rank's noise."""
    generator = torch.Generator().manual_seed(0)
    signals = {name: signal * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    generator.manual_seed(1000 + step)
    return [
        {name: signals[name] + own * torch.randn(shape, generator=generator) for name, shape in shapes.items()} for own in noise
    ]


def unlike(step: int, ranks: int, shapes: Any = ONE_LAYER) -> list[Named]:
    """Draw gradients of a signal, which all ranks share, and twice as much that half of the ranks have with the other sign."""
    signs = []
    for seed in (7, 8):
        generator = torch.Generator().manual_seed(seed)
        signs.append({name: torch.randn(shape, generator=generator).sign() for name, shape in shapes.items()})
    ours, sides = signs
    grads = noisy(step, [0.1] * ranks, shapes, 0.0)
    return [
        {name: own[name] + 0.3 * ours[name] + 0.6 * (-1) ** rank * sides[name] for name in shapes}
        for rank, own in enumerate(grads)
    ]


class Pair:
    """Weights that torch's Adam moves by the mean of the ranks' gradients, and equal ones that an exchange moves."""

    def __init__(self, ranks: int, spec: str = ALL_SENT, shapes: Any = ONE_LAYER):
        self.ranks, self.shapes = ranks, shapes
        self.ours, self.theirs = (Replicas(each, ADAMW, shapes, ranks, 0) for each in (spec, None))

    def step(self, grads: list[Named]) -> None:
        for training in (self.ours, self.theirs):
            training.step(grads)
        self.ours.check_equal()

    def train(self, last: int = STEPS, first: int = 0) -> None:
        for step in range(first, last):
            self.step(noisy(step, [1.0] * self.ranks, self.shapes))

    def mark(self) -> None:
        """Measure distances from here on."""
        self._begun = [training.copied() for training in (self.ours, self.theirs)]

    def moved(self, name: str) -> list[Tensor]:
        """Return how our weights moved since the mark, and torch's."""
        return [each.copied()[name] - begun[name] for each, begun in zip((self.ours, self.theirs), self._begun, strict=True)]

    def distance(self, name: str = "w") -> float:
        """Return how far ours went since the mark, over how far torch's went."""
        ours, theirs = self.moved(name)
        return float(ours.norm() / theirs.norm())

    def noises(self) -> list[Any]:
        """Return what each rank knows of the noise."""
        return [rank.session.reducer.buckets[0].progress.noise for rank in self.ours.ranks]

    def sums(self) -> Tensor:
        return torch.stack([noise.sums for noise in self.noises()])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_with_everything_sent_steps_are_as_long_as_adams_of_the_mean(ranks: int) -> None:
    """Without the comparison they are 0.76, 0.60 and 0.49 times as long on 2, 4 and 8 ranks."""
    pair = Pair(ranks)
    pair.train(24)
    pair.mark()  # from the second comparison on
    pair.train(STEPS, 24)
    # Torch's first moment comes before the division, and the residual behind it.
    assert pair.distance() == pytest.approx(1, abs=0.15)


def test_all_ranks_have_the_same_factor() -> None:
    pair = Pair(4)
    for step in range(STEPS):
        pair.step(noisy(step, [3.0, 1.0, 0.5, 0.1]))
    assert len({noise.factor for noise in pair.noises()}) == 1 and pair.noises()[0].factor > 1
    assert all(torch.equal(each, pair.sums()[0]) for each in pair.sums())


def test_ranks_with_other_noise_point_the_same_way() -> None:
    pair = Pair(4)
    for step in range(STEPS):
        if step == 24:
            pair.mark()
        pair.step(noisy(step, [3.0, 1.0, 0.5, 0.1]))
    assert float(torch.nn.functional.cosine_similarity(*pair.moved("w"), dim=0)) > 0.8
    assert 0.8 < pair.distance() < 2, "at most as much too long as the factor"


def test_layers_of_any_size_and_scale_count() -> None:
    scales = {"large": 1e-6, "small": 1e3}
    pair = Pair(4, shapes={"large": (20_000,), "small": (100,)})
    for step in range(STEPS):
        if step == 24:
            pair.mark()
        pair.step([{name: scales[name] * own[name] for name in scales} for own in noisy(step, [1.0] * 4, pair.shapes)])
    assert pair.distance("small") == pytest.approx(1, abs=0.2)


def test_rows_that_one_rank_sees_alone_spoil_nothing() -> None:
    """As of an embedding: each rank has gradients in rows of its own."""
    pair = Pair(4, shapes={"w": (400, 10)})
    for step in range(STEPS):
        torch.manual_seed(step)
        grads = [torch.zeros(400, 10) for _ in range(4)]
        for rank, grad in enumerate(grads):
            grad[rank::4] = torch.randn(100, 10)
        pair.step([{"w": grad} for grad in grads])
    assert 1 <= pair.noises()[0].factor <= 2, "no factor is above the root of the number of ranks"
    assert pair.ours.weights["w"].isfinite().all()


def test_a_gradient_that_is_not_finite_is_not_compared() -> None:
    pair = Pair(2)
    pair.train(24)
    before = pair.sums()
    pair.train(25, 24)  # step 24 has a comparison, and so has step 32
    assert (pair.sums() != before).any(1).all()
    pair.train(32, 25)
    before, grads = pair.sums(), noisy(32, [1.0, 1.0])
    grads[1]["w"][5] = math.inf
    pair.ours.step(grads)
    assert torch.equal(pair.sums(), before)


@pytest.mark.parametrize("shapes", [ONE_LAYER, {"w": (4, 2, 3, 3), "b": (700,)}], ids=["one layer", "two"])
def test_ranks_whose_data_are_not_of_one_kind_go_where_adam_of_the_mean_goes(shapes: Any) -> None:
    """With each rank's own second moment they go 0.05 times as far: what differs decides each rank's signs, and cancels."""
    pair = Pair(4, shapes=shapes)
    for step in range(96):
        if step == 48:
            pair.mark()
        pair.step(unlike(step, 4, shapes))
    for name in shapes:
        ours, theirs = pair.moved(name)
        assert float(torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)) > 0.9
        assert 0.8 < pair.distance(name) < 1.3
    moments = [rank.optimizer.state[rank.weights["w"]]["exp_avg_sq"] for rank in pair.ours.ranks]
    assert len({float(each.sum()) for each in moments}) > 1, (
        "averaged in the steps that compare, and the ranks' own in the others"
    )


def test_a_centered_moment_stays_above_the_square_of_its_mean() -> None:
    ours = Replicas(ALL_SENT, partial(torch.optim.RMSprop, lr=1e-3, centered=True), ONE_LAYER, 4)
    for step in range(40):
        ours.step(unlike(step, 4))
        ours.check_equal()
    assert ours.ranks[0].session.reducer.buckets[0].progress.noise.are_unlike and ours.weights["w"].isfinite().all()


def test_few_entries_tell_nothing_of_the_ranks_data() -> None:
    pair = Pair(2, shapes={"w": (1,)})
    for step in range(STEPS):
        pair.step(noisy(step, [1.0] * 2, pair.shapes, 0.0))
        assert not pair.noises()[0].are_unlike


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adagrad])
def test_another_optimizer_goes_on_where_the_ranks_data_are_not_of_one_kind(other: Any) -> None:
    pair = Pair(4)
    for step in range(20):
        pair.step(unlike(step, 4))
    assert pair.noises()[0].are_unlike
    for rank in pair.ours.ranks:
        rank.optimizers = [other(rank.weights.values(), lr=0.01)]
    for step in range(20, 40):
        pair.ours.step(unlike(step, 4))
        pair.ours.check_equal()


def test_noise_alone_makes_no_message_longer() -> None:
    pair = Pair(4, "topk")
    sent = []
    for step in range(STEPS):
        pair.step(noisy(step, [1.0] * 4, signal=0.0))
        sent.append(pair.ours.ranks[0].session.reducer.traffic.sent)
    assert max(sent) < 4 * 1024 + 4 * 50 and not any(noise.are_unlike for noise in pair.noises())


def test_a_rank_that_has_not_compared_adopts_what_the_others_know() -> None:
    """Or it would not average its moments when they do, as a process that takes the place of one that has died."""
    pair = Pair(4)
    for step in range(20):
        pair.step(unlike(step, 4))
    pair.noises()[3].load([0.0, 0.0, 1.0, 0.0])
    assert [noise.are_unlike for noise in pair.noises()] == [True, True, True, False]
    pair.ours.each(lambda rank: rank.session.membership.invalidate())
    pair.step(unlike(20, 4))
    assert all(noise.are_unlike and noise.factor == pair.noises()[0].factor for noise in pair.noises())


@pytest.mark.parametrize("at, size", [(160, 1000), (161, 30)])
def test_a_spike_is_forgotten_as_soon_as_adam_forgets_it(at: int, size: float) -> None:
    """In a step that compares, and in the one behind it: after 200 steps all is as before."""
    pair = Pair(4, shapes={"w": (200,)})
    for step in range(at + 320):
        if step == at + 200:
            pair.mark()
        grads = noisy(step, [1.0] * 4, pair.shapes)
        if step == at:
            grads[3]["w"] *= size
        pair.step(grads)
    assert pair.distance() == pytest.approx(1, abs=0.2)


def test_a_factor_that_no_ranks_can_have_is_not_loaded() -> None:
    pair = Pair(4)
    pair.train(2)
    states = [state["exchange"] for state in pair.ours.states()]
    for rank, state in enumerate(states):
        state["of_rank"][str(rank)]["buckets"][0]["noise"] = [1.0, 1.0, 1e30, 4.0]
    pair.ours.each(lambda rank: rank.session.resume.load_state_dict(states))
    assert pair.noises()[1].factor == 4


@pytest.mark.parametrize(
    "grads_of", [lambda step: noisy(step, [1.0] * 4), lambda step: unlike(step, 4)], ids=["noisy", "unlike"]
)
@pytest.mark.parametrize("saved_after", [3, 8, 17, 24, 30])
def test_a_training_that_is_resumed_goes_on_alike(saved_after: int, grads_of: Callable[[int], list[Named]]) -> None:
    whole = Replicas("topk:ratio=0.1", ADAMW, ONE_LAYER, 4, 0)
    again = whole
    for step in range(40):
        if step == saved_after:
            again = whole.resumed()
        for training in {id(each): each for each in (whole, again)}.values():
            training.step(grads_of(step))
    again.ends_as(whole, 0, 0)


def test_another_number_of_ranks_begins_anew() -> None:
    """One rank has no noise beside the mean, whatever was measured on eight."""
    pair = Pair(8)
    pair.train(24)
    alone = pair.ours.resumed(1)
    alone.train(9, 24)
    assert alone.ranks[0].session.reducer.buckets[0].progress.noise.factor == 1
    assert pair.noises()[0].factor > 1.5


def test_an_optimizer_that_keeps_its_momentum_is_not_compared() -> None:
    """Nor one whose steps grow with the gradient."""
    for spec, optimizer_of in ((f"{ALL_SENT},momentum=0", ADAMW), (ALL_SENT, partial(torch.optim.SGD, lr=0.1, momentum=0.9))):
        ours = Replicas(spec, optimizer_of, ONE_LAYER, 4)
        for step in range(20):
            ours.step(noisy(step, [1.0] * 4))
        noise = ours.ranks[0].session.reducer.buckets[0].progress.noise
        assert noise.factor == 1 and not noise.sums.any()


def test_the_weight_decay_of_ranks_with_noise_is_that_of_ranks_without() -> None:
    """The ranks' steps are lengthened, and what the decay takes away is not."""
    left = []
    for alike in (False, True):
        ours = Replicas(ALL_SENT, partial(AdamW, lr=0.01, weight_decay=0.3), {"w": (2000,)}, 4)
        for rank in ours.ranks:
            rank.weights["w"].data.fill_(1.0)
        for step in range(40):
            grads = noisy(step, [1.0] * 4, {"w": (2000,)}, 0.0)
            ours.step(grads[:1] * 4 if alike else grads)
        left.append(float(ours.copied()["w"].mean()))
    assert left[0] == pytest.approx(left[1], abs=0.01)
    assert left[0] < 0.95
