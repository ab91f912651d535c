"""Weights after training: Horovod's own where nothing is left out, and the same on all ranks in any case."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch

pytestmark = pytest.mark.slow

OPTIONS: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "num_groups": {"num_groups": 1},
    "groups": {"groups": 1},
    "accumulate": {"backward_passes_per_step": 2},
    "dynamic": {},
    "dynamic accumulate": {"backward_passes_per_step": 2},
    "dynamic groups": {"groups": 1},  # stock Horovod waits for ever here: ranks differ in which groups are complete
}
# MB a bucket: the model's 48 KB in one, and in three.
ONE, SEVERAL = 25, 0.025
EXACT, SPARSE, MOMENTUM = ["dense", "topk:ratio=1,wire=exact"], "topk:ratio=0.001", "topk:ratio=0.001,momentum=0.9"
EXACT_STEPS, SPARSE_STEPS = 20, 60
# By ranks: the settings, of which four ranks have those where their number counts; and those also in one bucket, with momentum.
TRIED = {2: list(OPTIONS), 4: ["average", "sum", "predivide", "dynamic", "dynamic groups"]}
MORE = {2: ["average", "dynamic"], 4: ["dynamic"]}
Case = tuple[str, str, str, float]


def along(count: int) -> list[tuple[str, str]]:
    """List the settings with their doors."""
    pairs = [(setting, door) for setting in TRIED[count] for door in doors.DOORS]
    return [pair for pair in pairs if pair != ("dynamic groups", doors.COMPRESSION)]


def more(count: int, spec: str, bucket_mb: float) -> list[Case]:
    return [(setting, door, spec, bucket_mb) for setting in MORE[count] for door in doors.DOORS]


EXACT_CASES: dict[int, list[Case]] = {
    count: [case for spec in EXACT for case in [*((*pair, spec, SEVERAL) for pair in along(count)), *more(count, spec, ONE)]]
    for count in MORE
}
SPARSE_CASES: dict[int, list[Case]] = {
    count: [*((*pair, SPARSE, SEVERAL) for pair in along(count)), *more(count, SPARSE, ONE), *more(count, MOMENTUM, SEVERAL)]
    for count in MORE
}


def stock(setting: str) -> tuple[str, str, str, int]:
    return ("dynamic" if setting == "dynamic groups" else setting, doors.ALONE, "", 0)


class Run:
    """One model in training."""

    def __init__(self, setting: str, door: str, spec: str, bucket_mb: float):
        self.dynamic = "dynamic" in setting
        self.passes = 2 if "accumulate" in setting else 1
        self.model = small_net.net(unused=self.dynamic)
        options = OPTIONS[setting]
        deprecated = "num_groups" in options and door != doors.OWN
        prefix = f"{setting}/{door}/{spec}/{bucket_mb}."
        with warnings.catch_warnings(record=True) if deprecated else contextlib.nullcontext():
            warnings.simplefilter("always" if deprecated else "error")
            self.optimizer = doors.sgd(door, self.model, spec, prefix=prefix, bucket_mb=bucket_mb, **options)
        self.data = doors.batches()

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        for turn in range(self.passes):
            skip = self.dynamic and (step + turn + hvd.rank()) % 3 == 0
            small_net.backward(self.model, next(self.data), skip=skip)


def program(runs: list[Case], steps: int) -> dict[Case, dict[str, Any]]:
    """Train many models side by side, a step of each in turn; return every model's weights and figures.

    All gradients of a step are on their way before the first optimizer waits: many optimizers at once, and fast.
    """
    os.environ["HOROVOD_CYCLE_TIME"] = "5"  # ms: much is under way at once, and frequent looking eats the two cores
    hvd.init()
    models = {tuple(run): Run(*run) for run in runs}
    for step in range(steps):
        for run in models.values():
            run.backward(step)
        for run in models.values():
            run.optimizer.step()
    return {
        key: {
            "weights": small_net.weights(run.model),
            "stats": run.optimizer.compression.stats() if key[1] in doors.DOORS else None,
        }
        for key, run in models.items()
    }


@ranks.once
def trained(count: int, kind: str) -> list[dict[Any, Any]]:
    if kind == "exact":
        runs = [*dict.fromkeys(stock(setting) for setting in TRIED[count]), *EXACT_CASES[count]]
        return ranks.launch(program, count, runs, EXACT_STEPS, seconds=500)
    return ranks.launch(program, count, SPARSE_CASES[count], SPARSE_STEPS, seconds=500)


@pytest.mark.parametrize("count, case", [(count, case) for count in EXACT_CASES for case in EXACT_CASES[count]], ids=str)
def test_with_nothing_left_out_training_is_horovods_own(count: int, case: Case) -> None:
    found = trained(count, "exact")
    for rank in found:
        theirs, ours = rank[stock(case[0])]["weights"], rank[case]["weights"]
        if count == 2:  # a + b is b + a, whoever adds
            assert torch.equal(theirs, ours)
        else:  # four summands in another order: a rounding of 2^-24 each, in 20 steps
            assert (theirs - ours).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("count, case", [(count, case) for count in SPARSE_CASES for case in SPARSE_CASES[count]], ids=str)
def test_all_ranks_hold_the_same_weights_to_the_last_bit(count: int, case: Case) -> None:
    found = trained(count, "sparse")
    first = found[0][case]["weights"]
    assert first.isfinite().all()
    assert all(torch.equal(rank[case]["weights"], first) for rank in found)
    stats = found[0][case]["stats"]
    assert stats["steps"] == SPARSE_STEPS
    assert (stats["buckets"] == 1) == (case[3] == ONE)
    assert stats["compression"] > 200  # 0.1 % of the entries at 8 bytes each, and a header of 8 bytes a bucket


def test_it_works_from_the_command_that_users_type() -> None:
    """One run by each door."""
    runs = [("average", door, SPARSE, ONE) for door in doors.DOORS]
    found = ranks.by_horovodrun(program, 2, runs, 5)
    for run in runs:
        assert torch.equal(found[0][run]["weights"], found[1][run]["weights"])
