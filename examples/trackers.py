"""Figures of a training in Weights & Biases, MLflow or OpenTelemetry: a writer of telemetry is a function of a record."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import gradcomp
from gradcomp.telemetry import numbers, watch

Writer = Callable[[dict[str, Any]], object]


def wandb() -> Writer:
    """Log to a run of Weights & Biases. WANDB_MODE=offline keeps it in a folder."""
    import wandb

    run = wandb.init(project="gradcomp")
    return lambda record: run.log({**numbers(record), "gradcomp/step": record["step"]})


def mlflow() -> Writer:
    """Log to MLflow's active run, or a new one."""
    import mlflow

    return lambda record: mlflow.log_metrics(numbers(record), step=record["step"])


def opentelemetry() -> Writer:
    """Set gauges of OpenTelemetry's meter, which the program's exporter sends."""
    from opentelemetry import metrics

    meter, gauges = metrics.get_meter("gradcomp"), dict[str, Any]()

    def write(record: dict[str, Any]) -> None:
        for name, number in numbers(record).items():
            gauges.setdefault(name, None) or gauges.update({name: meter.create_gauge(name.replace(" ", "_"))})
            gauges[name].set(number, {"rank": record["rank"]})

    return write


if __name__ == "__main__":
    simulation = gradcomp.Simulation("topk:ratio=0.01", {"weight": (100, 100)}, world_size=2)
    watch(simulation, *(globals()[name]() for name in sys.argv[1:]), every=5)
    for _ in range(20):
        simulation.step([{"weight": torch.randn(100, 100)} for _ in range(2)])
    print(f"{simulation.stats()['steps']} steps were watched by {', '.join(sys.argv[1:]) or 'nobody'}")
