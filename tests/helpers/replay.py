"""Replays of recorded step times: the policy of auto takes steps that a record timed, with their noise.

The records have the candidates of their time: nine and five levels where auto now has blocks.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradcomp import auto
from gradcomp.auto import EXACT, Candidate, Policy

RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "steps"

# The candidates of the records between those that only round to 16 bits and those that keep a residual; mildest first.
LEVELS = [Candidate(f"orq:levels={levels},momentum=0") for levels in (9, 5)]
# The names that stock's candidates have in records.
STOCK = {"stock": torch.float32, "bf16": torch.bfloat16}
# The steps that are as fast as one round of a record; the share of a step by which it differs from its round, at most.
ROUND, NOISE = 8, 0.1
# The seconds of a change: a meeting of the ranks, and memory that is allocated anew. An exact step over one of stock.
CHANGE, EXACT_OVER_STOCK = 0.03, 1.1


class Cell(NamedTuple):
    """One cluster, task and loss of a record. rounds: the seconds of a step in each round, by candidate; mildest first."""

    name: str
    rounds: Mapping[Candidate, Sequence[float]]

    @property
    def seconds(self) -> dict[Candidate, float]:
        return {candidate: statistics.median(rounds) for candidate, rounds in self.rounds.items()}


def cells() -> Iterator[Cell]:
    """Read every cell of the records of accuracy's launches."""
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text())
        launch, lines = record["launch"], {line["way"]: line for line in record["run"]["lines"]}
        for loss in ("low", "high"):
            stock = STOCK.values() if "bf16" in lines else [torch.float32]
            mild = [*auto.candidates("none", stock, False), *LEVELS]
            waits = [each for each in auto.candidates(loss, stock, False) if each.keeps_residual]
            rounds = {each: _rounds(each, lines) for each in mild + waits}
            name = "-".join(map(str, (launch["task"], launch["door"], launch["hosts"], launch["rate"], loss)))
            yield Cell(name, {each: found for each, found in rounds.items() if found})


def _rounds(candidate: Candidate, lines: Mapping[str, Any]) -> list[float]:
    """Return the seconds of a candidate's step in each round. `half` was timed in tries of auto only, beside others."""
    name = next((name for name, form in STOCK.items() if form is candidate.stock), candidate.spec)
    if name in lines:
        return [each / 1e3 for each in lines[name]["ms_of_rounds"]]
    tries = [lines[way]["auto"]["seconds"] for way in ("auto", "auto:loss=high") if way in lines]
    found = [
        tried[name] / tried[other] * lines[other]["ms"]["median"] / 1e3
        for tried in tries
        if name in tried
        for other in tried
        if other in lines and other not in STOCK
    ]
    return [statistics.median(found)] if found else []


class Replay:
    """A training on a cell. seconds: it has taken. steps: it has done. present: its candidate."""

    def __init__(self, cell: Cell, seed: int):
        self.cell, self.policy, self.present = cell, Policy(), EXACT
        self.seconds, self.steps = 0.0, 0
        self._draws, self._round = random.Random(seed), (EXACT, 0, 0.0)
        self._take(EXACT, 1 + auto.SETTLING)

    def train(self, steps: int) -> None:
        """Train until so many steps are done, tournaments included."""
        while self.steps < steps:
            self._choose()
            self._take(self.present, max(0, min(self.policy.rest, steps - self.steps)))

    def _choose(self) -> None:
        game = self.policy.choose([*self.cell.rounds], self.present)
        candidate, counted = next(game)
        while True:
            settling = self._to(candidate)
            try:
                candidate, counted = game.send(self._take(candidate, settling + counted))
            except StopIteration as end:
                self._take(end.value, self._to(end.value))
                return

    def _to(self, candidate: Candidate) -> int:
        """Change to a candidate. Return the steps in which it settles."""
        if candidate == self.present:
            return 0
        if self.present.keeps_residual and not candidate.keeps_residual:
            self.seconds += CHANGE  # residuals go into the weights
        self.seconds += CHANGE
        self.present = candidate
        return auto.SETTLING_RESIDUAL if candidate.keeps_residual else auto.SETTLING

    def _take(self, candidate: Candidate, count: int) -> list[float]:
        taken = [self._step(candidate) for _ in range(count)]
        self.seconds += sum(taken)
        self.steps += count
        return taken

    def _step(self, candidate: Candidate) -> float:
        over = 1.0
        if candidate == EXACT:
            candidate, over = next(iter(self.cell.rounds)), EXACT_OVER_STOCK
        of, left, seconds = self._round
        if of != candidate or not left:
            left, seconds = ROUND, self._draws.choice(self.cell.rounds[candidate])
        self._round = candidate, left - 1, seconds
        return over * seconds * self._draws.uniform(1 - NOISE, 1 + NOISE)
