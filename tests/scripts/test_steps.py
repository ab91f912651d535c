"""lab steps: the plan of launches, and what the committed records hold of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laboratory import machine
from laboratory.commands import steps
from laboratory.harness import measured
from laboratory.harness.measured import Lab, Rounds
from laboratory.harness.ways import refuse
from laboratory.main import main
from laboratory.tasks.table import TASKS


def test_each_way_suits_its_door_and_all_clusters_have_the_same_batch() -> None:
    every = steps.launches("mlp")
    for launch in every:
        refuse(launch.ways, launch.door)
    assert {launch.hosts * launch.settings.batch for launch in every} == {4 * TASKS["mlp"].defaults.batch}
    assert len({(launch.door, launch.hosts, launch.rate) for launch in every}) == len(every) == 16


def test_every_cluster_has_a_record_and_of_several_the_newest_counts() -> None:
    every = list(measured.records(steps.RECORDS))
    for task in steps.TIMED:
        for door in steps.DOORS:
            found = steps.launched(task, door)
            assert {(hosts, rate) for hosts in steps.HOSTS for rate in steps.LINKS} <= found.keys()
            for (hosts, rate), record in found.items():
                place = {"task": task, "door": door, "hosts": hosts, "rate": rate}
                assert record.get("date", "") == max(
                    each.get("date", "") for each in every if place.items() <= each["key"].items()
                )
                assert {"none", "stock", "topk"} <= {line["way"] for line in record["lines"]}


def test_launches_that_have_a_record_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Rounds] = []
    monkeypatch.setattr(steps, "TIMED", ["mlp"])

    def perform(own: Rounds, lab: Lab) -> dict[str, Any]:
        made.append(own)
        return {"lines": []}

    monkeypatch.setattr(measured, "perform", perform)
    monkeypatch.setattr(machine, "origin", lambda command: {"command": command})
    chosen = ["steps", "--data", str(tmp_path), "--cache", str(tmp_path), "--out", str(tmp_path / "steps")]
    assert main(chosen) == main(chosen) == 0
    assert made == steps.launches("mlp")
    assert "16 measurements, 16 of them finished" in capsys.readouterr().out
