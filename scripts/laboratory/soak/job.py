"""A rank of a soak, under torchrun or in Horovod's elastic mode: python -m laboratory.soak.job NETWORK FOLDER SEED STEPS"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradcomp
from laboratory.soak.plan import BUCKET_MB, Net, Plan, flat

# The file in the folder that ends the training.
STOP = "stop"
# Records of a process that others may still go back to.
KEPT = 2


class Rank:
    """This process's part in a soak, whatever network it uses. folder: of logs and records."""

    def __init__(self, folder: Path, plan: Plan):
        self.folder, self.plan, self.model = folder, plan, Net()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=plan.growth)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1.0)
        self._recorded: set[int] = set()
        self._log = (folder / f"log-{os.getpid()}.jsonl").open("a", buffering=1)

    def go_on(self, step: int, ranks: int) -> None:
        """Go on after a step with so many ranks: at the start, or after others have left or joined."""
        self._say({"begins": step, "ranks": ranks, "host": os.environ.get("HOROVOD_HOSTNAME")})

    def train(
        self, step: int, spec: str, place: tuple[int, int], take_step: Callable[[Tensor], None], change: Callable[[str], object]
    ) -> Iterator[tuple[int, str]]:
        """Train without end. Log the steps since the last commit, and yield the step and the spec, at every commit.

        place: the rank, and the number of ranks. take_step, change: what the network does in a step, and for a new spec.
        """
        number, ranks = place
        times: list[float] = []
        while True:
            if (wanted := self.plan.spec(step)) != spec:
                change(wanted)
                spec = wanted
            drawn = self.plan.gradient(step, number, ranks)
            began = time.process_time()
            take_step(drawn)
            self.scaler.update()
            times.append(1000 * (time.process_time() - began))
            step += 1
            if step % self.plan.commits == 0:
                figures = {"step": step, "rank": number, "ranks": ranks, "spec": spec, "cpu_ms": statistics.median(times)}
                self._say({**figures, **resources()})
                times.clear()
                yield step, spec

    def keep(self, step: int, rank: int, ranks: int, residual: dict[str, Tensor], **more: Any) -> None:
        """Write what the judge, and a training that goes on after this step, need of this rank."""
        record: dict[str, Any] = {"step": step, "rank": rank, "ranks": ranks, "pid": os.getpid()}
        record |= {"residual": flat(list(residual.values())), "weights": flat(list(self.model.parameters())), **more}
        path = self._record(step)
        torch.save(record, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        self._recorded.add(step)
        for old in sorted(self._recorded)[:-KEPT]:
            self._record(old).unlink()
            self._recorded.remove(old)

    def _record(self, step: int) -> Path:
        return self.folder / f"record-{os.getpid()}-{step:08}.pt"

    def is_to_stop(self) -> bool:
        """Tell whether the driver has asked for the end. For rank 0 alone: others may see the file a step later."""
        return (self.folder / STOP).exists()

    def _say(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps({"time": time.monotonic(), "pid": os.getpid(), **line}) + "\n")


def resources() -> dict[str, int]:
    """Return this process's memory in kB, its open files and its threads."""
    status = Path("/proc/self/status").read_text()
    memory, threads = (int(re.findall(rf"^{field}:\s*(\d+)", status, re.MULTILINE)[0]) for field in ("VmRSS", "Threads"))
    return {"rss_kb": memory, "threads": threads, "fds": len([*Path("/proc/self/fd").iterdir()]) - 1}  # without the listing's


def horovod(rank: Rank) -> None:
    """Train under Horovod's elastic mode, with the stock optimizer, until the driver asks for the end."""
    import horovod.torch as hvd

    hvd.init()
    # A rank that joins must be made with the spec of the others, which tell it after their reset.
    spec = hvd.broadcast_object(rank.plan.spec(0), 0, name="spec")
    named = list(rank.model.named_parameters())
    scaler = rank.scaler
    compression = gradcomp.horovod.Compression(spec, named, bucket_mb=BUCKET_MB, seed=rank.plan.seed)
    optimizer = hvd.DistributedOptimizer(rank.optimizer, named, compression=compression)
    state = hvd.elastic.TorchState(
        model=rank.model, optimizer=optimizer, step=0, spec=spec, scaling=scaler.state_dict(), history=[]
    )
    state.register_reset_callbacks([lambda: hvd.broadcast_object(state.spec, 0, name="spec")])

    def take_step(drawn: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(rank.model(drawn)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)

    def train(state: Any) -> None:
        """Train with the present ranks, until one leaves or joins."""
        scaler.load_state_dict(state.scaling)
        number, ranks = hvd.rank(), hvd.size()
        state.history = [*state.history, [state.step, ranks]]
        rank.go_on(state.step, ranks)
        commits = rank.train(state.step, state.spec, (number, ranks), take_step, compression.change)
        for state.step, state.spec in commits:
            ends = hvd.broadcast_object(rank.is_to_stop(), 0, name="ends")
            rank.keep(state.step, number, ranks, compression.residual(), history=state.history, final=ends)
            state.scaling = scaler.state_dict()
            if ends:
                return
            state.commit()

    hvd.elastic.run(train)(state)
    hvd.shutdown()


def ddp(rank: Rank) -> None:
    """Train under DDP, from the newest state on, until the driver asks for the end."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    scaler, optimizer = rank.scaler, rank.optimizer
    number, ranks = dist.get_rank(), dist.get_world_size()
    records = newest(rank.folder)
    first: dict[str, Any] = records[0] if records else {"step": 0, "spec": rank.plan.spec(0), "history": []}
    history = [*first["history"], [first["step"], ranks]]
    model = DistributedDataParallel(rank.model, bucket_cap_mb=BUCKET_MB)
    handle = gradcomp.ddp.attach(model, first["spec"], bucket_mb=BUCKET_MB, seed=rank.plan.seed)
    rank.go_on(first["step"], ranks)
    if records:
        torch.nn.utils.vector_to_parameters(first["weights"], model.parameters())
        optimizer.load_state_dict(first["optimizer"])
        scaler.load_state_dict(first["scaler"])
        handle.load_state_dict([record["gradcomp"] for record in records])

    def take_step(drawn: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(drawn)).backward()
        scaler.step(optimizer)

    for step, spec in rank.train(first["step"], first["spec"], (number, ranks), take_step, handle.change):
        answer = torch.tensor([rank.is_to_stop()])
        dist.broadcast(answer, 0)
        states = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "gradcomp": handle.state_dict()}
        rank.keep(step, number, ranks, handle.residual(), history=history, final=bool(answer), spec=spec, **states)
        if answer:
            break
    dist.barrier()
    dist.destroy_process_group()


def newest(folder: Path) -> list[Any]:
    """Load the records of the newest step that all ranks have recorded; an empty list if there is none."""
    found: dict[tuple[int, int], dict[int, Any]] = {}
    for path in sorted(folder.glob("record-*.pt"), key=lambda path: path.stat().st_mtime):
        record = torch.load(path, weights_only=True)
        found.setdefault((record["step"], record["ranks"]), {})[record["rank"]] = record
    whole = [key for key, records in found.items() if len(records) == key[1]]
    return [*found[max(whole)].values()] if whole else []


if __name__ == "__main__":
    network, folder, seed, steps = sys.argv[1:]
    {"horovod": horovod, "ddp": ddp}[network](Rank(Path(folder), Plan(int(seed), int(steps))))
