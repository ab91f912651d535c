"""The drawings of docs/algorithms: a step of simulated ranks, with the entries that each rank sends and those that stay."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradcomp
from documentation.charts import MARGIN, WIDTH, Sheet
from gradcomp.core.compressor import Acc
from gradcomp.core.requests import Gather, Reduce, Request, Send, World
from gradcomp.core.wrapper import Wrapper

# Heights in pixels: of the largest entry, of a title above a rank's entries, and of a line of text.
LARGEST, TITLE, LINE = 26, 14, 14
# The most entries with written values.
LABELLED = 8

# The gradients of four ranks; most drawings need two.
GRADS = [
    [1.0, -6.0, 2.0, 0.0, 3.0, -2.0, 8.0, 2.0],
    [2.0, -5.0, 0.0, 7.0, 1.0, -3.0, 2.0, -4.0],
    [0.0, -4.0, 5.0, 1.0, -2.0, 1.0, 1.0, 3.0],
    [1.0, 2.0, 6.0, 0.0, -3.0, 0.0, -1.0, -2.0],
]
# Entries that 16 bits do not hold.
FRACTIONS = [[3.1416, -1.2345, 2.7183, 0.5772], [1.4142, 0.3333, -1.6180, 2.2361]]


class Drawing(NamedTuple):
    """A spec, its title, and the gradients of each rank in each step. The last step is drawn."""

    spec: str
    title: str
    steps: Sequence[Sequence[Sequence[float]]] = (GRADS[:2],)
    layers: Sequence[int] = ()


def spikes() -> list[list[float]]:
    """Make the gradients of two ranks: small whole numbers, and a few large ones, of which one is rank 0's or 1's alone."""
    heavy = [{11: 12.0, 40: -8.0, 71: 9.0}, {11: 9.0, 40: -9.0, 71: 1.0, 85: -10.0}]
    return [[own.get(i, float((7 * i + 3 * rank * i * i) % 5 - 2)) for i in range(96)] for rank, own in enumerate(heavy)]


def correlated(step: int, size: int) -> list[list[float]]:
    """Draw the gradients of two ranks, which have a common part. The entries differ in size."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.linspace(0.2, 2, size)[torch.arange(size) * 101 % size]
    common = torch.randn(size, generator=generator)
    return [(sizes * (common + 0.3 * torch.randn(size, generator=generator))).tolist() for _ in range(2)]


SKETCH = "ratio=0.02,rows=3,columns=16,candidates=2"
LEARN = 24
DRAWINGS = {
    "dense": Drawing("dense", "every entry travels as it is"),
    "half": Drawing("half", "every entry travels in 16 bits", [FRACTIONS]),
    "blocks": Drawing("blocks:bits=3", "every entry travels in a few bits", [FRACTIONS]),
    "topk": Drawing("topk:ratio=0.25", "the largest entries travel, as powers of two"),
    "sdagc": Drawing("sdagc:density=0.25", "the entries beyond a threshold travel, as powers of two"),
    "gs_sgd": Drawing(f"gs_sgd:{SKETCH}", "the ranks sum count sketches, then exact values", [spikes()]),
    "sketched_sgd": Drawing(f"sketched_sgd:{SKETCH}", "a server sums count sketches, then exact values", [spikes()]),
    "gtopk": Drawing("gtopk:ratio=0.25", "the largest entries are merged up a tree", [GRADS]),
    "lgc": Drawing(
        f"lgc:ratio=0.125,dense=1,learn={LEARN},bands=4,window=128",
        "an autoencoder codes entries at common places",
        [correlated(step, 274) for step in range(LEARN + 2)],
        (2, 256, 16),
    ),
    "orq": Drawing("orq:levels=5", "random rounding to the levels with the least squared error"),
    "bingrad": Drawing("bingrad", "rounding to the means above and below the mean"),
    "qsgd": Drawing("qsgd", "random rounding to even levels up to the norm"),
    "terngrad": Drawing("terngrad", "random rounding to -s, 0 or s"),
    "linear": Drawing("linear", "random rounding to even levels between the ends"),
    "sign": Drawing("sign", "signs and a mean magnitude"),
}


@dataclass(frozen=True)
class Recorded(Wrapper):
    """Keeps residual and gradient of each rank before and after an exchange, and the rank's requests."""

    before: dict[int, Tensor] = field(default_factory=dict, compare=False)
    after: dict[int, Tensor] = field(default_factory=dict, compare=False)
    requests: dict[int, list[str]] = field(default_factory=dict, compare=False)

    def inner_state(self, state: Any) -> Any:
        return state

    def exchange(self, acc: Acc, state: Any, world: World) -> Generator[Request, Any, Any]:
        self.before[world.rank], requests = acc.residual.clone(), self.requests.setdefault(world.rank, [])
        requests.clear()
        running, reply = self.inner.exchange(acc, state, world), None
        try:
            while True:
                request = running.send(reply)
                requests += [f"rank {world.rank} {line}" for line in described(request)]
                reply = yield request
        except StopIteration as end:
            self.after[world.rank] = acc.residual.clone()
            return end.value


def described(request: Request) -> list[str]:
    """Write a line for each message of a request."""
    match request:
        case Gather(payload):
            return [f"to all: {payload.bytes.numel():,} bytes"]
        case Reduce(tensor):
            return [f"into a sum: {tensor.numel() * tensor.element_size():,} bytes"]
        case Send(payloads):
            return [f"to rank {to}: {payload.bytes.numel():,} bytes" for to, payload in payloads.items()]


def draw(name: str) -> str:
    """Draw the step of an algorithm, as SVG."""
    drawing = DRAWINGS[name]
    layers = drawing.layers or (len(drawing.steps[0][0]),)
    made = gradcomp.make(drawing.spec)
    recorded = Recorded(made.inner if isinstance(made, Wrapper) else made)
    whole = made.wrap(recorded) if isinstance(made, Wrapper) else recorded
    ranks = range(len(drawing.steps[0]))
    names = [f"layer{i}" for i in range(len(layers))]
    simulation = gradcomp.Simulation(whole, {each: (size,) for each, size in zip(names, layers, strict=True)}, len(ranks))
    for step in drawing.steps:
        update = simulation.step([dict(zip(names, torch.tensor(own).split(list(layers)), strict=True)) for own in step])
    before, after = ([found[rank] for rank in ranks] for found in (recorded.before, recorded.after))
    fed_back = any(tensor.any() for rank in ranks for tensor in simulation.residual(rank).values())

    mean = torch.cat([tensor.flatten() for tensor in update.values()])
    scale = max(float(tensor.abs().max()) for tensor in (*before, mean))
    sheet, titles = Sheet(f"{name}: {drawing.title}"), [f"rank {rank}" for rank in ranks]
    sheet.heading("In each rank: residual + gradient" if fed_back else "In each rank: the gradient", "bold before")
    entries(sheet, titles, before, scale, "before")
    sheet.heading("Taken out of it, and sent", "bold sent")
    entries(sheet, titles, [b - a for b, a in zip(before, after, strict=True)], scale, "sent")
    for start in ranks[::2]:
        pair = [recorded.requests[rank] for rank in ranks[start : start + 2]]
        for place, lines in enumerate(pair):
            for i, line in enumerate(lines):
                sheet.text(left(place), line, "muted", down=i * LINE)
        sheet.height += LINE * max(map(len, pair))
    sheet.heading("On every rank: the update, the mean of what was sent", "bold update")
    entries(sheet, [""], [mean], scale, "update")
    sheet.heading("Stays in the residual, for the next step" + ("" if fed_back else ": nothing"), "bold residual")
    if fed_back:
        entries(sheet, titles, after, scale, "residual")
    return sheet.svg()


def entries(sheet: Sheet, titles: Sequence[str], rows: Sequence[Tensor], scale: float, kind: str) -> None:
    """Draw each rank's entries, two ranks in a row; one alone takes the whole width. scale: the largest magnitude."""
    width = WIDTH / (2 if len(rows) > 1 else 1) - 2 * MARGIN
    for i, (title, row) in enumerate(zip(titles, rows, strict=True)):
        first, values = left(i % 2), row.tolist()
        zero, step = sheet.height + TITLE + LARGEST, width / len(values)
        sheet.text(first, title, "muted")
        bar = 0.7 * step if len(values) <= LABELLED else step
        path = "".join(
            f"M{first + at * step + (step - bar) / 2:.1f} {zero:g}v{-LARGEST * value / scale:.1f}h{bar:.2f}V{zero:g}z"
            for at, value in enumerate(values)
            if value
        )
        sheet.parts.append(f'<path d="{path}" class="{kind}"/>')
        sheet.line(first, first + width, TITLE + LARGEST)
        for at, value in enumerate(values if len(values) <= LABELLED else []):
            words = "number" if value else "number muted"
            sheet.text(first + (at + 0.5) * step, number(value), words, down=TITLE + 2 * LARGEST)
        if i % 2 or i == len(rows) - 1:
            sheet.height += TITLE + 2 * LARGEST + (LINE if len(values) <= LABELLED else 0) + 4


def left(place: int) -> float:
    """Return where a column begins."""
    return MARGIN + place * WIDTH / 2


def number(value: float) -> str:
    """Write a number with two digits and a true minus sign."""
    text = f"{value:.2g}"
    return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")
