"""A rank of gpu_check's links: a GPT's steps by each way over links, and a race.

Ranks share one GPU and its host; links are emulated. A probe first decides which rates may be claimed. The record is written
anew after each way and rate. A way that fails leaves its error in its place. One that hangs ends the ranks: new ones, which
find the record, go on behind it.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcomp.networks.torch import all_gather
from laboratory import report
from laboratory.gpu import shaping
from laboratory.gpu.gpt_steps import SHAPES, Gpt, Shape, kernels, seconds
from laboratory.gpu.job import NCCL
from laboratory.gpu.stages import Record, attempt
from laboratory.harness import by_ddp, by_fsdp
from laboratory.harness.rank import Trainee, digest_of, is_equal, turn_of
from laboratory.tasks import texts
from laboratory.timing import Spread, median_bounds

# By door, the most telling first. DDP comes twice: what changes between its turns is noise. In the race PowerSGD starts after
# some tenth of the steps, as torch advises.
WAYS = [
    *(("ddp", way) for way in ("stock", "bf16", "topk", "blocks")),
    *(("fsdp", way) for way in ("stock", "mixed-bf16", "weights:bits=8")),
    *(("ddp", way) for way in ("powersgd:rank=1", "bf16:steps=4", "sdagc", "orq", "stock", "auto")),
]
RACE = ("stock", "bf16", "powersgd:rank=1,start=20", "topk", "blocks")
# By device. The first rate that may be claimed is that of the race.
RATES = {"cuda": ("10gbit", "25gbit", "1gbit"), "cpu": ("1gbit", "100mbit")}
LEARNING = 3e-4

# What NCCL sends through sockets; where each connection is paced, there is one to a neighbour.
TUNED = {"NCCL_NET": "Socket", "NCCL_BUFFSIZE": str(16 << 20), "NCCL_CUMEM_ENABLE": "0"}
SOCKETS = ("NCCL_MAX_NCHANNELS", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")

# A rate is claimed if the probe measures it within NEAR, and AMPLE times as much without it. A probe sends for so many seconds
# at the rate, but this many bytes at least and most. A small collective over NCCL that takes longer than SLOW microseconds
# waits for the other ranks' turns on the GPU. A probe that hangs is ended.
NEAR, AMPLE, SENDING, LEAST_SENT, MOST_SENT, SMALL, SLOW, HANGING = 0.1, 1.2, 0.5, 4 << 20, 60 << 20, 1 << 16, 3000, 45
# Steps before those that count; of a way at a rate at least, and by device at most; seconds in which auto must choose.
WARM, LEAST, MOST, CHOOSING = 5, 2, {"cuda": 15, "cpu": 3}, 15.0
# Seconds that a way may take beyond its share: a model, steps before those that count, auto's choice.
BEYOND = 25
# Held-out losses of a race.
POINTS = 5


class Model(nn.Module):
    """A GPT in bfloat16 by autocast. Its input has both the words and the next ones; it returns the loss."""

    def __init__(self, device: torch.device, shape: Shape):
        super().__init__()
        torch.manual_seed(0)
        with device:
            self.gpt = Gpt(shape)
        for parameter in self.gpt.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=texts.DEVIATION)

    def forward(self, both: Tensor) -> Tensor:
        with torch.autocast(both.device.type, torch.bfloat16):
            loss: Tensor = self.gpt(*both)
        return loss


class Bench:
    """The ranks, their links and text, and the record. rate: the links' present one. begun: the record of ranks before."""

    def __init__(self, how: str, backend: str, device: str, out: str, begun: Record | None):
        self.how, self.rate, self.shape = how, "none", SHAPES[device]
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        self.door = by_ddp.Door(backend)
        self.doors = {"ddp": self.door, "fsdp": by_fsdp.Door(0, backend)}
        self.out = Path(out) if self.door.rank == 0 else None
        arrays = texts.decode(b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))))
        self._text = {name: text.long() for name, text in arrays.items()}
        self._batch = self.shape.batch // self.door.size
        self.held_out, _ = next(self._batches("held_out", 2 * self.shape.batch))
        settings = {
            "parameters": sum(each.numel() for each in Model(torch.device("meta"), self.shape).parameters()),
            "ranks": self.door.size,
            "batch_of_a_rank": f"{self._batch} x {self.shape.length:,} bytes of Python's library",
            "autocast": "bfloat16",
            "optimizer": f"adamw, {LEARNING:g}",
        }
        links = "links are emulated" if how != "none" else "links are what this machine has"
        title = f"ranks share one {'GPU' if device == 'cuda' else 'CPU'}; {links}"
        self.record: Record = begun or {"title": title, "settings": settings, "lines": [], "race": []}

    def _batches(self, part: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of this rank: bytes and next ones together, and the next ones."""
        drawn = texts.batches(self._text[part], self.door.rank, self.door.size, batch, 0, self.shape.length)
        return ((torch.stack(pair).to(self.device), pair[1]) for pair in drawn)

    def change(self, rate: str) -> None:
        """Give the links another rate, while no rank sends."""
        self.door.means([0.0], "before")
        shaping.change(self.how, self.rate, rate, self.door.rank, self.door.size)
        self.door.means([0.0], "after")
        self.rate = rate

    def trainee(self, door: str, way: str) -> Trainee:
        """Make a way's model, optimizer and batches."""
        self.change("none")
        gc.collect()  # the last one's
        model = Model(self.device, self.shape)
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING, fused=True)
        fitted = self.doors[door].fit(way, model, optimizer, 0, 0.0)
        return Trainee(way, fitted, self._batches("train", self._batch), lambda loss, y: loss)

    def attempt(self, part: str, known: Record, share: float, measure: Callable[[], Record]) -> None:
        """Let a way take its share of the time, or a little more. A process that hangs ends, wherever it is."""
        limit = math.ceil(max(share, 0)) + BEYOND
        if self.out:
            ended = {**known, "error": f"the ranks ended while it was under way, as they do after {limit} s"}
            report.write(self.out, {**self.record, part: [*self.record[part], ended]})
        signal.alarm(limit)
        attempt(self.record, part, known, measure, self.out)
        signal.alarm(0)

    def since(self, began: float) -> float:
        """Return the seconds since then, alike on all ranks."""
        return self.door.means([time.monotonic() - began], "since")[0]


def probe(bench: Bench, rates: Sequence[str]) -> Record:
    """Measure a small collective, and the links without a rate and with each, in the ranks' backend: the fastest of three.

    Every other rank sends to the next one, whose time counts: gloo cannot fill both directions at once. A loopback interface
    gives what they send the share of both.
    """
    rank, size = bench.door.rank, bench.door.size
    sends, device = rank % 2 == 0, torch.device("cpu") if dist.get_backend() == "gloo" else bench.device  # gloo sends no other

    def fastest(call: Callable[[], object], count: int) -> list[float]:
        """Return the fastest mean over all ranks, and the one over those that receive."""
        found = list[float]()
        for _ in range(3):
            bench.door.means([0.0], "begin")
            found.append(seconds(call, count, device))
        return [min(bench.door.means(one, "times")) for one in (found, [0.0 if sends else 2 * each for each in found])]

    def gbit(rate: str) -> float:
        sent = MOST_SENT if rate == "none" else int(min(max(SENDING * shaping.bits(rate) / 8, LEAST_SENT), MOST_SENT))
        own = torch.ones(sent, dtype=torch.uint8, device=device)
        bench.change(rate)
        _, taken = fastest(lambda: (dist.send if sends else dist.recv)(own, rank ^ 1), 1)
        return round(8e-9 * sent / taken / (2 if bench.how == "loopback" else 1), 3)

    small = torch.ones(SMALL, dtype=torch.uint8, device=device)
    gathered = small.repeat(size)
    collective, _ = fastest(lambda: all_gather(gathered, small), 50)
    unshaped, measured = gbit("none"), {rate: gbit(rate) for rate in rates if bench.how != "none"}
    bench.change("none")
    asked = {rate: shaping.bits(rate) / 1e9 for rate in measured}
    claimed = [rate for rate, own in measured.items() if abs(own / asked[rate] - 1) <= NEAR and unshaped >= AMPLE * asked[rate]]
    return {"collective_us": round(1e6 * collective), "unshaped_gbit": unshaped, "gbit": measured, "claimed": claimed}


def timed(bench: Bench, door: str, way: str, rate: str, left: float, kept: Record) -> Record:
    """Time a way at a rate, for its share of the seconds that are left. All figures are of one batch.

    kept: the way's model, which lives on while the links change. auto has a new one, and chooses, at each rate.
    """
    if left <= 0:
        return {"left_out": "no time was left"}
    if not kept or way == "auto":
        kept["trainee"] = bench.trainee(door, way)
        turn_of(kept["trainee"], bench.door, WARM)
        own = kernels(kept["trainee"].step) if bench.device.type == "cuda" else {"gpu_ms": None}
        kept["of_ranks"] = [None] * bench.door.size
        dist.all_gather_object(kept["of_ranks"], own, group=bench.door.figures)
    bench.change(rate)
    trainee, began = kept["trainee"], time.monotonic()
    while not trainee.fitted.stats().get("auto", {"choices": 1})["choices"]:
        trainee.step()
        if bench.since(began) > CHOOSING:
            return {"left_out": f"auto had not chosen after {CHOOSING:g} s"}
    bench.change(rate)  # of connections that are new, too
    each, sent = turn_of(trainee, bench.door, LEAST)
    more = min(MOST[bench.device.type], int(left / (statistics.fmean(each) * trainee.passes))) - LEAST
    if more > 0:
        later, sent_later = turn_of(trainee, bench.door, more)
        each, sent = each + later, sent + sent_later
    ms, batches = [round(1000 * one, 2) for one in each], len(each) * trainee.passes
    return {
        "steps": len(ms),
        "ms": Spread.of(ms)._asdict(),
        "ms_bounds": median_bounds(ms),
        "interface_bytes": round(sent / batches / (1 if bench.how == "cluster" else bench.door.size)),  # ranks share others
        "loss": round(trainee.loss, 4),
        "auto": trainee.fitted.stats().get("auto"),
        "of_ranks": kept["of_ranks"],
    }


def race(bench: Bench, way: str, rate: str, limit: float) -> Record:
    """Train for so many seconds of steps. Return held-out losses on the way: seconds, steps, loss."""
    trainee = bench.trainee("ddp", way)
    model: Any = trainee.fitted.model
    bench.change(rate)
    points, spent, steps = list[tuple[float, int, float]](), 0.0, 0
    while len(points) <= POINTS:
        if spent >= limit * len(points) / POINTS:
            with torch.no_grad():
                loss = bench.door.means([float(model.module(bench.held_out))], "held out")[0]
            points.append((round(spent, 2), steps, round(loss, 4)))
        spent += bench.door.means([trainee.step()], "step")[0]
        steps += 1
    return {"points": points, "weights_are_equal": is_equal(bench.door, digest_of(model))}


def main(device: str, backend: str, how: str, out: str, limit: float, of_race: float) -> None:
    """Join the ranks, probe the links, and measure, unless they do not hold what they say.

    limit, of_race: seconds of all steps together, and of a way's race; without any there is none. out: the record, which other
    ranks may have begun.
    """
    signal.alarm(HANGING)
    sockets = dict.fromkeys(SOCKETS, "1" if how == "pacing" else "2")
    os.environ.update({**NCCL, **TUNED, **sockets, "NCCL_SOCKET_IFNAME": os.environ["GLOO_SOCKET_IFNAME"]})
    bench = Bench(how, backend, device, out, report.read(Path(out)) if Path(out).is_file() else None)
    record = bench.record
    if "probe" not in record:
        record["probe"] = {"how": how, "backend": backend, **probe(bench, RATES[device])}
    signal.alarm(0)
    found, lines = record["probe"], record["lines"]
    if how != "none" and not found["claimed"]:
        record["refused"] = f"{how}, {backend}: no rate may be claimed: {json.dumps(found)}"
    elif backend == "nccl" and found["collective_us"] > SLOW:
        record["refused"] = f"{how}, nccl: a small collective takes {found['collective_us']} us, for turns on the GPU"
    if bench.out:
        report.write(bench.out, record)
    began, rates, kept = time.monotonic(), ["none", *found["claimed"]], Record()
    has_ended = bool(lines) and "error" in lines[-1]  # of the ranks before
    for i, ((door, way), rate) in enumerate(itertools.product(WAYS, rates) if "refused" not in record else ()):
        if i < len(lines):
            continue
        known = {"door": door, "way": way, "rate": rate}
        if i % len(rates) == 0:
            kept, has_ended = {}, False
        if has_ended:
            lines.append({**known, "left_out": "it did not end at another rate"})
            continue
        share = (limit - bench.since(began)) / (len(WAYS) * len(rates) - i)
        bench.attempt("lines", known, share, partial(timed, bench, door, way, rate, share, kept))
    for way in RACE[len(record["race"]) :] if of_race and "refused" not in record else ():
        known = {"way": way, "rate": rates[min(1, len(rates) - 1)]}
        bench.attempt("race", known, of_race, partial(race, bench, limit=of_race, **known))
    if bench.out:
        report.write(bench.out, record)  # with what was left out last
    bench.door.end()
    sys.stdout.flush()
    os._exit(0)  # torch's threads and this process end in no fixed order, and now and then abort it after all is done


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]), out=sys.argv[-1])
