"""The exchange around optimizers' steps: one for each, whichever they are, and its end where gradients follow updates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replicas import Replica, Replicas
from threads import Generation
from torch import nn, optim
from torch.optim import SGD, AdamW, Optimizer
from training import SHAPES, draw

from gradcomp.core.requests import Reduce, World
from gradcomp.engine import reducer
from gradcomp.engine.updates import steps
from gradcomp.engine.updates.step_exchange import FIRST_COMPARED, PASSES_BEFORE_WARNING
from gradcomp.engine.updates.to_gradients import average_states

ALL = "topk:ratio=1,wire=exact"
plain = partial(SGD, lr=0.1)
sgd = partial(SGD, lr=0.05, momentum=0.9)


def two(weights: Any) -> list[Optimizer]:
    a, b, *rest = weights
    return [SGD([a, b], lr=0.05, momentum=0.5, nesterov=True), SGD(rest, lr=0.02, momentum=0.9, weight_decay=0.1)]


def unlike(weights: Any) -> list[Optimizer]:
    a, b, *rest = weights
    return [SGD([a, b], lr=0.05, momentum=0.9), optim.Adagrad(rest, lr=0.02)]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("optimizers_of", [two, unlike])
def test_with_everything_sent_each_of_several_optimizers_steps_as_alone(optimizers_of: Any, ranks: int) -> None:
    ours, theirs = (Replicas(spec, optimizers_of, ranks=ranks) for spec in (ALL, None))
    for training in (ours, theirs):
        training.train(6, alike=True)
        for step in range(6, 12):  # and one of them steps in some steps alone
            training.exchange(draw(step, ranks=ranks, alike=True))
            training.each(lambda rank: rank.step(rank.optimizers[0]))  # type: ignore[arg-type,return-value]
    ours.ends_as(theirs)


@pytest.mark.parametrize("given, count", [(None, 3), (0.01, 8), (0.02, 4), (1e3, 1)])
def test_updates_travel_in_four_buckets_at_most_unless_told(given: float | None, count: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(reducer, "BUCKET_MB", 0.01)
    ours = Replicas("topk", plain, dict.fromkeys("abcdefgh", (2, 1250)), bucket_mb=given)
    assert len(ours.ranks[0].session.reducer.buckets) == count


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "sign"])
def test_weights_that_a_program_moves_on_one_rank_alone_are_noticed(spec: str) -> None:
    """Updates move all ranks alike, also from unlike starts."""
    ours = Replicas(spec, sgd, ranks=3)
    for step in range(FIRST_COMPARED[0] - 1):
        ours.step(draw(step, ranks=3))
    with torch.no_grad():
        ours.ranks[1].weights["0.bias"].add_(1e-3)
    with pytest.warns(UserWarning, match=r"after 10 steps, rank 1 has other weights of '0.bias' than ranks 0, 2 \(1 of"):
        ours.step(draw(20, ranks=3))


def test_what_waits_of_an_optimizer_stays_while_another_one_steps() -> None:
    ours = Replicas("topk:ratio=0.05", two, ranks=2).train(5)
    before = ours.residual()
    ours.exchange(draw(5, ranks=2))
    ours.each(lambda rank: rank.step(rank.optimizers[0]))
    after = ours.residual()
    for name in list(SHAPES)[2:]:
        assert before[name].any() and torch.equal(before[name], after[name])


def test_an_optimizer_that_replaces_another_keeps_what_waits() -> None:
    ours = Replicas("topk:ratio=0.05", sgd, ranks=2).train(5)
    before = ours.residual()
    for rank in ours.ranks:
        rank.optimizers = [AdamW(rank.weights.values(), lr=0.0)]
    ours.train(1, 5)
    after = ours.residual()
    assert any(before[name].any() for name in SHAPES)
    left = sum(float((before[name] == after[name]).sum()) for name in SHAPES)
    assert left > 0.8 * sum(before[name].numel() for name in SHAPES), "5 % are sent, and nothing else changes"


@pytest.mark.parametrize("optimizer_of", [partial(AdamW, lr=0.01), partial(optim.NAdam, lr=0.01)])
def test_an_optimizer_that_takes_anothers_state_goes_on_as_that_one(optimizer_of: Any) -> None:
    """The moments that it takes are what a step with a hidden momentum left: their effect waits in the residual."""
    ours, theirs = (Replicas("topk:ratio=0.3", optimizer_of, ranks=2).train(5) for _ in range(2))
    for rank in ours.ranks:
        before, rank.optimizers = rank.optimizer, [optimizer_of(rank.weights.values())]
        rank.optimizer.state.update(before.state)
    ours.train(3, 5).ends_as(theirs.train(3, 5))


@pytest.mark.parametrize("whole", [True, False])
def test_parameters_that_replace_others_in_a_group_are_exchanged(whole: bool) -> None:
    """As where a program trains one block after another: by a new list of as many, or by one in another's place."""
    ours = Replicas(ALL, lambda weights: plain([*weights][:2]), dict.fromkeys("abcd", (4, 3)), 2).train(2)
    for rank in ours.ranks:
        _, _, c, d = rank.weights.values()
        if whole:
            rank.optimizer.param_groups[0]["params"] = [c, d]
        else:
            rank.optimizer.param_groups[0]["params"][1] = c
    ours.train(2, 2)


def test_an_optimizer_of_another_model_is_none_of_its_business() -> None:
    ours = Replicas("topk:ratio=0.1", sgd, ranks=1).train(2)
    before, other = ours.states(), SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.ones(3)
    ours.ranks[0].step(other)
    assert other.param_groups[0]["params"][0].tolist() == pytest.approx([0.9] * 3)
    assert before[0]["exchange"]["of_rank"]["0"]["steps"] == ours.states()[0]["exchange"]["of_rank"]["0"]["steps"] == 2


def test_the_innermost_step_exchanges_and_no_other() -> None:
    """As Horovod's optimizer, whose step() calls the step() of its class."""
    ours, theirs = (Replicas(spec, sgd) for spec in (ALL, None))
    for step in range(6):
        rank: Replica = ours.ranks[0]
        rank.backward(draw(step)[0])
        for _ in range(2):
            rank.begin(rank.optimizer)
        rank.optimizer.step()
        for _ in range(2):
            rank.session.updates.after(rank.optimizer)
        theirs.train(1, step)
    ours.ends_as(theirs)
    assert ours.ranks[0].session.reducer.steps_done == 6


def test_a_step_goes_on_when_another_session_ends_in_its_midst(monkeypatch: Any) -> None:
    """As when the collector of garbage runs there: an inner step of the same optimizer is still one."""
    ours = Replicas(ALL, sgd, ranks=1).train(2)
    (rank,) = ours.ranks
    ours.exchange(draw(2))
    rank.begin(rank.optimizer)
    monkeypatch.setattr(steps, "changes", steps.changes + 1)
    rank.step()
    rank.session.updates.after(rank.optimizer)
    assert rank.session.updates.in_step == 0 and rank.session.reducer.steps_done == 3


@pytest.mark.parametrize("after", ["dense", "half", "blocks"])
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "sign", ALL])
def test_a_change_to_gradients_delivers_all_that_waits(spec: str, after: str) -> None:
    """The mean of all residuals moves the weights at once: nothing waits, and nothing is lost."""
    ours = Replicas(spec, sgd, ranks=2, size=0).train(8)
    meant = {name: waits - ours.copied()[name] for name, waits in ours.residual().items()}
    ours.change(after)
    ours.check_equal()
    for name, each in meant.items():
        torch.testing.assert_close(-ours.copied()[name], each, rtol=1e-5, atol=1e-6)
        assert not ours.residual()[name].any()
    ours.train(6, 8)


class Odd(Optimizer):
    """It keeps numbers of its rank's own gradients: of a shape of their own, in a table, and in its group, as Prodigy does."""

    def __init__(self, weights: Any):
        super().__init__(weights, {"lr": 0.01, "length": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            there = [each for each in group["params"] if each.grad is not None]
            group["length"] = 0.9 * group["length"] + 0.1 * float(sum(each.grad.norm() for each in there))
            for each in there:
                mean = self.state[each].setdefault("means", {"of all": torch.ones(1)})["of all"]
                mean.lerp_(each.grad.square().mean(), 0.1)
                each.sub_(group["lr"] / group["length"] * each.grad / mean.sqrt())


KEEP_STATES = [sgd, partial(AdamW, lr=0.01), partial(optim.RMSprop, lr=0.01, momentum=0.9), Odd]
if hasattr(optim, "Adafactor"):
    KEEP_STATES.append(partial(optim.Adafactor, lr=0.01))  # two means for a matrix, of its rows and columns


@pytest.mark.parametrize("optimizer_of", KEEP_STATES)
def test_after_a_change_to_gradients_all_optimizers_have_one_state(optimizer_of: Any) -> None:
    ours = Replicas("topk:ratio=0.1", optimizer_of, ranks=3).train(8)
    ours.change("dense")
    first, *others = [rank.optimizer.state_dict() for rank in ours.ranks]
    for other in others:
        assert str(other) == str(first)
    for state in first["state"].values():
        for name in ("momentum_buffer", "exp_avg"):
            assert name not in state or not state[name].any(), "its effect has been delivered"
        assert "step" not in state or state["step"] == 8
    ours.train(4, 8)
    ours.change("topk:ratio=0.1")
    ours.train(4, 12)


def test_after_a_change_to_gradients_all_ranks_have_one_rate() -> None:
    """A schedule by each rank's own loss has moved it. SGD keeps no tensor that differs, since its momentum was hidden."""
    ours = Replicas("topk:ratio=0.1", partial(SGD, lr=0.1, momentum=0.9), ranks=2).train(3)
    ours.ranks[1].optimizer.param_groups[0]["lr"] = 0.3
    ours.change("dense")
    assert [rank.optimizer.param_groups[0]["lr"] for rank in ours.ranks] == pytest.approx([0.2, 0.2])
    ours.train(4, 3)


def test_after_a_change_to_gradients_optimizers_of_the_same_layers_step_in_turn() -> None:
    def by_turns(rank: Replica, at: int) -> None:
        rank.step(rank.optimizers[at % 2])

    ours = Replicas("topk:ratio=0.1", lambda weights: [AdamW([*weights], lr=0.01), optim.Adagrad([*weights], lr=0.01)], ranks=2)
    for at in range(8):
        if at == 4:
            ours.change("dense")
        ours.exchange(draw(at, SHAPES, 2))
        ours.each(partial(by_turns, at=at))
        ours.check_equal()


def test_a_change_to_gradients_warns_of_states_that_cannot_be_averaged() -> None:
    ours = Replicas("topk:ratio=0.1", AdamW, ranks=2).train(3)
    ours.ranks[1].optimizer.state[ours.ranks[1].weights["0.bias"]]["rounded"] = torch.ones(3, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"optimizers \(AdamW\) still differ"):
        ours.change("dense")
    ours = Replicas("topk:ratio=0.1", AdamW, ranks=2).train(3)
    for number, rank in enumerate(ours.ranks):
        rank.optimizer.state[rank.weights["0.bias"]]["rounded"] = torch.full((3,), number, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"optimizers \(AdamW\) still differ"):
        ours.change("dense")


class OfAnotherDevice:
    """A network that takes the tensors of one device alone, as NCCL's does. Both ranks say zeros, but in a first comparison."""

    world, device = World(0, 2, None), torch.device("meta")
    has_compared = False

    def start(self, request: Any, name: str) -> Any:
        sent = request.tensor if isinstance(request, Reduce) else request.payload.bytes
        assert sent.device == self.device, name
        zeros = torch.zeros(sent.numel() if isinstance(request, Reduce) else sent.numel() // 8, dtype=torch.int64)
        if isinstance(request, Reduce):
            return lambda: zeros.float()
        differ, self.has_compared = "comparison" in name and not self.has_compared, self.has_compared or "comparison" in name
        return lambda: [{"bytes": zeros}, {"bytes": zeros + differ}]


def test_a_change_to_gradients_sends_what_optimizers_keep_beside_their_device() -> None:
    """As AdamW keeps its count of steps in main memory, which NCCL does not take."""
    optimizer = AdamW([weight := nn.Parameter(torch.ones(5))], lr=0.01)
    weight.grad = torch.ones(5)
    optimizer.step()
    every: Any = SimpleNamespace(forget=lambda: None, alive=lambda: [optimizer], latest=list, note_averaged=lambda: None)
    for _ in average_states(every, OfAnotherDevice()):
        pass
    assert not any(each.any() for each in optimizer.state[weight].values())


# What moves the weights, and how far.


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
    grads = draw(0, {"w": (4,)}, 2)
    for _ in range(PASSES_BEFORE_WARNING - 1):
        ours.exchange(grads)
    with pytest.warns(UserWarning, match="no torch optimizer has stepped"):
        ours.exchange(grads)


def test_a_program_that_moves_weights_by_each_ranks_own_gradients_is_warned_soon() -> None:
    """As a wrapper with float32 weights of its own does, whose inner optimizer trains these."""
    ours = Replicas("topk", plain, {"w": (4,)}, 2)
    with pytest.warns(UserWarning, match="after 10 backward passes without a step.*rank 1 has other weights of 'w'"):
        for step in range(FIRST_COMPARED[0]):
            ours.exchange(draw(step, {"w": (4,)}, 2))
            for rank in ours.ranks:
                rank.weights["w"].data.sub_(rank.weights["w"].grad, alpha=0.1)  # type: ignore[arg-type]


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
        grads = draw(step, {"w": (4,)}, 2)
        of_rank = {id(rank): own for rank, own in zip(ours.ranks, grads, strict=True)}
        ours.each(lambda rank: rank.step(closure=lambda: rank.backward(of_rank[id(rank)])))  # noqa: B023
        ours.check_equal()
        mean = {"w": (grads[0]["w"] + grads[1]["w"]) / 2}
        theirs.each(lambda rank: rank.step(closure=lambda: rank.backward(mean)))  # noqa: B023
    ours.ends_as(theirs)


def test_a_rank_that_joins_takes_the_others_groups_of_layers() -> None:
    """It has not seen the optimizers step yet, by which layers share buckets."""

    def two(weights: Iterable[nn.Parameter]) -> list[SGD]:
        first, *others = weights
        return [SGD([first], lr=0.1, momentum=0.9), SGD(others, lr=0.1)]

    ours = Replicas("topk:ratio=0.2", two, ranks=2).train(3)
    joined = Replicas("topk:ratio=0.2", two, ranks=3)
    ours.ranks.append(joined.ranks[2])
    ours.count, generation = 3, Generation(3)
    for number, rank in enumerate(ours.ranks):
        rank.session.network.move(generation, number)
        for name, weight in rank.weights.items():
            weight.data.copy_(ours.weights[name])
    ours.each(lambda rank: rank.session.resume.sync())
    assert [[*bucket.layout.names] for bucket in ours.ranks[2].session.reducer.buckets] == [
        [*bucket.layout.names] for bucket in ours.ranks[0].session.reducer.buckets
    ]
    ours.train(4, first=3)
    assert all(rank.session.reducer.steps_done == 14 for rank in ours.ranks)
