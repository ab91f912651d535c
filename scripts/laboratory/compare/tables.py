"""A comparison's tables in Markdown: step times, throughput over peers, training, claims."""

from __future__ import annotations

from collections.abc import Sequence

from laboratory.compare.plan import CLAIMED_THROUGHPUTS
from laboratory.compare.summary import Cluster, Line, Model, ms_of
from laboratory.report.tables import figure
from laboratory.report.tables import markdown as table


def markdown(model: Model, ranks: int) -> str:
    """Write all tables of one model."""
    clusters, settings = model["clusters"], model["settings"]
    measured = [cluster for cluster in clusters if cluster["lines"]]
    parts = [
        f"## {model['parameters']:,} parameters (digits, MLP of width {model['width']}), batches of {settings['batch']} a rank"
    ]
    if measured:
        parts += ["Milliseconds of a step on each cluster, and bytes of the rank that sends most.", _times(measured)]
        parts += [
            f"Throughput, x that of {' / '.join(CLAIMED_THROUGHPUTS)} at equal ratio, taken within rounds.",
            _throughput(measured),
        ]
    if lines := model["training"]:
        parts += [f"Training: {ranks} ranks, {settings['steps']} steps, {len(lines[0]['seeds'])} seeds.", _training(lines)]
        common = figure(lines[0]["common_loss"], "{:.3f}")
        goals = f"dense's loss at 80 % of its steps / {common}, the lowest that all specs reach"
        parts += [f"Steps, and seconds on each cluster, to {goals}.", _goals(lines, clusters)]
    if model["claims"]:
        parts += ["Claims.", _claims(model["claims"], measured)]
    return "\n\n".join(parts)


def named(cluster: Cluster) -> str:
    """Name a cluster."""
    return f"{cluster['hosts']} hosts, {cluster['rate']}"


def _lines(clusters: Sequence[Cluster]) -> dict[str, list[Line | None]]:
    """Sort the lines by spec, cluster by cluster."""
    specs = list(dict.fromkeys(line["spec"] for cluster in clusters for line in cluster["lines"]))
    return {spec: [next((ln for ln in c["lines"] if ln["spec"] == spec), None) for c in clusters] for spec in specs}


def _times(clusters: Sequence[Cluster]) -> str:
    hosts = list(dict.fromkeys(cluster["hosts"] for cluster in clusters))
    rows = []
    for spec, lines in _lines(clusters).items():
        sent = [_bytes(next((ln for ln in lines if ln and ln in _of(clusters, n)), None)) for n in hosts]
        times = [figure(ms, "{:,.0f}") for ms in ms_of(spec, clusters)]
        rows.append([f"`{spec}`", *times, *sent])
    return table([["spec", *map(named, clusters), *(f"bytes, {n} hosts" for n in hosts)], *rows])


def _of(clusters: Sequence[Cluster], hosts: int) -> list[Line]:
    return [line for cluster in clusters if cluster["hosts"] == hosts for line in cluster["lines"]]


def _bytes(line: Line | None) -> str:
    return f"{line['bytes_per_step']:,}" if line else "-"


def _throughput(clusters: Sequence[Cluster]) -> str:
    rows = []
    for spec, lines in _lines(clusters).items():
        if spec != "none":
            rows.append([f"`{spec}`", *(" / ".join(_over(line, of) for of in CLAIMED_THROUGHPUTS) for line in lines)])
    return table([["spec", *map(named, clusters)], *rows])


def _over(line: Line | None, of: str) -> str:
    return f"{line['throughput_over'][of]['median']:.2f}" if line and of in line["throughput_over"] else "-"


def _training(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        loss = f"{figure(line['loss'], '{:.3f}')} ± {figure(line['loss_error'], '{:.3f}')}"
        score = f"{figure(line['score'], '{:.2f}')} ± {figure(line['score_error'], '{:.2f}')}"
        rows.append([f"`{line['spec']}`", f"{line['compression']:,.0f} x", loss, score])
    return table([["spec", "bytes, dense / sent", "final loss", "accuracy in %"], *rows])


def _goals(lines: Sequence[Line], clusters: Sequence[Cluster]) -> str:
    rows = []
    for line in lines:
        steps = [(line["steps_to_loss"], line["steps_to_common"])]
        seconds = zip(line["seconds_to_loss"], line["seconds_to_common"], strict=True)
        cells = [" / ".join(figure(value, "{:,.0f}") for value in pair) for pair in (*steps, *seconds)]
        rows.append([f"`{line['spec']}`", *cells])
    return table([["spec", "steps", *(f"s, {named(cluster)}" for cluster in clusters)], *rows])


def _claims(claims: Sequence[Line], clusters: Sequence[Cluster]) -> str:
    rows: dict[str, dict[str, str]] = {}
    for claim in claims:
        text = f"`{claim['spec']}`: {claim['at_least']:g} x the throughput of `{claim['against']}`"
        rows.setdefault(text, {})[named(claim)] = verdict(claim)
    heads = [named(cluster) for cluster in clusters]
    return table([["claim", *heads], *([text, *(cells.get(head, "-") for head in heads)] for text, cells in rows.items())])


def verdict(claim: Line) -> str:
    """Say whether a claim holds, with the measured throughput."""
    return f"{'holds' if claim['holds'] else 'does not hold'}: {claim['throughput']['median']:.2f} x"
