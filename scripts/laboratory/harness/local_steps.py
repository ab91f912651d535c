"""A training by local steps with simulated ranks in one process, each with weights of its own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import gradcomp
from laboratory.harness.ways import LocalWay
from laboratory.tasks.task import Job, Settings, Task, clip, optimizer_of, rate_of


def train(job: Job, task: Task, settings: Settings, ranks: int, seed: int, way: LocalWay) -> tuple[list[float], list[int]]:
    """Train, and leave the common weights in the job's model. Return losses, and the bytes that a rank sent, by step."""
    models = [copy.deepcopy(job.model) for _ in range(ranks)]
    # One for all ranks, since it moves each entry by itself.
    optimizer = optimizer_of(task, settings, nn.ModuleList(models), fused=True)
    starts = {name: each.detach().clone() for name, each in job.model.named_parameters()}
    outer = torch.optim.SGD(starts.values(), way.rate, way.momentum, nesterov=way.momentum > 0)
    simulation = gradcomp.Simulation(way.spec, {name: tuple(each.shape) for name, each in starts.items()}, ranks, seed)
    losses: list[float] = []
    sent: list[int] = []
    for step in range(1, settings.steps + 1):
        loss = 0.0
        optimizer.param_groups[0]["lr"] = rate_of(task, settings, step)
        optimizer.zero_grad()
        for model, batches in zip(models, job.batches, strict=True):
            x, y = next(batches)
            of_rank = job.loss(model(x), y)
            loss += float(of_rank.detach()) / ranks
            of_rank.backward()
            clip(tuple(each.grad for each in model.parameters() if each.grad is not None), settings.clip)
        optimizer.step()
        losses.append(round(loss, 6))
        last = step == settings.steps
        sent.append(_synchronize(models, starts, outer, simulation) if last or step % way.every == 0 else 0)
    job.model.load_state_dict(models[0].state_dict())
    return losses, sent


@torch.no_grad()
def _synchronize(
    models: list[nn.Module], starts: dict[str, Tensor], outer: torch.optim.Optimizer, simulation: gradcomp.Simulation
) -> int:
    """Exchange all ranks' progress, and let them go on from the new start. Return the most bytes that a rank sent."""
    progress = [{name: starts[name] - each for name, each in model.named_parameters()} for model in models]
    for name, mean in simulation.step(progress).items():
        starts[name].grad = mean.clone()
    outer.step()
    means = {
        name: torch.stack([dict(model.named_buffers())[name] for model in models]).mean(0)
        for name, each in models[0].named_buffers()
        if each.is_floating_point()
    }
    for model in models:
        model.load_state_dict({**starts, **means}, strict=False)
    return max(simulation.bytes_sent)
