"""What training comes to: Horovod's own weights where nothing is left out, and the same weights on all ranks in any case."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

pytestmark = pytest.mark.slow
SETTINGS = [
    "average",
    "sum",
    "predivide",
    "num_groups",
    "groups",
    "accumulate",
    "dynamic",
    "dynamic accumulate",
    "dynamic groups",  # stock Horovod waits for ever here: ranks differ in which groups are complete
]
ROUTES = ["A", "B"]
ONE, SEVERAL = 25, 0.025  # MB a bucket: the model's 48 KB in one, and in three
EXACT, SPARSE, MOMENTUM = ["dense", "topk:ratio=1,wire=exact"], "topk:ratio=0.001", "topk:ratio=0.001,momentum=0.9"
MORE = {2: ["average", "dynamic"], 4: ["dynamic"]}  # by ranks: the settings also tried in one bucket, and with momentum
ALONG = [(setting, route) for setting in SETTINGS for route in ROUTES if (setting, route) != ("dynamic groups", "A")]
Case = tuple[str, str, str, float]


def more(count: int, spec: str, bucket_mb: float) -> list[Case]:
    return [(setting, route, spec, bucket_mb) for setting in MORE[count] for route in ROUTES]


EXACT_CASES: dict[int, list[Case]] = {
    count: [case for spec in EXACT for case in [*((*along, spec, SEVERAL) for along in ALONG), *more(count, spec, ONE)]]
    for count in MORE
}
SPARSE_CASES: dict[int, list[Case]] = {
    count: [*((*along, SPARSE, SEVERAL) for along in ALONG), *more(count, SPARSE, ONE), *more(count, MOMENTUM, SEVERAL)]
    for count in MORE
}


def stock(setting: str) -> tuple[str, str, str, int]:
    return ("dynamic" if setting == "dynamic groups" else setting, "hvd", "", 0)


@ranks.once
def trained(count: int, kind: str) -> list[dict[Any, Any]]:
    if kind == "exact":
        runs = [*dict.fromkeys(stock(setting) for setting in SETTINGS), *EXACT_CASES[count]]
        return ranks.launch("horovod_weights", count, {"runs": runs, "steps": 50}, seconds=500)
    return ranks.launch("horovod_weights", count, {"runs": SPARSE_CASES[count], "steps": 200}, seconds=500)


@pytest.mark.parametrize("count, case", [(count, case) for count in EXACT_CASES for case in EXACT_CASES[count]], ids=str)
def test_with_nothing_left_out_training_is_horovods_own(count: int, case: Case) -> None:
    found = trained(count, "exact")
    for rank in found:
        theirs, ours = rank[stock(case[0])]["weights"], rank[case]["weights"]
        if count == 2:  # a + b is b + a, whoever adds
            assert torch.equal(theirs, ours)
        else:  # four summands in another order: a rounding of 2^-24 each, in 50 steps
            assert (theirs - ours).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("count, case", [(count, case) for count in SPARSE_CASES for case in SPARSE_CASES[count]], ids=str)
def test_all_ranks_hold_the_same_weights_to_the_last_bit(count: int, case: Case) -> None:
    found = trained(count, "sparse")
    first = found[0][case]["weights"]
    assert first.isfinite().all()
    assert all(torch.equal(rank[case]["weights"], first) for rank in found)
    stats = found[0][case]["stats"]
    assert stats["steps"] == 200
    assert (stats["buckets"] == 1) == (case[3] == ONE)
    assert stats["compression"] > 200  # 0.1 % of the entries at 8 bytes each, and a header of 8 bytes a bucket


def test_it_works_from_the_command_that_users_type() -> None:
    """horovodrun itself, with one run along each route."""
    runs = [("average", route, SPARSE, ONE) for route in ROUTES]
    found = ranks.by_horovodrun("horovod_weights", 2, {"runs": runs, "steps": 5})
    for run in runs:
        assert torch.equal(found[0][run]["weights"], found[1][run]["weights"])
