"""Ranks that agree, leave, join and roll back, with their residuals, in one process."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from threads import Generation, Rank, move, start, together
from torch import Tensor

import gradcomp
from gradcomp.engine import meeting

SPEC = "topk:ratio=0.05"
MOMENTUM = 0.5
CONSERVING = [
    SPEC,
    "topk:ratio=0.02,warmup=40,route=split",
    "topk:ratio=0.05,by_host=true",
    f"sign:momentum={MOMENTUM}",
    "sdagc:lam=1.5,small=pool",
    "sdagc:density=0.05,small=none",
    "gtopk:ratio=0.05",
    "lgc:dense=2,learn=4,ratio=0.02",
    "orq:sigmas=1.5,feedback=true",
]


def steps(ranks: list[Rank], count: int, scale: float = 1.0) -> None:
    for _ in range(count):
        for outcome in together(ranks, lambda rank: rank.exchange(scale)):
            assert not isinstance(outcome, Exception), outcome
        update(ranks)


def update(ranks: list[Rank]) -> None:
    """Step the ranks' optimizers, one after the other: a step shows what all sessions hide from their optimizers."""
    for rank in ranks:
        if rank.optimizer is not None:
            rank.optimizer.step()


def sync(ranks: list[Rank]) -> list[Any]:
    return together(ranks, lambda rank: rank.session.resume.sync())


def commit(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.session.resume.commit()


@pytest.mark.parametrize("old,new", [(4, 3), (4, 2), (2, 3), (1, 2)])
@pytest.mark.parametrize("sums", [False, True])
def test_residuals_are_scaled_to_the_new_number_of_ranks(old: int, new: int, sums: bool) -> None:
    """A mean over fewer ranks counts each entry more; a sum does not."""
    ranks = start(old, SPEC)
    steps(ranks, 3, float(old) if sums and old > 1 else 1.0)
    for rank in ranks:
        rank.session.sums = sums and old > 1
    before = [rank.residual for rank in ranks]
    members = ranks[:new]
    joined = Generation(new)
    members += [Rank(joined, rank, SPEC) for rank in range(len(members), new)]
    move(members)
    assert sync(members) == [None] * new
    factor = 1.0 if sums and old > 1 else new / old
    for rank, waiting in zip(members, before, strict=False):
        torch.testing.assert_close(rank.residual, factor * waiting)
    for rank in members[old:]:
        assert not rank.residual.any()
        assert rank.session.reducer.steps_done == 3


def waiting(rank: Rank) -> Tensor:
    """Return a rank's part of all later updates, if all later gradients are zero."""
    return rank.residual.double() / rank.network.world.size


@pytest.mark.parametrize("spec", CONSERVING)
def test_a_rank_that_ends_takes_its_residual_along_and_nothing_else_is_lost(spec: str) -> None:
    """Of four ranks one ends, and another one joins. Rounding: sums of some dozen float32 gradients."""

    def train(members: list[Rank]) -> Tensor:
        before = [rank.given.clone() for rank in members]
        steps(members, 7)
        commit(members)
        return torch.stack([rank.given - old for rank, old in zip(members, before, strict=True)]).mean(0)

    ranks = start(4, spec)
    given = train(ranks)
    lost = waiting(ranks.pop(2))
    for joins in (False, True):
        ranks += [Rank(Generation(4), 3, spec, "host 4")] if joins else []
        move(ranks)
        assert sync(ranks) == [None] * len(ranks)
        given += train(ranks)
    weight = 1 / (1 - MOMENTUM) if "momentum" in spec else 1.0
    came = ranks[0].came + torch.stack([waiting(rank) for rank in ranks]).sum(0)
    torch.testing.assert_close(came, weight * given - lost, rtol=1e-3, atol=2e-3)
    assert lost.norm() > 0.1, "what is lost stands out"
    assert all(torch.equal(rank.came, ranks[0].came) for rank in ranks[:3])


def test_a_rank_that_joins_forgets_the_files_that_its_script_has_loaded() -> None:
    """An elastic job runs the whole script on a rank that joins, also the lines that load the last files."""
    ranks = start(2, SPEC)
    steps(ranks, 3)
    files = [rank.session.resume.state_dict() for rank in ranks]
    steps(ranks, 3)
    commit(ranks)
    before = [rank.residual for rank in ranks]
    joining = Rank(Generation(2), 1, SPEC)
    joining.session.resume.load_state_dict(files)
    assert joining.residual.any()
    commit([joining])
    members = [*ranks, joining]
    move(members)
    assert sync(members) == [None] * 3
    assert not joining.residual.any() and joining.session.reducer.steps_done == 6
    for rank, waiting in zip(ranks, before, strict=True):
        torch.testing.assert_close(rank.residual, 1.5 * waiting)
    steps(members, 2)


def test_ranks_that_all_load_files_go_on_from_them() -> None:
    """At the start of a job nobody has met before, and the files count."""
    ranks = start(2, SPEC)
    steps(ranks, 3)
    files = [rank.session.resume.state_dict() for rank in ranks]
    again = start(2, SPEC)
    for rank in again:
        rank.session.resume.load_state_dict(files)
    assert sync(again) == [None] * 2
    assert [torch.equal(a.residual, b.residual) for a, b in zip(ranks, again, strict=True)] == [True, True]


@pytest.mark.parametrize("spec", ["sdagc:lam=2", f"{SPEC},momentum=0.9", "dense"])
def test_a_commit_from_before_a_change_restores_the_spec(spec: str) -> None:
    ranks = start(2, SPEC)
    steps(ranks, 2)
    commit(ranks)
    wanted = [rank.residual for rank in ranks]
    together(ranks, lambda rank: rank.session.resume.change(gradcomp.make(spec)))
    steps(ranks, 2)
    for rank in ranks:
        rank.session.resume.roll_back()
        assert rank.session.spec == SPEC
    move(ranks)
    assert sync(ranks) == [None] * 2
    assert [torch.equal(rank.residual, waiting) for rank, waiting in zip(ranks, wanted, strict=True)] == [True, True]
    steps(ranks, 2)


def test_a_rank_that_is_ahead_by_one_commit_goes_back() -> None:
    ranks = start(3, SPEC)
    steps(ranks, 2)
    commit(ranks)
    wanted = [rank.residual for rank in ranks]
    steps(ranks, 2)
    commit(ranks[1:])  # rank 0 failed in between
    for rank in ranks:
        rank.session.resume.roll_back()
    move(ranks)
    assert sync(ranks) == [None] * 3
    assert [rank.session.reducer.steps_done for rank in ranks] == [2, 2, 2]
    assert all(torch.equal(rank.residual, waiting) for rank, waiting in zip(ranks, wanted, strict=True))


@pytest.mark.parametrize("later", [False, True])
def test_a_rank_goes_back_to_the_commit_of_the_leaders_spec(later: bool) -> None:
    """Both commits are after the same step, on both sides of a change. later: rank 1 has committed since, too."""
    ranks, changed = start(2, SPEC), "topk:ratio=0.1"
    steps(ranks, 2)
    commit(ranks)
    together(ranks, lambda rank: rank.session.resume.change(gradcomp.make(changed)))
    commit(ranks)
    wanted = [rank.residual for rank in ranks]
    steps(ranks, 1)
    if later:
        commit(ranks[1:])
    ranks[0].session.resume.roll_back()
    move(ranks)
    assert sync(ranks) == [None] * 2
    assert [rank.session.spec for rank in ranks] == [ranks[0].session.spec] * 2 and changed in ranks[0].session.spec
    assert all(torch.equal(rank.residual, waiting) for rank, waiting in zip(ranks, wanted, strict=True))


def test_the_ranks_that_left_are_named(caplog: pytest.LogCaptureFixture) -> None:
    ranks = start(4, SPEC)
    steps(ranks, 1)
    move([ranks[0], ranks[2], ranks[3]])
    with caplog.at_level(logging.WARNING, "gradcomp"):
        sync([ranks[0], ranks[2], ranks[3]])
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == ["gradcomp: rank 1 of 4 left"]


@pytest.mark.parametrize("now", [["a", "a", "b", "b"], ["a", "b", "a", "b"], ["b", "b", "a", "a"]])
def test_by_host_restores_its_state_on_all_ranks_or_on_none(now: list[str]) -> None:
    spec = "sdagc:lam=2,small=none,by_host=true"
    ranks = start(4, spec, ["a", "a", "b", "b"])
    steps(ranks, 6)
    files = [rank.session.resume.state_dict() for rank in ranks]
    again = start(4, spec, now)
    for rank in again:
        rank.session.resume.load_state_dict(files)
    steps(again, 3)
    if now[0] == now[1]:  # the same ranks are neighbours
        steps(ranks, 1)


@pytest.mark.parametrize("damage", ["of rank 1", "steps"])
def test_a_state_that_is_refused_on_one_rank_changes_nothing_on_any(damage: str) -> None:
    """One that is refused, and one of other steps, which only a comparison shows. They compare before they load."""
    ranks, undisturbed = start(2, SPEC), start(2, SPEC)
    for members in (ranks, undisturbed):
        steps(members, 2)
    states = [rank.session.resume.state_dict() for rank in ranks]
    if damage == "steps":
        states[0]["of_rank"]["0"]["steps"] = 7
    else:
        states[0] = states[1]
    first, second = together(ranks, lambda rank: rank.session.resume.load_state_dict(states[ranks.index(rank)]))
    assert isinstance(first, ValueError) and isinstance(second, ValueError) and "the loaded state: rank 0 has" in str(second)
    if damage == "of rank 1":
        assert str(first).startswith("the state is of rank 1 of 2, but this is rank 0 of 2") and str(first)[:60] in str(second)
    for members in (ranks, undisturbed):
        steps(members, 2)
    assert all(torch.equal(rank.came, other.came) for rank, other in zip(ranks, undisturbed, strict=True))


# The records by which ranks agree

TERMS = {"spec": "topk", "seed": "0", "names": "a, b"}


def test_all_records_have_one_size() -> None:
    sizes = {meeting.record(TERMS | {"names": "x" * n}).numel() for n in (0, 1, 111, 112, 113, 100_000)}
    assert len(sizes) == 1


def test_ranks_that_agree_pass() -> None:
    meeting.check_terms(TERMS, [meeting.record(TERMS)] * 3)


@pytest.mark.parametrize("term", TERMS)
def test_ranks_that_differ_are_told_where(term: str) -> None:
    odd = TERMS | {term: "other"}
    for own in (TERMS, odd):  # every rank comes to the same sentence
        with pytest.raises(ValueError, match=re.escape(f"{term}: rank 0 has {TERMS[term]!r}, rank 2 has 'other'")):
            meeting.check_terms(own, [meeting.record(t) for t in (TERMS, TERMS, odd)])


def test_a_difference_beyond_the_shown_text_is_found() -> None:
    long = "x" * 500
    records = [meeting.record(TERMS | {"names": long + end}) for end in "ab"]
    with pytest.raises(ValueError, match=r"names: .*digest"):
        meeting.check_terms(TERMS, records)
