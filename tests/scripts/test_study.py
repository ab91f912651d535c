"""The study: real runs, tiny, through the command line; its arithmetic against figures worked out by hand; its refusals."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="the study was NOT tested: scikit-learn is not installed")


from laboratory import timing
from laboratory.commands import study
from laboratory.harness import settings
from laboratory.main import main

WIDTHS = {"mlp": 8, "conv": 2}
SPEC = "topk:ratio=0.5,momentum=0.9"


def command(folder: Path, tasks: str, jobs: int = 1) -> list[str]:
    small = ",".join(["steps=3,batch=2", *(f"{task}.width={WIDTHS[task]}" for task in tasks.split(","))])
    chosen = ["--tasks", tasks, "--seeds", "2", "--ranks", "2", "--specs", f"dense;{SPEC}", "--set", small, "--jobs", str(jobs)]
    return ["study", *chosen, "--cache", str(folder / "cache"), "--out", str(folder / "out")]


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small study of two tasks in one process. The tests read its folder and continue it."""
    folder = tmp_path_factory.mktemp("study")
    assert main(command(folder, "mlp,conv")) == 0
    return folder


def result_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "study-compare.json").read_text())
    return found


def without_times(task: dict[str, Any]) -> list[dict[str, Any]]:
    return [line | {"seconds": 0} for line in task["lines"]]


def test_a_study_has_a_line_for_every_way_of_every_task(studied: Path) -> None:
    result = result_in(studied)
    assert str(studied) not in json.dumps(result)
    assert result["command"].startswith("scripts/lab study") and result["command"].endswith("--jobs 1")
    assert {"date", "commit", "commits_of_runs", "machine", "versions"} <= result.keys()
    for task in WIDTHS:
        dense, topk = result["tasks"][task]["lines"]
        assert (dense["spec"], topk["spec"]) == ("dense", SPEC)
        assert dense["compression"] == 1
        assert 6.5 < topk["compression"] < 7.2  # half of the entries, 9 bits each


@pytest.mark.slow
def test_gradients_of_two_batches_are_added_up_and_sent_in_half_the_bits(tmp_path: Path) -> None:
    """Five batches make two steps of bf16, beside five of dense: as many batches, a quarter of the bytes."""
    chosen = command(tmp_path, "mlp")
    chosen[chosen.index(f"dense;{SPEC}")] = "bf16:steps=2"
    chosen[chosen.index("steps=3,batch=2,mlp.width=8")] = "steps=5,batch=2,mlp.width=8"
    chosen[chosen.index("--seeds") + 1] = "1"
    assert main(chosen) == 0
    dense, added_up = result_in(tmp_path)["tasks"]["mlp"]["lines"]
    assert (len(dense["losses"]), len(added_up["losses"])) == (5, 2)
    assert dense["compression"] == 1 and added_up["compression"] == 4
    assert dense["bytes_sent"] == 5 * added_up["bytes_sent"]  # five messages of 4 bytes an entry, two of 2


def test_local_steps_send_once_in_so_many_steps(tmp_path: Path) -> None:
    """Six steps with a synchronization after each second one, and after each fourth and at the end."""
    chosen = command(tmp_path, "mlp")
    chosen[chosen.index(f"dense;{SPEC}")] = "local:2/0.9/0.5/dense;local:4/1/0/dense;local:1/1/0/dense"
    chosen[chosen.index("steps=3,batch=2,mlp.width=8")] = "steps=6,batch=2,mlp.width=8,momentum=0"
    assert main(chosen) == 0
    dense, second, fourth, each = result_in(tmp_path)["tasks"]["mlp"]["lines"]
    assert [line["compression"] for line in (dense, second, fourth, each)] == [1, 2, 3, 1]
    assert each["scores"] == dense["scores"]  # averaging after every step of SGD is averaging gradients


def test_dense_as_a_whole_has_the_batches_of_all_ranks_and_any_number_of_them_share_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without clipping a mean of gradients is the gradient of all batches."""
    chosen = command(tmp_path, "mlp")
    assert main(chosen) == 0
    each = result_in(tmp_path)["tasks"]["mlp"]["lines"][0]
    assert main([*chosen, "--whole"]) == 0
    whole = result_in(tmp_path)["tasks"]["mlp"]["lines"][0]
    assert whole["losses"] == pytest.approx(each["losses"], rel=1e-4) and whole["compression"] == 1
    chosen[chosen.index("--ranks") + 1] = "1"
    chosen[chosen.index("steps=3,batch=2,mlp.width=8")] = "steps=3,batch=4,mlp.width=8"
    chosen[chosen.index(f"dense;{SPEC}")] = "dense"
    capsys.readouterr()
    assert main([*chosen, "--whole"]) == 0
    assert "2 measurements, 2 of them finished" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["local:0/1/0/dense", "local:30/dense", "local:30/1/1/dense", "local:30/1/0/tokp"])
def test_a_wrong_way_of_local_steps_is_refused(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = command(tmp_path, "mlp")
    chosen[chosen.index(f"dense;{SPEC}")] = way
    with pytest.raises(SystemExit):
        main(chosen)
    assert way.rpartition("/")[2] in capsys.readouterr().err


def test_a_study_continues_where_it_stopped(studied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, result = shutil.copytree(studied, tmp_path / "copy"), result_in(studied)
    made = {path: path.stat().st_mtime_ns for path in (folder / "cache").glob("*.json")}
    assert len(made) == 8
    lost = next(path for path in made if path.name.startswith("conv-dense"))
    before = json.loads(lost.read_text())
    lost.unlink()
    assert main(command(folder, "conv")) == 0
    said = capsys.readouterr().out
    assert "4 measurements, 3 of them finished" in said and "4 of 4" in said and "\nconv: " in said
    again = json.loads(lost.read_text())
    assert [again[name] for name in ("key", "losses", "sent")] == [
        before[name] for name in ("key", "losses", "sent")
    ]  # the same seed, the same training
    assert {"command", "date", "commit", "machine", "versions"} <= again.keys()
    assert all(path.stat().st_mtime_ns == at for path, at in made.items() if path != lost)

    (folder / "out" / "study-compare.json").unlink()
    assert main([*command(folder, "conv"), "--report"]) == 0
    assert without_times(result_in(folder)["tasks"]["conv"]) == without_times(result["tasks"]["conv"])


def record(score: float, losses: list[float], sent: int) -> dict[str, Any]:
    return {"scores": [[1, 1.0, score]], "losses": losses, "sent": [sent] * len(losses), "parameters": 100, "seconds": 1.0}


def test_the_figures_are_those_worked_out_by_hand() -> None:
    falling = [100.0 - step for step in range(1, 101)]  # step 80 is down at 20, and 24.5 where smoothed
    later = [max(losses, 0.0) for losses in (110.0 - step for step in range(1, 101))]
    records = {
        "dense": {seed: record(98.0 + seed, falling, 400) for seed in range(3)},
        "a": {seed: record(score, later, 8) for seed, score in enumerate((97.0, 97.0, 97.0))},
        "b": {seed: record(98.0 + seed, [50.0] * 100, 8) for seed in (0, 1)},
        "c": {seed: record(98.0, [math.nan] * 100, 8) for seed in (0, 1)},
        "unfinished": {0: record(98.0, falling, 8)},
    }
    dense, a, b, c = study.summarize("mlp", records)
    assert (dense["score"], dense["worse_at_most"], dense["times_the_steps"]) == (99, 0, 1)
    assert (a["worse_than_dense"], a["compression"], a["bytes_sent"]) == (2, 50, 800)
    assert a["worse_at_most"] == pytest.approx(2 + 2.919986 / math.sqrt(3), abs=1e-5)  # worse by 1, 2, 3; t of 2 degrees
    assert (a["steps_to_loss"], a["times_the_steps"]) == (90, 90 / 80)
    assert (b["seeds"], b["worse_at_most"], b["steps_to_loss"]) == ([0, 1], 0, None)
    assert c["steps_to_loss"] is None and c["losses"] == [None] * 10
    assert dense["losses"] == [94.5 - 10 * part for part in range(10)]
    table = study.markdown("accuracy", [dense, a, b]).splitlines()
    assert table[-2].split("|")[1:-1] == [" `a` ", " 97.00 ", " +2.000 ", " +3.686 ", " 50.0 x ", " 1.12 x ", " 1.12 x "]
    assert table[-1].endswith("| never | never |")


def test_one_seed_has_no_bounds() -> None:
    records = {spec: {0: record(score, [3.0, 2.0, 1.0], 4)} for spec, score in (("dense", 98.0), ("a", 97.0))}
    assert not study.summarize("mlp", records)
    line = study.summarize("mlp", records, least=1)[1]
    assert (line["score"], line["worse_than_dense"], line["times_the_steps"]) == (97, 1, 1)
    assert [line[name] for name in ("score_error", "worse_at_most", "times_at_most")] == [None] * 3
    assert line["losses"] == [3, 2, 1]
    assert study.markdown("accuracy", [line]).splitlines()[-1] == "| `a` | 97.00 | +1.000 |  | 100.0 x | 1.00 x |  |"


def test_the_bound_of_the_steps_comes_from_leaving_seeds_out() -> None:
    def slower(steps: float) -> dict[str, Any]:
        return record(98.0, [100.0 + steps - step for step in range(1, 101)], 8)

    dense = {seed: slower(0) for seed in range(3)}
    one = study.summarize("mlp", {"dense": dense, "a": {seed: slower(steps) for seed, steps in enumerate((2, 4, 9))}})[1]
    assert one["steps_to_loss"] == 85  # later by the mean, 5
    pseudo = [3 * 85 - 2 * each for each in (80 + 7, 80 + 6, 80 + 3)]  # later by 6.5, 5.5, 3: whole steps
    assert one["times_at_most"] == pytest.approx(timing.upper_bound(pseudo) / 80, abs=1e-6)
    late = study.summarize("mlp", {"dense": dense, "a": {seed: slower(steps) for seed, steps in enumerate((2, 4, 38))}})[1]
    assert late["steps_to_loss"] == 95 and late["times_at_most"] is None  # without the first it never gets there


def test_the_error_column_of_older_records_is_shown() -> None:
    records = {spec: {seed: record(98.0, [1.0], 4) for seed in (0, 1)} for spec in ("dense", "a")}
    lines = study.summarize("mlp", records)
    assert "squared error" not in study.markdown("accuracy", lines)
    head, _, dense, a = study.markdown("accuracy", [lines[0], lines[1] | {"squared_error": 0.75}]).splitlines()
    assert head.endswith("| relative squared error |") and dense.endswith("|  |") and a.endswith("| 0.750 |")


def test_a_higher_perplexity_is_worse() -> None:
    records = {spec: {seed: record(score, [1.0], 4) for seed in (0, 1)} for spec, score in (("dense", 4.0), ("a", 5.0))}
    assert study.summarize("shakespeare", records)[1]["worse_than_dense"] == 1


@pytest.mark.parametrize(("freedom", "value"), [(1, 6.313752), (2, 2.919986), (4, 2.131847), (9, 1.833113), (30, 1.697261)])
def test_a_bound_is_one_sided_by_students_t(freedom: int, value: float) -> None:
    differences = [float(i % 2) for i in range(freedom + 1)]
    error = timing.standard_error(differences)
    assert timing.upper_bound(differences) == pytest.approx(sum(differences) / len(differences) + value * error, abs=1e-6)


def test_settings_of_one_task_stand_above_those_of_all() -> None:
    settled = settings.settle(["mlp", "conv"], [settings.changes("mlp.lr=0.3"), settings.changes("lr=0.2,steps=7")])
    assert (settled["mlp"].lr, settled["conv"].lr, settled["mlp"].steps) == (0.3, 0.2, 7)
