"""A soak: a long training by known gradients on real ranks in trouble, and the judge, for whom everything must add up."""

from __future__ import annotations

import copy
import math
import random
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gradcomp

# Layers of very different sizes, 61,009 entries in all, in several buckets. Those named bias are exchanged whole.
SHAPES = {"table": (1500, 12), "wide": (240, 125), "bias_wide": (240,), "kernel": (24, 16, 3, 3), "square": (96, 96)}
SHAPES |= {"bias_square": (96,), "gain": (1,)}
SIZES = [torch.Size(shape).numel() for shape in SHAPES.values()]
ENTRIES, BUCKET_MB = sum(SIZES), 0.08
SPARSE = ["topk:ratio=0.01", "topk:ratio=0.05,route=split", "topk:ratio=0.02,wire=exact,route=tree", "sdagc"]
SPARSE += ["sdagc:lam=2,small=pool", "sdagc:density=0.05,scope=layer,small=dense,route=split"]
ROUNDED = ["orq:sigmas=1.5,feedback=true", "orq:levels=5,feedback=true,route=alltoall", "orq:levels=9,feedback=true"]
SPECS = [f"{spec}; bias*=dense:feedback=true" for spec in SPARSE + ROUNDED]
# A rank leaves and another one joins, or all begin anew from their states, after these shares of the steps but the last.
ENDS = (0.2, 0.4, 0.6, 0.8, 1.0)

# What may grow from the second quarter of a stretch between resets to its last, of so many lines of the log at least: buffers
# of every spec come in their turns.
FLAT, LEAST_LINES = {"memory_kb": 8192, "open_files": 0, "threads": 0}, 40
# Lines of a spec in a half of the soak, at least; and the median, over the specs, of late over early step times, at most.
LEAST_TIMES, SLOWER = 10, 1.5
# The distance of a float32 from its neighbour, over the number; and roundings of a step at an entry: of the weight, of the
# residual (three times) and of the update. They are independent, so that their sum grows with the root of the steps. One in
# 10^8 sums lies beyond six deviations.
ULP, ROUNDINGS, DEVIATIONS = 2.0**-23, 5, 6


class Net(nn.Module):
    """Layers that compute nothing: the gradients of its loss are the given ones."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, drawn: Tensor) -> Tensor:
        """Return the loss."""
        return torch.stack([(p.flatten() * g).sum() for p, g in zip(self.parameters(), drawn.split(SIZES), strict=True)]).sum()


class Plan:
    """What each step of a soak brings, drawn from its seed.

    every: steps from one change of the spec to the next. commits: from one line of the log to the next. growth: good steps
    until the loss scale doubles. Overflows come as often as to halve it again, on average.
    """

    def __init__(self, seed: int, steps: int):
        self.seed, self.steps, self.every = seed, steps, min(250, max(10, steps // 80))
        self.commits, self.growth = max(5, self.every // 5), 4 * self.every // 5

    def spec(self, step: int) -> str:
        """Return the spec of a step. Every spec comes once before any comes again."""
        turn, place = divmod(step // self.every, len(SPECS))
        return random.Random(f"{self.seed} specs {turn}").sample(SPECS, len(SPECS))[place]

    def overflow(self, step: int) -> tuple[int, int, float] | None:
        """Return a step's overflow, if there is one: a draw of the rank, the entry, and its value, which is not finite."""
        window = 6 * self.every // 5
        draw = random.Random(f"{self.seed} overflow {step // window}")
        if draw.randrange(window) != step % window:
            return None
        return draw.randrange(60), draw.randrange(ENTRIES), draw.choice([float("inf"), float("-inf"), float("nan")])

    def gradient(self, step: int, rank: int, ranks: int) -> Tensor:
        """Draw a rank's gradient in a step, all layers as one flat tensor."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 64 + rank)
        drawn = torch.randn(ENTRIES, generator=generator)
        if (overflow := self.overflow(step)) is not None and overflow[0] % ranks == rank:
            drawn[overflow[1]] = overflow[2]
        return drawn

    def leaver(self, stretch: int, ranks: int) -> int:
        """Draw the rank that leaves after a stretch. Horovod's rank 0 is one that stays."""
        return random.Random(f"{self.seed} leaver {stretch}").randrange(1, ranks)

    def known(self, ranks: int) -> Tensor:
        """Add up the mean gradients of all steps, in float64. No rank takes a step in which one overflows."""
        total = torch.zeros(ENTRIES, dtype=torch.float64)
        for step in (step for step in range(self.steps) if self.overflow(step) is None):
            for rank in range(ranks):
                total.add_(self.gradient(step, rank, ranks).double(), alpha=1 / ranks)
        return total


class ByDdp:
    """A rank's training under DDP. A reset makes it anew, from the states of all ranks."""

    def __init__(self, plan: Plan, spec: str):
        self.net, self.plan, self.saved = Net(), plan, dict[str, Any]()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=plan.growth)
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), 1.0)
        self.wrap(spec)

    def wrap(self, spec: str) -> None:
        """Wrap the model."""
        self.model: Any = nn.parallel.DistributedDataParallel(self.net, bucket_cap_mb=BUCKET_MB)
        self.handle: Any = gradcomp.ddp.attach(self.model, spec, bucket_mb=BUCKET_MB, seed=self.plan.seed)

    def step(self, drawn: Tensor) -> None:
        """Train a step by a known gradient."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(drawn)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self) -> None:
        """Keep the state."""
        parts = {"net": self.net, "optimizer": self.optimizer, "scaler": self.scaler, "handle": self.handle}
        self.saved = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def reset(self, spec: str, leaver: int, begin: Any) -> ByDdp:
        """Go on from the kept states with new objects."""
        states: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(states, self.saved["handle"])
        new = type(self)(self.plan, spec)
        for name in ("net", "optimizer", "scaler"):
            getattr(new, name).load_state_dict(self.saved[name])
        new.handle.load_state_dict(states)
        return new


class ByHorovod(ByDdp):
    """A rank's training under Horovod with the stock optimizer, as in its elastic mode. At a reset, one makes all anew."""

    def wrap(self, spec: str) -> None:
        """Wrap the optimizer."""
        import horovod.torch as hvd

        named, self.model = [*self.net.named_parameters()], self.net
        self.handle = gradcomp.horovod.Compression(spec, named, bucket_mb=BUCKET_MB, seed=self.plan.seed)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named, compression=self.handle)
        scaling = self.scaler.state_dict()
        self.state = hvd.elastic.TorchState(model=self.net, optimizer=self.optimizer, scaling=scaling)

    def step(self, drawn: Tensor) -> None:
        """Train a step by a known gradient."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(drawn)).backward()
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self) -> None:
        """Commit."""
        self.state.scaling = self.scaler.state_dict()
        self.state.save()

    def reset(self, spec: str, leaver: int, begin: Any) -> ByHorovod:
        """Go back to the last commit, as after a failure, and begin anew with a rank that joins."""
        import horovod.torch as hvd

        self.state.restore()
        rank = hvd.rank()
        begin()
        new = type(self)(self.plan, spec) if rank == leaver else self
        if rank != leaver:
            self.state.on_reset()
        new.state.sync()
        new.scaler.load_state_dict(new.state.scaling)
        return new


def soaked(network: str, plan: Plan, rank: int, ranks: int, begin: Any) -> dict[str, Any]:
    """Train on this rank to the end. Return what the judge needs. begin: lets Horovod begin anew."""
    run, step, spec = {"ddp": ByDdp, "horovod": ByHorovod}[network](plan, plan.spec(0)), 0, plan.spec(0)
    lines: list[dict[str, Any]] = []
    lost, times = torch.zeros(ENTRIES), list[float]()

    def train(until: int) -> None:
        nonlocal step, spec
        while step < until:
            if (wanted := plan.spec(step)) != spec:
                run.handle.change(wanted)
                spec = wanted
            drawn = plan.gradient(step, rank, ranks)
            began = time.process_time()
            run.step(drawn)
            times.append(1000 * (time.process_time() - began))
            step += 1
            if step % plan.commits == 0:
                lines.append(
                    {"step": step, "spec": spec, "stretch": stretch, "cpu_ms": statistics.median(times), **resources()}
                )
                times.clear()

    for stretch, end in enumerate(ENDS):
        train(round(end * plan.steps))
        if end < 1:
            run.save()
            kept, residual = (step, spec), flat(run.handle.residual().values())
            train(step + plan.every)  # which is then undone, with a change of the spec
            step, spec = kept
            lines = [line for line in lines if line["step"] <= step]
            leaver = plan.leaver(stretch, ranks) if network == "horovod" else -1
            lost += residual * (rank == leaver)
            run = run.reset(spec, leaver, begin)
    residual, weights = flat(run.handle.residual().values()), flat(run.net.parameters())
    return {"lines": lines, "lost": lost, "residual": residual, "weights": weights}


def flat(parts: Any) -> Tensor:
    """Join the layers' entries."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def resources() -> dict[str, int]:
    """Return this process's memory in kB, its open files and its threads."""
    status = Path("/proc/self/status").read_text()
    memory, threads = (int(re.findall(rf"^{field}:\s*(\d+)", status, re.MULTILINE)[0]) for field in ("VmRSS", "Threads"))
    return {
        "memory_kb": memory,
        "threads": threads,
        "open_files": len([*Path("/proc/self/fd").iterdir()]) - 1,
    }  # without the listing's


class Verdict(NamedTuple):
    """A judgement. holds: None where the soak was too short to judge."""

    name: str
    holds: bool | None
    said: str


def judge(plan: Plan, reports: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judge a soak by what its ranks report."""
    every = [each["lines"] for each in reports]
    return [*flat_figures(every), step_time(every), replicas(reports), conservation(plan, reports)]


def flat_figures(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[Verdict]:
    """Judge each rank's memory, open files and threads, by the medians of the second and of the last quarter of a stretch."""
    stretches = [[line for line in lines if line["stretch"] == each] for lines in ranks for each in range(len(ENDS))]
    long = [each for each in stretches if len(each) >= LEAST_LINES]
    if not long:
        return [Verdict(name, None, f"no rank logged {LEAST_LINES} lines in a row") for name in FLAT]
    verdicts = []
    for name, most in FLAT.items():
        grown = []
        for each in long:
            values, quarter = [line[name] for line in each], len(each) // 4
            grown.append(statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter]))
        worst = max(grown if most else map(abs, grown))
        said = f"at most {worst:+g} from the second quarter to the last; {len(long)} stretches of ranks"
        verdicts.append(Verdict(name, worst <= most, said))
    return verdicts


def step_time(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> Verdict:
    """Compare the step times of each spec, early and late."""
    found: dict[str, list[float]] = {}
    for line in sorted((line for lines in ranks for line in lines), key=lambda line: line["step"]):
        found.setdefault(line["spec"], []).append(line["cpu_ms"])
    halves = [(times[: len(times) // 2], times[len(times) // 2 :]) for times in found.values() if len(times) >= 2 * LEAST_TIMES]
    if not halves:
        return Verdict("step time", None, f"no spec logged {2 * LEAST_TIMES} lines")
    middle = statistics.median(statistics.median(late) / statistics.median(early) for early, late in halves)
    return Verdict(
        "step time", middle <= SLOWER, f"late over early, processor time: {middle:.2f} (median of {len(halves)} specs)"
    )


def replicas(reports: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge whether all ranks end with the same weights, to the last bit."""
    different = [rank for rank, own in enumerate(reports) if not torch.equal(own["weights"], reports[0]["weights"])]
    said = f"the weights of ranks {different} differ from those of rank 0" if different else "equal to the last bit"
    return Verdict("replicas", not different, said)


def conservation(plan: Plan, reports: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge whether the updates, the residuals, and the residuals of ranks that left are the gradients of all steps.

    An entry's error may be DEVIATIONS times what roundings add up to: each is at most half the last bit of the largest number.
    """
    known, count = plan.known(len(reports)), len(reports)
    residuals, lost = (torch.stack([own[name].double() for own in reports]) for name in ("residual", "lost"))
    error = (residuals.mean(0) - reports[0]["weights"].double() + lost.mean(0) - known).abs()
    size = float((known.abs() + residuals.abs().amax(0)).max())
    bound = DEVIATIONS * math.sqrt(ROUNDINGS * plan.steps) * ULP / 2 * size
    broken = int((~(error <= bound)).sum())
    said = f"{broken:,} of {ENTRIES:,} entries are off by more than rounding; " if broken else ""
    said += f"largest error {float(error.max()):.1e}, {bound:.1e} allowed, of sums up to {float(known.abs().max()):.0f}"
    return Verdict("conservation", not broken, f"{said}; {plan.steps:,} steps of {count} ranks")
