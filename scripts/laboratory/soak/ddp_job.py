"""A rank of a soak over DDP, which torchrun starts again with as many ranks or others: python -m laboratory.soak.ddp_job ..."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from laboratory.soak.plan import BUCKET_MB, Plan
from laboratory.soak.rank import KEPT, Rank, options

# The folder of a state, without its step.
STATE = "state-"


def main() -> None:
    """Train from the newest state on, until the driver asks for the end."""
    chosen = options()
    dist.init_process_group("gloo")
    try:
        train(Rank(chosen.folder, Plan(chosen.seed, chosen.steps)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(rank: Rank) -> None:
    """Train as one of the ranks of this launch."""
    plan, scaler, optimizer = rank.plan, rank.scaler, rank.optimizer
    number, ranks = dist.get_rank(), dist.get_world_size()
    states = newest(rank.folder)
    step, spec = (states[0]["step"], states[0]["gradcomp"]["spec"]) if states else (0, plan.spec(0))
    model = DistributedDataParallel(rank.model, bucket_cap_mb=BUCKET_MB)
    handle = gradcomp.ddp.attach(model, spec, optimizer=optimizer, scaler=scaler, bucket_mb=BUCKET_MB, seed=plan.seed)
    history: list[list[int]] = []
    if states:
        model.load_state_dict(states[0]["model"])
        optimizer.load_state_dict(states[0]["optimizer"])
        scaler.load_state_dict(states[0]["scaler"])
        handle.load_state_dict([state["gradcomp"] for state in states])
        history, spec = states[0]["history"], states[0]["spec"]
    history = [*history, [step, ranks]]
    rank.go_on(step, ranks)
    if states and number == 0:  # the sum of all, whatever their number
        rank.given = torch.stack([state["given"] for state in states]).sum(0)
    ends = False
    while not ends:
        if (wanted := plan.spec(step)) != spec:
            handle.change(wanted)
            spec = wanted
        drawn = plan.gradient(step, number, ranks)
        rank.begin_step()
        optimizer.zero_grad()
        scaler.scale(model(drawn)).backward()
        scaler.step(optimizer)
        scaler.update()
        rank.end_step(drawn, ranks)
        step += 1
        if step % plan.commits == 0:
            answer = torch.tensor([rank.is_to_stop()])
            dist.broadcast(answer, 0)
            ends = bool(answer)
            record = rank.keep(step, number, ranks, handle.residual(), history=history, final=ends)
            rank.log(record, spec)
            state: dict[str, Any] = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            }
            state |= {"step": step, "spec": spec, "history": history, "given": record["given"]}
            save(rank.folder, step, number, {**state, "gradcomp": handle.state_dict()})


def save(folder: Path, step: int, rank: int, state: dict[str, Any]) -> None:
    """Save a rank's state. Rank 0 removes those that all ranks have left behind."""
    place = folder / f"{STATE}{step:08}"
    place.mkdir(exist_ok=True)
    torch.save(state, place / f"{rank}.new")
    (place / f"{rank}.new").rename(place / f"{rank}.pt")
    if rank == 0:
        for old in sorted(folder.glob(f"{STATE}*"))[:-KEPT]:
            shutil.rmtree(old)


def newest(folder: Path) -> list[Any]:
    """Load the newest state that all ranks have saved; an empty list if there is none."""
    for place in sorted(folder.glob(f"{STATE}*"), reverse=True):
        states = [torch.load(file, weights_only=True) for file in place.glob("*.pt")]
        if states and len(states) == states[0]["gradcomp"]["ranks"]:
            return states
    return []


if __name__ == "__main__":
    main()
