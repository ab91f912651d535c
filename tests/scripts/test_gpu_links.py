"""gpu_check's links and prices: the ladder of ways to make links, what is kept of a run that ends early, and the rehearsal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clusters import need_cluster

from documentation import pictures
from laboratory import ranks
from laboratory.cluster import network
from laboratory.gpu import links, prices, shaping, stages, work
from laboratory.gpu.stages import Output, Record, Stage

LINE = {"steps", "ms", "ms_bounds", "interface_bytes", "loss", "auto", "of_ranks"}
LINKED = partial(work.linked, device="cpu", count=2, limit=1.0, of_race=0.5)


def record_of(folder: Path, run: Any, limit: float = 60, **variables: str) -> Record:
    return stages.run([[Stage("stage", run, limit)]], limit, folder / "log", variables, len)[0]


def writes(found: Record, then: str = "") -> list[str]:
    """Write a command that leaves a record as the ranks do, and then does something."""
    program = f"import sys, time; open(sys.argv[-1], 'w').write({json.dumps(found)!r}); {then}"
    return [sys.executable, "-c", program]


def ladder(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rungs: dict[str, list[str]], lacking: Sequence[str] = ()
) -> list[str]:
    """Let rungs run these commands, and lack something. Return the tries, in which each goes by how and backend."""
    tries: list[str] = []

    def command(how: str, count: int, job: Sequence[str]) -> list[str]:
        fields = json.loads(job[1])
        assert (count, fields["how"]) == (2, how)
        tries.append(f"{how}, {fields['backend']}")
        return rungs[tries[-1]]

    monkeypatch.setattr(work, "BUILD", folder)
    monkeypatch.setattr(shaping, "missing", lambda how: "it lacks ip" if how in lacking else "")
    monkeypatch.setattr(shaping, "command", command)
    return tries


FINE: Record = {"lines": [{"way": "stock"}], "race": []}
REFUSED: Record = {"lines": [], "race": [], "refused": "loopback: no rate may be claimed"}


def test_the_first_rung_that_holds_is_taken_and_the_others_say_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [sys.executable, "-c", "raise SystemExit('no sockets')"]
    rungs = {"loopback, gloo": writes(REFUSED), "pacing, gloo": broken, "none, gloo": writes(FINE)}
    tries = ladder(monkeypatch, tmp_path, rungs, lacking=["cluster"])
    record = record_of(tmp_path, LINKED)
    assert tries == [*rungs]
    assert record["status"] == "ok" and record["figures"]["lines"] == FINE["lines"]
    first, second, third = record["figures"]["said"]
    assert (first, second) == ("cluster: it lacks ip", REFUSED["refused"])
    assert third.startswith("pacing, gloo: ") and third.endswith("no sockets")


def test_a_gpus_ranks_fall_back_to_gloo_over_the_same_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {**REFUSED, "refused": "cluster, nccl: a small collective takes 17000 us, for turns on the GPU"}
    rungs = {"cluster, nccl": writes(slow), "cluster, gloo": writes(FINE)}
    tries = ladder(monkeypatch, tmp_path, rungs)
    record = record_of(tmp_path, partial(LINKED, device="cuda"))
    assert tries == [*rungs] and record["figures"]["said"] == [slow["refused"]]


def test_a_run_that_is_ended_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes no other rung: it would find what this one found. Nothing is left beside the log."""
    tries = ladder(monkeypatch, tmp_path, {"cluster, gloo": writes(FINE, "time.sleep(60)")})
    record = record_of(tmp_path, LINKED, limit=3)
    assert tries == ["cluster, gloo"]
    assert record["status"] == "failed" and "was ended at the stage's limit" in record["reason"]
    assert record["figures"] == FINE
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_no_rung_that_holds_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder(monkeypatch, tmp_path, {}, lacking=shaping.LADDER)
    record = record_of(tmp_path, LINKED)
    assert record["status"] == "failed"
    assert record["reason"].splitlines() == [f"{how}: it lacks ip" for how in shaping.LADDER]


@pytest.mark.parametrize("part", ["lines", "race"])
def test_a_way_that_failed_makes_the_stage_fail_with_all_figures(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {**FINE, part: [{"way": "orq", "error": "it broke"}]}
    ladder(monkeypatch, tmp_path, {"cluster, gloo": writes(wrong)})
    record = record_of(tmp_path, LINKED)
    assert record["status"] == "failed" and "it broke" in record["reason"]
    assert record["figures"]["lines"] == wrong["lines"]


def test_a_way_that_fails_leaves_the_others_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Record = {"ways": [{"way": "ddp", "step_ms": 1}, {"way": "orq", "error": "it broke"}]}
    *_, program = writes(found)
    (tmp_path / "laboratory" / "gpu").mkdir(parents=True)
    (tmp_path / "laboratory" / "gpu" / "gpt_steps.py").write_text(program)
    monkeypatch.setattr(work, "BUILD", tmp_path)
    run = partial(work.trained, device="cpu", module="gpt_steps", parts="ways")
    record = record_of(tmp_path, run, PYTHONPATH=str(tmp_path))
    assert record["status"] == "failed" and "it broke" in record["reason"]
    assert record["figures"] == found


HANGING = """
import json, sys, time
from laboratory.gpu import links

real = links.Bench.trainee

def trainee(bench, door, way):
    if way == "blocks" or (way == "topk" and bench.door.rank == 1):  # both ranks, or one, for which the other waits
        time.sleep(600)
    return real(bench, door, way)

links.Bench.trainee, links.BEYOND = trainee, 6
links.WAYS, links.RACE = [("ddp", way) for way in ("stock", "topk", "bf16")], ("blocks", "stock")
links.probe = lambda *arguments: {"claimed": ["1gbit"], "collective_us": 1}
links.shaping.change = lambda *arguments: None
links.main(**json.loads(sys.argv[1]), out=sys.argv[-1])
"""


@pytest.mark.slow
def test_a_way_that_hangs_costs_its_own_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that really hang are ended, and others go on behind it."""
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setattr(work, "BUILD", tmp_path)
    monkeypatch.setattr(shaping, "missing", lambda how: "" if how == "none" else "it is not tried")
    run, launched = ranks.command, list[str]()
    monkeypatch.setattr(ranks, "command", lambda how, count, job: launched.append(how) or run(how, count, ["hanging", job[1]]))
    path = f"{tmp_path}:{stages.environment()['PYTHONPATH']}"
    record = record_of(tmp_path, partial(LINKED, limit=45.0), 300, PYTHONPATH=path)
    lines, race = record["figures"]["lines"], record["figures"]["race"]
    outcomes = [next(name for name in ("error", "left_out", "ms") if name in line) for line in lines]
    assert outcomes == ["ms", "ms", "error", "left_out", "ms", "ms"] and len(launched) == 3
    assert [line["way"] for line in lines] == ["stock", "stock", "topk", "topk", "bf16", "bf16"]
    assert re.fullmatch(r"the ranks ended while it was under way, as they do after \d+ s", lines[2]["error"])
    assert [each["way"] for each in race] == ["blocks", "stock"]
    assert race[0]["error"].endswith("after 7 s") and race[1]["weights_are_equal"]
    assert record["status"] == "failed" and record["reason"].count("the ranks ended while") == 2


def test_what_is_missing_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find", lambda tool: None if tool == "tc" else tool)
    for how in ("cluster", "loopback"):
        assert shaping.missing(how).startswith(
            "the program tc is missing; install the Debian package iproute2, or let gpu_check"
        )
    monkeypatch.setattr(network, "find", lambda tool: tool)
    monkeypatch.setattr(shaping, "_as_root", lambda *new: ["false"])
    assert shaping.missing("loopback").startswith("this user may not make network namespaces; run it as root")
    assert shaping.missing("pacing") == shaping.missing("none") == ""


def test_a_rate_is_read() -> None:
    assert [shaping.bits(rate) for rate in ("25gbit", "1.5mbit", "64kbit", "8bit")] == [25e9, 1.5e6, 64e3, 8]


def test_a_calls_error_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record: Record = {"lines": []}
    stages.attempt(record, "lines", {"way": "a"}, lambda: {"ms": 1}, tmp_path / "out")
    stages.attempt(record, "lines", {"way": "b"}, lambda: {}["ms"], tmp_path / "out")
    assert record["lines"] == [{"way": "a", "ms": 1}, {"way": "b", "error": "KeyError: 'ms'"}]
    assert json.loads((tmp_path / "out").read_text()) == record and capsys.readouterr().out.count("\n") == 2
    stages.attempt(record, "lines", {"way": "c"}, dict, None)
    assert len(record["lines"]) == 3 and not capsys.readouterr().out


def rehearsed(folder: Path, *wanted: str) -> dict[str, Record]:
    """Run stages of a dry run, and return their figures. The package that is installed stands for the built one."""
    stages.BUILD.mkdir(parents=True, exist_ok=True)
    output = Output(folder, "links", None)
    chosen = [group for call in ("prices", "links") for group in work.stages(call, None) if group[0].name in wanted]
    records = stages.run(chosen, 300, output.log, stages.environment(), output.write)
    assert [record["status"] for record in records] == ["ok"] * len(wanted), records
    return {record["name"]: record["figures"] for record in records}


def check_links(found: Record, ranks: int) -> None:
    """Check that a record of the rehearsal has every field."""
    probe, lines = found["probe"], found["lines"]
    links_are = "what this machine has" if probe["how"] == "none" else "emulated"
    assert found["title"] == f"ranks share one CPU; links are {links_are}" and found["settings"]["ranks"] == ranks
    assert {"parameters", "batch_of_a_rank", "autocast", "optimizer"} <= found["settings"].keys()
    assert probe["how"] in shaping.LADDER and probe["backend"] == "gloo" and probe["collective_us"] > 0
    for rate in probe["claimed"]:
        assert abs(1e9 * probe["gbit"][rate] / shaping.bits(rate) - 1) <= 0.1
        assert 1e9 * probe["unshaped_gbit"] >= 1.2 * shaping.bits(rate)
    assert probe["claimed"] or probe["how"] == "none"
    assert [(line["door"], line["way"], line["rate"]) for line in lines] == [
        (*way, rate) for way in links.WAYS for rate in ("none", *probe["claimed"])
    ]
    timed = [line for line in lines if "left_out" not in line]
    assert len(timed) >= len(links.WAYS) and all(line.keys() >= LINE for line in timed), lines
    assert all(line["steps"] >= 2 and line["ms"]["low"] > 0 and len(line["of_ranks"]) == ranks for line in timed)
    sent = {line["way"]: line["interface_bytes"] for line in timed if (line["door"], line["rate"]) == ("ddp", "none")}
    if probe["how"] != "none":  # others use the machine's loopback interface, too
        whole = 2 * (ranks - 1) / ranks * 4 * found["settings"]["parameters"]
        assert whole <= sent["stock"] <= 2 * whole and sent["topk"] < sent["stock"] / 4, sent
        assert sent["bf16:steps=4"] < sent["bf16"] / 2


@pytest.mark.slow
def test_the_rehearsal_of_links_and_prices_has_every_field(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "prices", "links-2")
    check_links(found["links-2"], 2)
    chart = pictures.links(found["links-2"])
    assert found["links-2"]["title"] in chart and chart.count("<rect") == 1 + sum(
        "ms" in one for one in found["links-2"]["lines"]
    )
    races = found["links-2"]["race"]
    assert [each["way"] for each in races] == [*links.RACE]
    for each in races:
        assert each["weights_are_equal"] and len(each["points"]) == links.POINTS + 1
        (start, none, before), (end, steps, after) = each["points"][0], each["points"][-1]
        assert start == none == 0 < steps and end >= 0.5 and after < before
    of_host = found["prices"]
    assert of_host["settings"]["ranks"] == 1
    assert {name for name, us in of_host["us"].items() if us is None} == {*prices.OF_A_GPU}
    assert {"launch", "copy_3_mb", "future", "all_reduce"} == of_host["us"].keys() - {*prices.OF_A_GPU}
    shapes = ("4 x 16 tokens", "16 x 16 tokens")
    assert [(line["way"], line["batch"]) for line in of_host["ways"]] == [(way, one) for one in shapes for way in prices.WAYS]
    assert all(
        line["ms"].keys() == {"to_none", "to_zero"} and line.keys() >= {"gpu_ms", "launches"} for line in of_host["ways"]
    )


@pytest.mark.long
def test_four_ranks_rehearse_links(tmp_path: Path) -> None:
    check_links(rehearsed(tmp_path, "links-4")["links-4"], 4)


@pytest.mark.long
@pytest.mark.parametrize("how", shaping.LADDER)
def test_every_rung_measures_what_it_shapes(how: str, tmp_path: Path) -> None:
    """The links alone: there is no time for a way."""
    if how == "cluster":
        need_cluster()
    if lacking := shaping.missing(how):
        pytest.skip(f"links by {how} were NOT tested: {lacking}")
    fields = {"device": "cpu", "backend": "gloo", "how": how, "limit": 0.0, "of_race": 0.0}
    words = shaping.command(how, 2, ["laboratory.gpu.links", json.dumps(fields)])
    out = tmp_path / "record.json"
    environment = {**os.environ, **stages.environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words, str(out)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["probe"]["how"] == how and all("left_out" in line for line in found["lines"])
    wanted = {"none": {}}.get(how, {rate: shaping.bits(rate) / 1e9 for rate in links.RATES["cpu"]})
    assert found["probe"]["gbit"] == pytest.approx(wanted, rel=0.15), found["probe"]  # on a machine that others use
