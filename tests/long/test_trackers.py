"""The writers of examples/trackers.py with the real packages, offline: each tracker has the numbers of the records."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import gradcomp
from gradcomp import telemetry

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]  # the packages' own warnings
WRITERS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "trackers.py"), run_name="example")


def watched(writer: str) -> list[dict[str, Any]]:
    """Write records of one rank, and return them."""
    found: list[dict[str, Any]] = []
    simulation = gradcomp.Simulation("topk:ratio=0.01", {"layer.weight": (100, 10)}, world=1)
    telemetry.watch(simulation, WRITERS[writer](), found.append, every=2)
    for _ in range(4):
        simulation.step([{"layer.weight": torch.randn(100, 10)}])
    return found


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow was NOT tested: it is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    records = watched("mlflow")
    run = mlflow.active_run().info.run_id
    mlflow.end_run()
    for name in telemetry.numbers(records[-1]):
        history = mlflow.MlflowClient().get_metric_history(run, name)
        expected = [
            (record["step"], telemetry.numbers(record)[name]) for record in records if name in telemetry.numbers(record)
        ]
        assert [(each.step, each.value) for each in history] == expected


def test_opentelemetry() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="OpenTelemetry was NOT tested: it is not installed")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(sdk.MeterProvider([reader]))
    last = watched("opentelemetry")[-1]
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {each.name: [(dict(point.attributes), point.value) for point in each.data.data_points] for each in scope.metrics}
    for name, number in telemetry.numbers(last).items():
        assert found[name.replace(" ", "_")] == [({"rank": 0}, number)]


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases was NOT tested: it is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    last = watched("wandb")[-1]
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert {name: summary[name] for name in telemetry.numbers(last)} == telemetry.numbers(last)
    assert summary["gradcomp/step"] == last["step"]
