"""A worker of an elastic training with known gradients, started by horovodrun: python -m elastic_worker FOLDER.

It trains one model for each case, a spec with a door, and all optimizers in one TorchState. The gradients are known, the
learning rate is 1, so weights tell the sum of updates. At every commit it writes its gradients and what waits in the residual.
A file in the folder ends the training, or this worker.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import choices
import doors
import horovod.torch as hvd
import torch
from torch import Tensor, nn

# Steps between commits.
EVERY = 5
MOMENTUM = 0.5
SPECS = [
    "topk:ratio=0.05",
    f"sign:momentum={MOMENTUM}",
    "topk:ratio=0.02,warmup=40,route=split",
    "sdagc:lam=1.5,small=pool",
    "sdagc:density=0.05,small=none",
    "gtopk:ratio=0.05",
    "lgc:dense=2,learn=4,ratio=0.02",
    "orq:sigmas=1.5,feedback=true",
    "topk:ratio=0.05,by_host=true",
]
# The optimizer's own momentum, which the exchange takes over. sign sends every entry, so that no momentum is masked.
OWN_MOMENTUM = "sign"
SPECS.append(OWN_MOMENTUM)
# It goes on with topk after each meeting, some steps later, and ranks that join begin with dense.
SPECS.append("auto:loss=high")
CASES = [(door, spec) for spec in SPECS for door in doors.DOORS]


class Two(nn.Module):
    """Two layers that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(shape)) for shape in ((40, 30), (30,), (30, 40)))


def gradients(worker: int, step: int, case: int, model: nn.Module) -> list[Tensor]:
    """Draw a worker's gradients in a step."""
    generator = torch.Generator().manual_seed(worker * 1_000_003 + step * 101 + case)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def flat(parts: Any) -> Tensor:
    return torch.cat([part.detach().double().flatten() for part in parts])


def main(folder: Path) -> None:
    hvd.init()
    host, worker = os.environ["HOROVOD_HOSTNAME"], os.getpid()
    models = nn.ModuleList(Two() for _ in CASES)
    optimizers: dict[str, Any] = {}
    for i, (door, spec) in enumerate(CASES):
        taken_over = spec == OWN_MOMENTUM
        settings = {"lr": 1.0, "momentum": MOMENTUM if taken_over else 0.0, "given": not taken_over}
        optimizers[f"optimizer{i}"] = doors.sgd(door, models[i], spec, prefix=f"{i}.", **settings)
    plain = torch.optim.SGD(Two().parameters(), 0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=models, plain=plain, step=0, **optimizers)
    handlers = {name: type(handler).__name__ for name, handler in state._handlers.items()}
    given: dict[int, list[Tensor]] = {}

    def write() -> None:
        found = {
            "host": host,
            "rank": hvd.rank(),
            "size": hvd.size(),
            "step": state.step,
            "given": [sum(each[i] for step, each in given.items() if step < state.step) for i in range(len(CASES))],
            "waits": [],
            "velocity": [],
            "weights": [flat(model.parameters()) for model in models],
            "handlers": handlers,
            "steps": [optimizer.compression.stats()["steps"] for optimizer in optimizers.values()],
        }
        for optimizer in optimizers.values():
            (share,) = optimizer.compression.state_dict()["of_rank"].values()
            found["waits"].append(flat(optimizer.compression.residual().values()))
            velocity = share["layers"].get("sgd", {}).get("velocity")
            found["velocity"].append(flat(velocity[name] for name in optimizer.compression.residual()) if velocity else 0.0)
        new = folder / f"{worker}.new"
        new.write_bytes(pickle.dumps(found))
        new.replace(folder / f"{worker}.pickle")

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            of_step = []
            for i, (model, optimizer) in enumerate(zip(models, optimizers.values(), strict=True)):
                drawn = gradients(worker, state.step, i, model)
                optimizer.zero_grad()
                sum((p * g).sum() for p, g in zip(model.parameters(), drawn, strict=True)).backward()  # type: ignore[union-attr]
                if i == 3 and state.step % EVERY == 2 and (folder / f"die {host}").exists():
                    os.kill(worker, signal.SIGKILL)
                optimizer.step()
                of_step.append(flat(drawn) / hvd.size())
            given[state.step] = of_step
            state.step += 1
            if state.step % EVERY == 0:
                write()
                state.commit()
                if hvd.broadcast_object((folder / "stop").exists(), 0, name=f"stop {state.step}"):
                    return
                time.sleep(0.05)

    train(state)
    (folder / f"{worker}.done").touch()


if __name__ == "__main__":
    with choices.chosen("topk"):
        main(Path(sys.argv[1]))
