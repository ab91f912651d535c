"""Records by every door: their figures are those of the step, files hold them, and wrong arguments get a sentence."""

from __future__ import annotations

import gc
import itertools
import json
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import doors
import gradients
import pytest
import ranks
import small_net
import torch
from replicas import Replicas

import gradcomp
from gradcomp import telemetry
from gradcomp.engine.health import INTERVAL
from gradcomp.networks.memory import MemoryNetwork
from gradcomp.telemetry.observer import Intervals, Observer

SPARSE = "topk:ratio=0.05"
N, WORLD = 5000, 2
DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "dashboard.py"
Records = list[dict[str, Any]]


def watched(spec: str, *writers: Any, world: int = WORLD, n: int = N, **options: Any) -> tuple[gradcomp.Simulation, Records]:
    found: Records = []
    simulation = gradcomp.Simulation(spec, {"w": (n,)}, world)
    telemetry.watch(simulation, *writers, found.append, **options)
    return simulation, found


def train(simulation: gradcomp.Simulation, steps: int) -> list[tuple[torch.Tensor, int]]:
    """Return the update and rank 0's bytes of each step."""
    done = []
    for step in range(steps):
        grads = [{"w": gradients.draw("heavy", N, 10 * step + rank)} for rank in range(len(simulation._reducers))]
        done.append((simulation.step(grads)["w"], simulation.bytes_sent[0]))
    return done


@pytest.mark.parametrize("spec", ["topk:ratio=0.02", "sdagc", "orq", "dense", "lgc:dense=1,learn=1,ratio=0.02"])
def test_a_record_holds_the_figures_of_its_step(spec: str) -> None:
    simulation, found = watched(spec, every=3)
    update, _ = train(simulation, 6)[-1]
    assert [(record["step"], record["rank"]) for record in found] == [(3, 0), (3, 1), (6, 0), (6, 1)]
    for rank, record in enumerate(found[2:]):
        assert record["spec"] == str(gradcomp.make(spec))
        assert record["compression"] == pytest.approx(4 * N / record["bytes_sent"])
        assert record["density"] == pytest.approx(float(update.count_nonzero()) / N)
        assert record["residual"] == pytest.approx(float(simulation.residual(rank)["w"].double().norm()), rel=1e-6)
        assert record["buckets"][0]["layers"] == ["w"] and record["buckets"][0]["entries"] == N
        assert 0 < record["seconds"]["encoding"] < record["seconds"]["total"]
        json.dumps(record, allow_nan=False)
    if not spec.startswith("lgc"):  # its first steps send more
        assert found[2]["bytes_sent"] == simulation.stats()["bytes_sent"]


def test_bytes_are_means_over_the_steps_of_a_record_and_of_its_own_spec() -> None:
    simulation, found = watched("topk:ratio=0.5,warmup=4", every=4)
    sent = [size for _, size in train(simulation, 4)]
    assert len(set(sent)) > 1 and found[0]["bytes_sent"] == sum(sent) / 4
    train(simulation, 2)
    simulation.change("topk:ratio=0.02")
    sent = [size for _, size in train(simulation, 2)]
    assert found[-WORLD]["spec"] == "topk:ratio=0.02" and found[-WORLD]["bytes_sent"] == sum(sent) / 2


def test_figures_are_of_what_each_optimizer_exchanges() -> None:
    """Of several optimizers, each exchange is a step, and a record tells of every optimizer's layers."""
    shapes = {"a": (100, 100), "b": (50, 100)}

    def make(weights: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([each], 0.1) for each in weights]

    ours = Replicas("topk:ratio=0.01", make, shapes, ranks=1)
    found: Records = []
    session = ours.ranks[0].session
    session.watch(Observer([found.append], Intervals(4, 0), weakref.proxy(session)))
    for step in range(8):
        ours.step([{name: gradients.draw("heavy", math.prod(s), step).view(s) for name, s in shapes.items()}])
        stats = session.reducer.stats()
        assert stats["bytes_dense"] == 4 * 5_000 and stats["compression"] == pytest.approx(20_000 / stats["bytes_sent"])
    assert {tuple(bucket["layers"]) for record in found for bucket in record["buckets"]} == {("a",), ("b",)}
    for record in found:
        assert record["compression"] == pytest.approx(stats["compression"], rel=0.2)


def test_age_is_the_mean_of_the_steps_since_an_entry_was_sent_up_to_a_bound() -> None:
    """A tenth is sent in every step, always the same entries: the others have waited since before the first step."""
    simulation, found = watched("topk:ratio=0.1,momentum=0.5", world=1, n=1000, every=10)
    grad = torch.where(torch.arange(1000) < 100, 1.0, 1e-9)
    for _ in range(40 * 10):
        simulation.step([{"w": grad}])
    ages = [record["buckets"][0]["age"] for record in found]
    assert ages[:2] == pytest.approx([0.9 * 10, 0.9 * 20])
    assert ages == sorted(ages) and ages[-1] == pytest.approx(0.9 * 255)


@pytest.mark.filterwarnings("ignore:.*grows without bound")
def test_warnings_of_health_are_in_the_records() -> None:
    simulation, found = watched("topk:ratio=0.001", world=1, every=50)
    for step in range(10 * INTERVAL):
        simulation.step([{"w": 1.1**step * gradients.draw("normal", N, step)}])
    assert found[0]["warnings"] == [] and "grows without bound" in found[-1]["warnings"][0]


def dashboard(*words: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, DASHBOARD, *words], capture_output=True, text=True)


def test_files_hold_the_records(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = telemetry.JsonLines(tmp_path / "lines"), telemetry.TensorBoard(tmp_path / "runs")
    simulation, found = watched("topk:ratio=0.02", *writers, every=2)
    train(simulation, 6)
    for rank in range(WORLD):
        lines = (tmp_path / "lines" / f"rank-{rank}.jsonl").read_text().splitlines()
        own = [record for record in found if record["rank"] == rank]
        assert [json.loads(line) for line in lines] == own and len(own) == 3
        run = EventAccumulator(str(tmp_path / "runs" / f"rank-{rank}")).Reload()
        for name, values in {
            "compression": [record["compression"] for record in own],
            "seconds/encoding": [record["seconds"]["encoding"] for record in own],
            "bucket w/residual": [record["buckets"][0]["residual"] for record in own],
        }.items():
            events = run.Scalars(f"gradcomp/{name}")
            assert [event.step for event in events] == [2, 4, 6]
            assert [event.value for event in events] == pytest.approx(values, rel=1e-6)
    drawn = dashboard(tmp_path / "lines", tmp_path / "a.png")
    assert drawn.stdout == f"drawn: {tmp_path / 'a.png'}\n" and (tmp_path / "a.png").stat().st_size > 10_000
    empty = dashboard(tmp_path / "none")
    assert empty.returncode == 1 and "holds no rank-*.jsonl" in empty.stderr


def test_a_writer_that_fails_gets_no_more_records() -> None:
    def full(record: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    simulation, found = watched("topk:ratio=0.02", full, world=1, every=1)
    with pytest.warns(UserWarning, match="full.*gets no more records, since it failed: OSError"):
        train(simulation, 1)
    train(simulation, 1)
    assert len(found) == 2


def test_a_step_that_was_given_up_leaves_nothing_behind() -> None:
    found: Records = []
    simulation = gradcomp.Simulation("topk:ratio=0.02", {"a": (N,), "b": (10,)}, 2, bucket_mb=0.001)
    telemetry.watch(simulation, found.append, every=3)
    grads = [{"a": torch.randn(N), "b": torch.randn(10)} for _ in range(2)]
    state = simulation.state_dict()
    for _ in range(2):
        simulation.step(grads)
    start, calls = MemoryNetwork.start, []

    def fails(self: MemoryNetwork, request: Any, name: str) -> Any:
        calls.append(name)
        if len(calls) > 2:
            raise RuntimeError("the network failed")
        return start(self, request, name)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError, match="the network failed"):
        patched.setattr(MemoryNetwork, "start", fails)
        simulation.step(grads)
    simulation.load_state_dict(state)
    for _ in range(2):
        simulation.step(grads)
    assert found == []
    simulation.step(grads)
    assert [record["step"] for record in found] == [3, 3]


def test_a_watched_exchange_ends_with_its_user() -> None:
    w = torch.nn.Parameter(torch.zeros(10))
    door = gradcomp.horovod.Compression("topk", [("w", w)])
    telemetry.watch(door)
    session = weakref.ref(door._session)
    gc.disable()
    try:
        del door
        assert session() is None
    finally:
        gc.enable()


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    """As by a full disk, or by the end of its rank. The training goes on, and so does the dashboard."""
    file = tmp_path / "rank-0.jsonl"
    train(watched("topk", telemetry.JsonLines(tmp_path), world=1, every=2)[0], 6)
    whole = file.read_text().splitlines()
    file.write_text(file.read_text()[:-100])
    train(watched("topk", telemetry.JsonLines(tmp_path), world=1, every=2)[0], 4)
    lines = file.read_text().splitlines()
    assert lines[:3] == [*whole[:2], whole[2][:-99]] and len(lines) == 5
    assert [json.loads(line)["step"] for line in lines[3:]] == [2, 4]
    drawn = dashboard(tmp_path, tmp_path / "a.png")
    assert drawn.returncode == 0, drawn.stderr


def test_a_writer_changes_nothing_for_the_next() -> None:
    def clear(record: dict[str, Any]) -> None:
        record["buckets"][0].clear()
        record.clear()

    simulation, found = watched("topk", clear, world=1, every=1)
    train(simulation, 2)
    assert [record["step"] for record in found] == [1, 2] and found[1]["buckets"][0]["layers"] == ["w"]


def test_a_record_without_a_whole_step_has_no_seconds() -> None:
    """Seconds are from one step's end to the next one's: the first step of a training, or after a change, has none."""
    simulation, found = watched("topk", world=1, every=1)
    train(simulation, 2)
    simulation.change("topk:ratio=0.5")
    train(simulation, 2)
    assert [record["seconds"] is None for record in found] == [True, False, True, False]
    assert all(record["seconds"]["total"] > 0 for record in found if record["seconds"])


@pytest.mark.parametrize(
    "options,said",
    [
        ({"every": 0}, "every=0 must be a whole number of steps, at least 1"),
        ({"check": 2.5}, r"check=2\.5 must be a whole number of steps, or 0"),
        ({"every": True}, "every=True must be a whole number"),
    ],
)
def test_wrong_intervals_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        telemetry.watch(gradcomp.Simulation("topk", {"w": (4,)}, 1), **options)


def test_wrong_things_are_refused() -> None:
    simulation = gradcomp.Simulation("topk", {"w": (4,)}, 1)
    with pytest.raises(TypeError, match="'logs' is not a writer; use JsonLines"):
        telemetry.watch(simulation, "logs")  # type: ignore[arg-type]
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(
        TypeError, match=r"watch\(\) got a SGD, which exchanges nothing by gradcomp; pass the object whose stats"
    ):
        telemetry.watch(plain)


def watched_by(door: str) -> Any:
    doors.join(door)
    found: Records = []
    run = doors.Training(door, spec=SPARSE, momentum=0.9, bucket_mb=0.02)
    telemetry.watch(run.handle if door == doors.DDP else run.optimizer, found.append, every=2, check=2)
    run.train(8)
    return found, run.handle.stats()["bytes_sent"], run.handle.residual()


@pytest.mark.slow
@pytest.mark.parametrize("door", doors.EVERY)
def test_every_door_is_watched(door: str) -> None:
    found = ranks.launch(watched_by, 2, door)
    for rank, (records, sent, residual) in enumerate(found):
        assert [record["step"] for record in records] == [2, 4, 6, 8]
        assert {record["rank"] for record in records} == {rank}
        assert all(record["bytes_sent"] == sent for record in records)
        norm = math.sqrt(sum(float(own.double().square().sum()) for own in residual.values()))
        assert records[-1]["residual"] == pytest.approx(norm, rel=1e-6)
        for record in records:
            seconds = record["seconds"]
            assert 0 <= seconds["backward_encoding"] <= seconds["encoding"] < seconds["total"]
            assert 0 < seconds["waiting"] <= seconds["wire"] < seconds["total"]
            assert seconds["backward"] + seconds["exposed"] < seconds["total"]


def unlike() -> Any:
    ranks.join()
    run = doors.Training(doors.DDP, spec=SPARSE, bucket_mb=0.02)
    rank = torch.distributed.get_rank()
    refused = small_net.refused(lambda: telemetry.watch(run.handle, check=5 + rank))
    telemetry.watch(run.handle, check=5)
    return refused, run.train(6)


@pytest.mark.slow
def test_ranks_that_watch_unlike_each_other_are_refused() -> None:
    (first, weights), (second, others) = ranks.launch(unlike, 2)
    assert first == second and "telemetry: rank 0 has" in first and "a check of the replicas every 5" in first
    assert torch.equal(weights, others)


def profiled() -> Any:
    ranks.join()
    run = doors.Training(doors.DDP, spec=SPARSE, bucket_mb=0.02)
    run.train(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.train(1)
    run.train(1)
    found = [
        (each.name, each.time_range.start, each.time_range.end, each.cpu_parent and each.cpu_parent.name)
        for each in profile.events()
        if each.name.startswith("gradcomp::")
    ]
    return found, run.handle.stats()["buckets"]


@pytest.mark.slow
def test_a_profilers_trace_names_the_parts_of_every_bucket() -> None:
    """Of the step that was profiled, once each, in order. The delivery is within the range that adds the reply up."""
    for found, buckets in ranks.launch(profiled, 2):
        assert len(found) == 5 * buckets > 5
        ranges = {name: tuple(rest) for name, *rest in found}
        for bucket in range(buckets):
            parts = [ranges[f"gradcomp::{part} (bucket {bucket})"] for part in ("accumulate", "select", "exchange", "add")]
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(parts))
            start, end, parent = ranges[f"gradcomp::deliver (bucket {bucket})"]
            assert parent == f"gradcomp::add (bucket {bucket})" and parts[-1][0] <= start < end <= parts[-1][1]
            assert parts[0][2] is not None and "gradcomp" not in parts[0][2]  # a function of the backward pass
