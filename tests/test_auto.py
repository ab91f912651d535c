"""auto: its candidates, its policy on made-up and on recorded times, and its turns on ranks whose link takes time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import choosing_ranks
import pytest
import replay
import threads
import torch
from choosing_ranks import CHOICE, CLOCK, COMPUTES, FAST, SEEN, SLOW, Link, begun, train
from threads import Rank

import gradcomp
from gradcomp import auto
from gradcomp.auto import COUNTED, EXACT, NEXT_CHECK, SETTLING, STOCK, Candidate, Chooser, Drift, Policy
from gradcomp.spec import LOSSES

TYPES = (torch.float32, torch.bfloat16)
HALF, BLOCKS, SIGN, TOPK = (Candidate(str(gradcomp.make(spec))) for spec in ("half", "blocks", "sign", "topk"))
EVERY = [STOCK, HALF, BLOCKS, TOPK]


@pytest.fixture
def model_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and computing take the time that a test gives them, and nothing else does."""
    choosing_ranks.install(monkeypatch)


def test_a_larger_loss_adds_candidates_that_lose_more() -> None:
    by_loss = [auto.candidates(loss, TYPES, True) for loss in LOSSES]
    for less, more in itertools.pairwise(by_loss):
        assert more[: len(less)] == less and len(more) > len(less)
    for each in by_loss[-1]:
        assert str(gradcomp.make(each.spec)) == each.spec  # or it would not be known again after a load


def test_none_only_rounds_to_16_bits() -> None:
    assert [str(each) for each in auto.candidates("none", TYPES, True)] == ["stock", "stock in bf16", "half"]
    assert [str(each) for each in auto.candidates("none", (torch.float32,), False)] == ["stock", "half"]
    assert [str(each) for each in auto.candidates("none", (), False)] == ["dense", "half"]  # Horovod adds no bfloat16


def test_a_residual_comes_last() -> None:
    for several in (False, True):
        every = auto.candidates("high", TYPES, several)
        assert any(each.keeps_residual for each in every)
        assert sorted(every, key=lambda each: each.keeps_residual) == every


def test_compression_between_hosts_comes_before_the_same_between_ranks() -> None:
    """It loses less: ranks of a host add their gradients up before they round."""
    rounded = [each.spec for each in auto.candidates("low", (torch.float32,), True)][2:]
    assert rounded == ["blocks:by_host=true", "blocks"]
    assert not any("by_host" in each.spec for each in auto.candidates("high", TYPES, False))


@pytest.mark.parametrize(
    ("seconds", "present", "wanted"),
    [
        ((1.0, 0.995, 0.995, 0.995), STOCK, STOCK),
        ((1.0, 0.96, 0.955, 0.952), EXACT, HALF),
        ((1.0, 0.96, 0.92, 0.94), EXACT, BLOCKS),
        ((1.0, 2.0, 3.0, 0.1), EXACT, TOPK),
        ((1.0, 0.98, 2.0, 2.0), HALF, HALF),
        ((0.983, 0.98, 2.0, 2.0), HALF, STOCK),
        ((1.0, 2.0, 0.998, 2.0), BLOCKS, STOCK),
        ((1.0, 0.98, 0.975, 0.973), HALF, HALF),
        ((1.0, 0.98, 0.94, 0.935), HALF, BLOCKS),
    ],
)
def test_more_loss_must_be_worth_it(seconds: tuple[float, ...], present: Candidate, wanted: Candidate) -> None:
    assert auto.best_of(EVERY, dict(zip(EVERY, seconds, strict=True)), present) == wanted
    assert auto.best_of(EVERY, {}, present) == present


def played(
    policy: Policy,
    seconds: Callable[[Candidate, int], float],
    present: Candidate = EXACT,
    unreachable: Sequence[Candidate] = (),
) -> tuple[Candidate, list[tuple[Candidate, int]]]:
    """Play a tournament. seconds: of a candidate's n-th step. Return the winner, and the candidates and steps asked for."""
    game, asked, steps = policy.choose(EVERY, present), list[tuple[Candidate, int]](), Counter[Candidate]()
    try:
        ask = next(game)
        while True:
            candidate, counted = ask
            asked.append(ask)
            settling = candidate != present
            present = candidate
            taken = [seconds(candidate, steps[candidate] + i) for i in range(settling + counted)]
            steps[candidate] += len(taken)
            ask = game.send(None if candidate in unreachable else taken)
    except StopIteration as end:
        return end.value, asked


def test_candidates_compete_from_the_fewest_bytes_and_slow_ones_end_after_a_step() -> None:
    times = {STOCK: 10.0, HALF: 5.0, BLOCKS: 1.1, TOPK: 1.0}
    winner, asked = played(Policy(), lambda each, _: times[each])
    assert winner == TOPK
    there = [(TOPK, 1), (TOPK, COUNTED - 1), (BLOCKS, 1), (BLOCKS, COUNTED - 1), (HALF, 1), (STOCK, 1)]
    assert asked == [*there, (BLOCKS, COUNTED), (TOPK, COUNTED)]


def test_one_step_with_a_pause_stops_no_try() -> None:
    for pause in range(2 * COUNTED):
        winner, _ = played(
            Policy(), lambda each, n, pause=pause: 5.0 if each == HALF and n == pause else 1.0 - 0.1 * (each == HALF)
        )
        assert winner == HALF


def test_times_that_drift_are_no_advantage() -> None:
    """The machine gets slower all the time. Who comes first is not the fastest for that."""
    now = itertools.count()
    assert played(Policy(), lambda each, _: 1.0 + 0.002 * next(now))[0] == STOCK


def test_a_candidate_out_of_reach_does_not_win() -> None:
    times = {STOCK: 1.0, HALF: 0.5, BLOCKS: 0.8, TOPK: 0.7}
    assert played(Policy(), lambda each, _: times[each], unreachable=[HALF, TOPK])[0] == BLOCKS
    assert played(Policy(), lambda each, _: times[each], SIGN, unreachable=EVERY)[0] == SIGN  # it is no candidate itself


def test_only_near_candidates_compete_again_until_something_changes() -> None:
    """One whose try was stopped, perhaps for a pause, gets another one."""
    policy, times = Policy(), {STOCK: 1.0, HALF: 1.4, BLOCKS: 0.995, TOPK: 1.25}
    for others in ({HALF, TOPK}, {HALF}, set[Candidate]()):
        winner, asked = played(policy, lambda each, _: times[each], STOCK)
        assert winner == STOCK and {each for each, _ in asked} == {STOCK, BLOCKS} | others
    policy.forget()
    assert {each for each, _ in played(policy, lambda each, _: times[each], STOCK)[1]} == {*EVERY}


def test_equal_outcomes_make_tournaments_rarer_and_all_compete_in_the_rarest() -> None:
    policy, times, present, rests = Policy(), {STOCK: 1.0, HALF: 2.0, BLOCKS: 2.0, TOPK: 2.0}, EXACT, []
    for _ in range(8):
        present, asked = played(policy, lambda each, _: times[each], present)
        rests.append(policy.rest)
    assert rests == [min(auto.AGAIN * 2**i, auto.MOST_STEPS) for i in range(8)]
    assert {each for each, _ in asked} == {*EVERY}
    policy.forget()
    assert played(policy, lambda each, _: 0.5 if each == HALF else 1.0, present)[0] == HALF
    assert (policy.rest, policy.odd_checks) == (auto.AGAIN, auto.ODD_CHECKS)


def test_a_candidate_that_was_faster_by_chance_is_left_at_the_next_tournament() -> None:
    """Ratios of several tournaments count, also where all steps of one took twice as long. Old ones do not."""
    policy = Policy()
    assert played(policy, lambda each, _: 0.94 if each == BLOCKS else 1.0)[0] == BLOCKS
    assert played(policy, lambda each, _: 2.2 if each == BLOCKS else 2.0, BLOCKS)[0] == STOCK
    assert policy.seconds[BLOCKS] / policy.seconds[STOCK] == pytest.approx((0.94 * 1.1) ** 0.5)
    for _ in range(auto.JOINED):
        winner, _ = played(policy, lambda each, _: 0.8 if each == BLOCKS else 1.0, STOCK)
    assert winner == BLOCKS and policy.seconds[BLOCKS] == pytest.approx(0.8)


def test_on_recorded_cells_auto_is_never_5_percent_slower_and_ends_near_the_fastest() -> None:
    """Over 1,000 steps, tournaments included, with the noise of the records' rounds and 10 % in each step."""
    found = [(cell, replay.Replay(cell, seed)) for cell in replay.cells() for seed in range(3)]
    assert len(found) == 68 * 3
    for cell, training in found:
        training.train(1000)
        for rival, rounds in cell.rounds.items():
            if rival.stock is not None:
                assert training.seconds <= 1.05 * training.steps * sum(rounds) / len(rounds), (cell.name, str(rival))
    ends = [cell.seconds[training.present] / min(cell.seconds.values()) for cell, training in found]
    assert sum(end <= 1.05 for end in ends) >= 0.9 * len(ends)


def test_a_link_that_is_slower_twice_or_faster_once_has_changed() -> None:
    drift = Drift(2, True)
    for probe, changed in ((1.0, False), (2.5, False), (1.1, False), (2.5, False), (2.5, True)):
        assert drift.seems_slower(probe) == (probe > 2)
        drift.note(0.1, probe)
        assert drift.changed == changed and drift.interval(1.0, 0.1) == (NEXT_CHECK[0] if probe > 2 else 40)
    assert drift.link_changed
    drift = Drift(2, True)
    drift.note(0.1, 1.0)
    drift.note(0.1, 0.4)
    assert drift.changed and drift.link_changed


@pytest.mark.parametrize("heeds_steps", [True, False])
def test_step_times_are_a_change_where_they_do_not_always_vary(heeds_steps: bool) -> None:
    drift = Drift(2, heeds_steps)
    for step in (0.1, 0.15, 0.15):
        drift.note(step, 1.0)
    assert drift.changed == heeds_steps and not drift.link_changed


def chooser(rank: Rank) -> Chooser:
    turns = rank.session.turns
    assert isinstance(turns, Chooser)
    return turns


@pytest.mark.usefixtures("model_time")
@pytest.mark.parametrize("loss", ["none", "low"])
def test_a_slow_link_gets_fewer_bytes_and_a_fast_one_stays_stock(loss: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the link changes in mid-training. Rank 0 logs each new choice and its reason."""
    caplog.set_level("INFO", logger="gradcomp")
    link, compressed = Link(SLOW), "half" if loss == "none" else "blocks"
    ranks = begun(link, loss)
    slow = train(ranks, CHOICE)[0]
    assert slow["way"].startswith(compressed) and slow["choices"] == 1, slow
    assert slow["seconds"][slow["way"]] < 0.8 * slow["seconds"]["stock"]
    assert caplog.messages == [f"gradcomp: auto uses {slow['way']} after step {slow['after_step']}: {slow['reason']}"]
    link.each = FAST
    fast = train(ranks, SEEN + CHOICE)[0]
    assert fast["way"] == "stock" and fast["after_step"] > slow["after_step"], fast
    link.each = SLOW
    assert train(ranks, SEEN + CHOICE)[0]["way"].startswith(compressed)
    assert torch.equal(ranks[0].came, ranks[1].came)


@pytest.mark.usefixtures("model_time")
def test_steps_that_always_vary_are_not_chosen_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of short and of long sequences, for example."""
    ranks = begun(Link(FAST), "none")
    for turn in range(20):
        monkeypatch.setattr(choosing_ranks, "COMPUTES", COMPUTES * (1 + turn % 2))
        said = train(ranks, 200)[0]
    assert said["way"] == "stock" and 2 < said["choices"] <= 8, said


@pytest.mark.usefixtures("model_time")
@pytest.mark.parametrize("each", [SLOW, FAST])
def test_the_cost_is_all_time_beyond_the_steps_and_no_pause(each: float) -> None:
    """A validation comes after every ninth step. Meetings take the time of a step."""
    ranks = begun(Link(each), "low")
    for rank in ranks:
        rank.network.prepare = partial(CLOCK.sleep, COMPUTES)  # type: ignore[method-assign]

    def of_rank(rank: Rank) -> tuple[dict[str, Any], float]:
        with CLOCK.of(rank):
            for step in range(CHOICE):
                CLOCK.sleep(COMPUTES)
                rank.step()
                if step % 9 == 8:
                    CLOCK.sleep(40 * COMPUTES)
            total = CLOCK.perf_counter() - CHOICE // 9 * 40 * COMPUTES
        return chooser(rank).report(), total

    said, total = threads.together(ranks, of_rank)[0]
    usual = said["seconds"][said["way"]]
    assert said["choices"] == 1 and 2 * COMPUTES < said["cost_seconds"] < total - CHOICE * usual + 2 * COMPUTES, said
    first = (1 + SETTLING) * (said["seconds"]["stock"] - usual)  # dense, before the tournament
    assert said["cost_seconds"] > 0.6 * (total - first - CHOICE * usual), (said, total)


@pytest.mark.usefixtures("model_time")
def test_after_a_change_of_ranks_all_begin_again_with_the_leaders_compressor() -> None:
    """Stock waits for the meeting: otherwise the old ranks would hand Horovod gradients, and the new ones wait for them."""
    ranks = begun(Link(FAST), "none")
    before = train(ranks, CHOICE)[0]
    assert before["way"] == "stock" and ranks[0].session.gradients.stock is not None
    joined = ranks[:1] + begun(Link(SLOW), "none") + ranks[1:]
    threads.move(joined)
    assert not any(rank.session.has_met or rank.session.gradients.stock for rank in joined)
    after = train(joined, CHOICE)[0]
    assert after["choices"] == 1 and after["after_step"] > before["after_step"]
    slow = begun(Link(SLOW), "low")
    way = train(slow, CHOICE)[0]["way"]
    joined = slow + begun(Link(SLOW), "low")
    threads.move(joined)
    train(joined, 1)
    assert way == "blocks" and all(rank.session.spec == way for rank in joined)


# From one candidate to another: no gradient is lost, and none comes twice.


class Scripted(Chooser):
    """Turns that take one candidate after the other, for some steps each."""

    def __init__(self, rank: Rank, wanted: Sequence[Candidate], steps: int):
        self._wanted, self._each, self.reached = wanted, steps, list[bool]()
        super().__init__(rank.session, gradcomp.spec.Auto(), ())

    def _run(self) -> auto.Course[None]:
        for candidate in self._wanted:
            self.reached.append(self._to(candidate))
            yield self._each
        while True:
            yield 10**6


def started(
    steps: int, wanted: Sequence[Candidate], each: int, frozen: Callable[[int], bool] = lambda step: False
) -> tuple[list[Rank], list[Any]]:
    """Train ranks that take these candidates. frozen: in these steps the layer has no gradient. Return ranks and turns."""
    ranks = threads.start(2, "dense", optimizer_of=partial(torch.optim.SGD, lr=1))

    def of_rank(rank: Rank) -> Scripted:
        rank.session.door = threads.StockDoor(rank)
        rank.step()
        rank.session.turns = turns = Scripted(rank, wanted, each)
        for step in range(steps):
            rank.parameter.requires_grad_(not frozen(step))
            if frozen(step):
                rank.idle()
            else:
                rank.step()
        return turns

    return ranks, threads.together(ranks, of_rank)


@pytest.mark.parametrize(
    "wanted",
    [
        [TOPK, STOCK],
        [STOCK, TOPK, HALF],
        [HALF, STOCK, TOPK, EXACT],
        [TOPK, TOPK, STOCK],
        [STOCK, BLOCKS, TOPK],
    ],
    ids=lambda wanted: ", ".join(map(str, wanted)),
)
def test_all_gradients_come_or_wait(wanted: list[Candidate]) -> None:
    ranks, turns = started(5 * len(wanted) + 8, wanted, 5)
    assert all(each.reached == [True] * len(wanted) and each._present == wanted[-1] for each in turns), turns
    given = (ranks[0].given + ranks[1].given) / 2
    waits = (ranks[0].residual.double() + ranks[1].residual.double()) / 2
    rounds = 0.3 if BLOCKS in wanted else 2e-2 if HALF in wanted else 1e-4  # a gradient has entries up to 4
    torch.testing.assert_close(ranks[0].came + waits, given, atol=rounds, rtol=0)
    assert torch.equal(ranks[0].came, ranks[1].came)
    assert wanted[-1].keeps_residual or not waits.any()
    assert all(rank.session.gradients.stock == wanted[-1].stock for rank in ranks)


def test_a_candidate_that_does_not_suit_the_training_is_refused_once_on_all_ranks() -> None:
    odd = Candidate("topk:momentum=0.9,lr_momentum=1")  # no such knob
    _, turns = started(8, [odd, BLOCKS, odd], 2)
    for each in turns:
        assert each.reached == [False, True, False] and each._present == BLOCKS and each.report()["changes"] == 1


@pytest.mark.parametrize("wanted", [STOCK, EXACT, HALF, BLOCKS], ids=str)
@pytest.mark.parametrize("steps", [5, 2], ids=["trained", "frozen"])
def test_a_change_to_gradients_delivers_the_mean_residual_at_once(wanted: Candidate, steps: int) -> None:
    """Before any gradient is exchanged, also to a layer that is frozen by then."""
    ranks, turns = started(5, [TOPK, wanted], 5, lambda step: step >= steps)
    assert all(each.reached == [True, True] and each._present == wanted for each in turns), turns
    torch.testing.assert_close(ranks[0].came, (ranks[0].given + ranks[1].given) / 2, atol=1e-5, rtol=0)
    assert torch.equal(ranks[0].came, ranks[1].came)
    assert not any(rank.residual.any() for rank in ranks)
