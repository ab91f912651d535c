"""The page that the documentation shows: for each task a table of seconds, by way and cluster, and what won."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from laboratory.accuracy.plan import ADDED_UP, CHOOSING, EVERY, OWN, RANKS, RATES
from laboratory.accuracy.summary import NEARLY
from laboratory.harness.ways import DDP, POWERSGD_FROM
from laboratory.report.tables import figure, markdown
from laboratory.tasks.table import TASKS

DOORS = {"ddp": "DDP", "horovod": "Horovod"}
NEVER, UNTRAINED = "never", "-"

# Older records also have so many hosts, overloaded, on which predictions were checked.
CROWD = 16
UNITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}

INTRODUCTION = f"""\
# Time to accuracy

How long a training takes until its score is within {100 - 100 * NEARLY:.0f} % of dense's final one, by every way to exchange
gradients: users wait for accuracy, not for steps or bytes. `scripts/lab accuracy` makes this page.

Where links are slow, ways with few bytes win by their steps. On fast links they win, if at all, because their scores rise
faster in these short trainings. Do not expect that of a long one: compare [step times](results.md#step-times) there.

- **Scores** come from whole trainings on {RANKS} real ranks of one machine, with the score of held-out data after every
  {EVERY} batches. One seed's accuracy on CIFAR has a [standard error of 0.7 points](claims.md#pictures): differences below two
  points may be chance. Where a way never gets there, its final score stands in brackets.
- **Seconds** are batches times the seconds of a batch, which are measured on emulated clusters with links of the given rate,
  where all ways take turns. A cluster of 8 hosts trains with the same batch in all, half as large on each; its scores are
  those of {RANKS} ranks.
- `{ADDED_UP}` adds up the gradients of four batches before it exchanges them in bf16, with the best of three learning
  rates: dense's, and {" and ".join(f"{rate} times" for rate in RATES[1:])} that. PowerSGD is torch's hook: it compresses from
  step {POWERSGD_FROM} on, in one bucket, since gloo mixes up several. `grace` and `dgc` are GRACE's Top-k and the authors' Deep
  Gradient Compression with their own code. gradcomp's specs are used as they come.
- `auto` counts with what choosing cost. Its scores are those of the way that it chose.
- All hosts share one machine of two cores, so all messages cost processor time that real network cards would not."""


def cluster(hosts: int, rate: str) -> str:
    """Name a cluster."""
    found = re.fullmatch(r"([0-9.]+)([a-z]+)", rate)
    return f"{hosts} hosts, " + (f"{found[1]} {UNITS.get(found[2], found[2])}" if found else "unshaped")


def name(line: Mapping[str, Any]) -> str:
    """Name a way and its door."""
    rate = f", lr {line['lr']:g}" if "lr" in line else ""
    return f"`{line['way']}`{rate}, {DOORS[line['door']]}"


def best(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the line that reaches the goal first."""
    reached = [line for line in lines if line["seconds"] is not None]
    return min(reached, key=lambda line: float(line["seconds"]), default=None)


def verdict(cells: Mapping[str, Any]) -> str:
    """Say what won on a cluster, and how far the best of gradcomp's and of the others are apart."""
    own = best([line for line in cells["lines"] if line["way"] in (*OWN, *CHOOSING)])
    other = best([line for line in cells["lines"] if line["way"] not in (*OWN, *CHOOSING)])
    where = cluster(cells["hosts"], cells["rate"])
    if own is None or other is None:
        reached = own or other
        if reached is None:
            return f"- {where}: no way reaches the goal"
        whose = "no other way does" if other is None else "**no way of gradcomp does**"
        return f"- {where}: {name(reached)} takes {reached['seconds']:.0f} s; {whose}"
    ratio = own["seconds"] / other["seconds"]
    how = f"{ratio:.2f} of the {other['seconds']:.0f} s of {name(other)}"
    return f"- {where}: {name(own)} takes {own['seconds']:.0f} s, {how}{', **which wins**' if ratio > 1 else ''}"


def table(every: Sequence[Mapping[str, Any]], score: str) -> str:
    """Write a task's table. The best of each cluster is bold."""
    ways = {(line["door"], line["way"]): line for cells in every for line in cells["lines"] if line["way"] != "none"}
    rows = [["way", score, *(cluster(cells["hosts"], cells["rate"]) for cells in every)]]
    for key in sorted(ways, key=lambda key: key[0] != DDP):
        lines = [next((line for line in cells["lines"] if (line["door"], line["way"]) == key), None) for cells in every]
        final = ways[key]["score"] if ways[key]["way"] not in CHOOSING else None
        seconds = [_seconds(line, best(cells["lines"])) for line, cells in zip(lines, every, strict=True)]
        rows.append([name(ways[key]), figure(final, "{:.2f}", ""), *seconds])
    return markdown(rows)


def _seconds(line: Mapping[str, Any] | None, first: Mapping[str, Any] | None) -> str:
    if line is None or line["score"] is None:
        return UNTRAINED
    if line["seconds"] is None:
        which = f"{line['chosen']}, " if "chosen" in line else ""
        return f"{NEVER} ({which}{line['score']:.2f})"
    text = f"{line['seconds']:.0f} s"
    text = f"**{text}**" if first is line else text
    return f"{text} ({line['chosen']})" if "chosen" in line else text


def page(tasks: Mapping[str, Mapping[str, Any]], result: str) -> str:
    """Write the page. result: the file with all figures."""
    parts = [INTRODUCTION]
    for task, found in tasks.items():
        settings, about = found["settings"], TASKS[task].about
        trained = f"{settings['steps']} steps of {RANKS} x {settings['batch']}, {TASKS[task].optimizer}, {found['seeds']} seeds"
        trained = trained.replace("1 seeds", "one seed")
        what = f"dense ends at {found['dense']:.2f} ({TASKS[task].score_name}), and {found['goal']:.2f} counts as reached"
        parts.append(f"## {task}\n\n{about[0].upper()}{about[1:]}; {trained}; {what}.")
        clusters = [cells for cells in found["clusters"] if cells["hosts"] != CROWD]
        parts.append("\n".join(verdict(cells) for cells in clusters))
        parts.append(table(clusters, TASKS[task].score_name))
    commits = sorted({commit for found in tasks.values() for commit in found["commits"]})
    parts.append(f"All figures: [{result.rpartition('/')[2]}]({result}). Commits: {', '.join(commits)}.")
    return "\n\n".join(parts) + "\n"
