"""What is learnt of a factor between the exchange and the optimizer's step: a clip, or another factor."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gradcomp.engine.user_clip import CONTENTS, DRIFTS, Comparison, UserClip, UserClips


def note(clips: UserClips, factor: float, norm: float, holds: str = "velocity") -> bool:
    step = Comparison(1, 1, 1, 1, factor, norm, 1e-4, ([norm**2], [(factor * norm) ** 2]))
    return clips.note(step, CONTENTS[holds], is_whole=True)


def noted(pairs: Iterable[tuple[float, float]]) -> UserClip:
    """Note clips by their factors and bounds."""
    clips = UserClips(1)
    for factor, bound in pairs:
        note(clips, factor, bound / factor - 1e-6)
    return clips.every[0]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_division_by_a_count_is_no_clip_from_the_first_step_on() -> None:
    for count in (2, 3, 64, 67.5, 1357 / 16):
        for steps in (1, 2):
            clip = noted([(1 / count, 0.7012345 / (i + 1)) for i in range(steps)])
            assert clip.is_scaling and clip.bound is None, count
    assert noted([(1 / 64, 0.7), (1 / 64, 0.8), (1 / 64, 0.8), (1 / 40, 0.8)]).is_scaling, "norms may be equal by chance"
    assert noted([(1 / 64, 0.5), (0.1278943, 0.5)]).bound == pytest.approx(0.5)
    assert noted([(0.1278943, 0.5), (1 / 64, 0.5)]).bound == pytest.approx(0.5), "a clip's factor may be a ratio by chance"
    assert noted([(0.1278943, 0.7012345)]).bound == pytest.approx(0.7012345)


def test_a_small_factor_near_a_ratio_by_chance_is_a_clip() -> None:
    for count in (678.5, 1357 / 8, 16 * 2**20 / 3):
        clip = noted([(1 / count, 0.7012345)])
        assert not clip.is_scaling and clip.bound == pytest.approx(0.7012345), count
    assert noted([(1 / 678.5, 0.7), (1 / 678.5, 0.35)]).is_scaling, "the second step decides"


LEAPS = [(0.1 + 0.0123 / (i + 3), 1.0123 * 1.3 ** (i % 3)) for i in range(3 * DRIFTS)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("change", [0.985, 0.9, 1.1])
def test_a_bound_that_goes_one_way_is_followed(change: float) -> None:
    pairs = [(0.1 + 0.0123 / (i + 3), 1.0123 * change**i) for i in range(30)]
    pairs[9] = pairs[8][0], pairs[9][1]  # two factors are equal by chance, and one is a ratio
    pairs[12] = 1 / 16, pairs[12][1]
    assert [noted(pairs[: i + 1]).bound for i in range(30)] == pytest.approx([bound for _, bound in pairs])


@pytest.mark.parametrize("holds", CONTENTS)
def test_bounds_that_leap_are_no_clips(holds: str) -> None:
    """SGD gets its momentum back. For other updates no clip is known any more."""
    clips = UserClips(1)
    with pytest.warns(UserWarning) as warned:
        leaves = [note(clips, factor, bound / factor, holds) for factor, bound in LEAPS[: DRIFTS + 1]]
        assert leaves == [False] * DRIFTS + [holds == "velocity"]
        if holds != "velocity":
            for factor in (0.2012345, 0.3012345):
                note(clips, factor, 1 / factor, holds)
    assert not clips.bounded and ["norms of 1.01, 1.32, 1.71, 1.01 were left" in str(each.message) for each in warned] == [True]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_saved_clip_goes_on_as_the_first_one_does() -> None:
    for end, (factor, bound) in enumerate(LEAPS):
        first, second = noted(LEAPS[:end]).family, UserClips(1)
        second.load(first.save())()
        assert second.save() == first.save()
        for each in (first, second):
            note(each, factor, bound / factor)
        assert second.save() == first.save() and len(first.every[0].save().get("bounds", ())) <= DRIFTS + 1


@pytest.mark.parametrize("holds", CONTENTS)
def test_a_clip_beside_a_division_is_not_undone(holds: str) -> None:
    """SGD gets its momentum back. For other updates no clip is known any more."""
    clip, bare, other = (0.0312345, 1.0), (1 / 32, 0.3), (0.3, 0.2)
    for before, last in (([clip], bare), ([bare], clip), ([other, (0.3, 0.4)], clip), ([bare, (1 / 40, 0.995)], clip)):
        clips, loaded = UserClips(1), UserClips(1)
        for factor, bound in before:
            note(clips, factor, bound / factor, holds)
        loaded.load(clips.save())()
        for each in (clips, loaded):
            with pytest.warns(UserWarning, match="were divided, for example by a count"):
                assert note(each, last[0], last[1] / last[0], holds) == (holds == "velocity")
            if holds != "velocity":
                note(each, *clip, holds)
                note(each, 0.0212345, 1 / 0.0212345, holds)
            assert not each.bounded


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_clip_in_some_steps_leaves_the_momentum_to_sgd() -> None:
    for holds in CONTENTS:
        clips = UserClips(1)
        for factor in (0.1278943, 1.0, 0.2012345):
            leaves = note(clips, factor, 0.5 / 0.1278943 if factor == 1 else 0.5 / factor, holds)
        assert leaves == (holds == "velocity") != bool(clips.bounded)


@pytest.mark.parametrize("holds", CONTENTS)
def test_a_warning_says_that_gradients_stay_cut_where_updates_do_not_show_a_clip_that_is_dropped(holds: str) -> None:
    clips = UserClips(1)
    note(clips, 0.1278943, 0.5 / 0.1278943, holds)
    with pytest.warns(UserWarning, match="clipped to a norm of 0.5 ") as warned:
        note(clips, 0.2012345, 0.5 / 0.2012345, holds)
    assert ("stay cut" in str(warned[0].message)) == (holds == "gradient")
