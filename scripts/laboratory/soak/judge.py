"""The judge of a soak: memory, open files, threads and step times stay flat, and in the end all gradients are accounted for."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from laboratory.soak.plan import ENTRIES, SPECS, Plan, known_sum, ranks_of, spike_sizes

# Memory may be this much larger in the last quarter of a stretch than in the second: buffers of every spec come in their turns.
MORE_MEMORY_KB = 8192
# A stretch is one process's lines under one number of ranks. Of a shorter one, quarters say nothing: it must see all specs.
LEAST_LINES = 40
# Lines of a spec in a half of the soak, at least.
LEAST_TIMES = 10
# The median, over the specs, of late over early step times.
SLOWER = 1.5

# The distance of a float32 from its neighbour, over the number.
ULP = 2.0**-23
# Rounding errors are independent, so that they grow with the root of the steps. One in 10^8 sums lies beyond six deviations.
DEVIATIONS = 6
# Roundings of a step at an entry: of the weight, of the residual (three times) and of the update.
ROUNDINGS = 5
# Steps in which a spike may wait, at most, times the roundings of each, in units of the spike's last bit.
SPIKE_ROUNDINGS = 1000


class Verdict(NamedTuple):
    """A judgement. holds: None where the soak was too short to judge."""

    name: str
    holds: bool | None
    said: str


def judge(
    plan: Plan,
    count: int,
    lines: Sequence[Mapping[str, Any]],
    troubles: Sequence[Mapping[str, Any]],
    folder: Path,
) -> list[Verdict]:
    """Judge a soak by its logs and its records. count: of ranks at the start and at the end."""
    records = [torch.load(path, weights_only=True) for path in sorted(folder.glob("record-*.pt"))]
    last = sorted((record for record in records if record["final"]), key=lambda record: record["rank"])
    final = [record for record in last if record["step"] == max(each["step"] for each in last)]
    whole = [record["rank"] for record in final] == list(range(count))
    verdicts = [
        Verdict("all ranks end", whole, f"{len(final)} of {count} ranks reached the end"),
        *flat(lines),
        step_time(lines, troubles),
    ]
    if whole:
        verdicts += [replicas(final), conservation(plan, final, records)]
    return verdicts


def flat(lines: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judge memory, open files and threads within every process."""
    stretches = [each for each in stretches_of(lines) if len(each) >= LEAST_LINES]
    bounds = {
        "memory": ("rss_kb", MORE_MEMORY_KB, "kB"),
        "open files": ("fds", 0, "files"),
        "threads": ("threads", 0, "threads"),
    }
    if not stretches:
        return [Verdict(name, None, f"no process logged {LEAST_LINES} lines in a row") for name in bounds]
    verdicts = []
    for name, (key, most, unit) in bounds.items():
        grown = [quarters([line[key] for line in each]) for each in stretches]
        changes = [late - early if most else abs(late - early) for early, late in grown]
        said = f"at most {max(changes):+g} {unit} from the second quarter to the last; {len(grown)} stretches of processes"
        verdicts.append(Verdict(name, max(changes) <= most, said))
    return verdicts


def stretches_of(lines: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Gather each process's lines of figures between two changes of the ranks."""
    found: dict[int, list[list[Mapping[str, Any]]]] = {}
    for line in lines:
        own = found.setdefault(line["pid"], [])
        if "begins" in line:
            own.append([])
        else:
            own[-1].append(line)
    return [each for own in found.values() for each in own]


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the second and of the last quarter."""
    quarter = len(values) // 4
    return statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])


def step_time(lines: Sequence[Mapping[str, Any]], troubles: Sequence[Mapping[str, Any]]) -> Verdict:
    """Compare the step times of each spec, and number of ranks, early and late.

    Lines in which ranks came or went are left out.
    """
    changes = [each["time"] for each in troubles]
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    before: dict[int, float] = {}
    for line in lines:
        began, ended = before.get(line["pid"], math.inf), line["time"]
        before[line["pid"]] = ended
        if "step" in line and not any(began <= change <= ended for change in changes):
            found.setdefault((line["spec"], line["ranks"]), []).append((line["step"], line["cpu_ms"]))
    ratios = []
    for times in found.values():
        times.sort()
        half = len(times) // 2
        if half >= LEAST_TIMES:
            early, late = ([time for _, time in part] for part in (times[:half], times[half:]))
            ratios.append(statistics.median(late) / statistics.median(early))
    if len(ratios) < len(SPECS):
        return Verdict("step time", None, f"only {len(ratios)} of {len(SPECS)} specs logged {2 * LEAST_TIMES} lines")
    middle = statistics.median(ratios)
    said = f"late over early, processor time: {middle:.2f} (median of {len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f})"
    return Verdict("step time", middle <= SLOWER, said)


def replicas(final: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge whether all ranks end with the same weights, to the last bit."""
    different = [own["rank"] for own in final if not torch.equal(own["weights"], final[0]["weights"])]
    said = f"the weights of ranks {different} differ from those of rank 0" if different else "equal to the last bit"
    return Verdict("replicas", not different, said)


def conservation(plan: Plan, final: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> Verdict:
    """Judge whether the updates, the residuals, and the residuals of ranks that left are the gradients of all steps.

    An entry's error may be DEVIATIONS times what roundings add up to: each is at most half the last bit of the largest numbers
    that stand there. At an entry with spikes these are the spikes.
    """
    steps, history = final[0]["step"], final[0]["history"]
    known = known_sum(plan, ranks_of(history, steps))
    lost, left = lost_with(final, records, history)
    waits = torch.stack([own["residual"].double() for own in final]).mean(0)
    error = (waits - final[0]["weights"].double() + lost - known).abs()
    spikes = spike_sizes(plan, steps)
    calm = spikes == 0
    sizes = known.abs() + torch.stack([own["residual"].double().abs() for own in final]).amax(0)
    bound = DEVIATIONS * math.sqrt(ROUNDINGS * steps) * ULP / 2 * float(sizes[calm].max()) + SPIKE_ROUNDINGS * ULP * spikes
    broken = int((~(error <= bound)).sum())
    said = (
        f"largest error {float(error[calm].max()):.1e}, {float(bound[calm].max()):.1e} allowed, of sums up to "
        f"{float(known[calm].abs().max()):.0f} at {int(calm.sum()):,} entries; {int((spikes > 0).sum()):,} had spikes; "
        f"{steps:,} steps; {left} ranks left"
    )
    if broken:
        said = f"{broken:,} of {ENTRIES:,} entries are off by more than rounding; {said}"
    return Verdict("conservation", not broken, said)


def lost_with(
    final: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], history: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, int]:
    """Add up the residuals of the ranks that left, at the commits from which the others went on. Return their number, too.

    The ranks of a launch that has ended did not leave: the next launch loads their states.
    """
    lost, left = torch.zeros(ENTRIES, dtype=torch.float64), 0
    stayed = {own["pid"] for own in final}
    for (_, before), (step, after) in itertools.pairwise(history):
        if after < before:
            for own in records:
                if own["pid"] not in stayed and own["step"] == step and own["ranks"] == before and not own["final"]:
                    lost += own["residual"].double() / before
                    left += 1
    return lost, left
