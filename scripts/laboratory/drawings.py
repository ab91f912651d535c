"""The drawings of docs/algorithms: a step of simulated ranks, with the entries that each rank sends and those that stay."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from torch import Tensor

import gradcomp
from gradcomp.core.compressor import Acc
from gradcomp.core.requests import Gather, Reduce, Request, Send, World
from gradcomp.core.wrapper import Wrapper

# Inches: the card, its margins, a row of bars, a line of text, and the height of the sheet that it is drawn on.
WIDTH, MARGIN, BARS, LINE, SHEET = 5.2, 0.16, 0.95, 0.19, 20.0
INK, MUTED, AXIS = "#24292f", "#5f6873", "#b0b7c0"
BEFORE, SENT, UPDATE, RESIDUAL = "#9aa7b5", "#e07b00", "#0f8f83", "#8a6fc4"
# How the card and its words look on a dark page.
DARK = "".join(
    f' [style*="{light}"] {{fill: {dark} !important}}'
    for light, dark in (("#ffffff", "#1e2129"), (INK, "#e2e4e9"), (MUTED, "#a5adba"), (AXIS, "#6b7686"))
)
STYLE = f"<style>@media (prefers-color-scheme: dark) {{{DARK} }}</style>"
# The most bars with written values.
LABELLED = 8

SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gradcomp",  # the same file every time
    "font.family": "sans-serif",
    "font.sans-serif": ["Roboto", "Helvetica", "Arial", "DejaVu Sans", "sans-serif"],
    "font.size": 8.5,
}

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


@matplotlib.rc_context(SETTINGS)
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
    card = Card(max(float(tensor.abs().max()) for tensor in (*before, mean)))
    titles = [f"rank {rank}" for rank in ranks]
    card.heading("In each rank: residual + gradient" if fed_back else "In each rank: the gradient", BEFORE)
    card.bars(titles, before, BEFORE)
    card.heading("Taken out of it, and sent", SENT)
    card.bars(titles, [b - a for b, a in zip(before, after, strict=True)], SENT)
    card.columns([recorded.requests[rank] for rank in ranks])
    card.heading("On every rank: the update, the mean of what was sent", UPDATE)
    card.bars([""], [mean], UPDATE)
    card.heading("Stays in the residual, for the next step" + ("" if fed_back else ": nothing"), RESIDUAL)
    if fed_back:
        card.bars(titles, after, RESIDUAL)
    return card.svg(f"{name}: {drawing.title}")


class Card:
    """A picture that grows downwards on a high sheet, which is cut at its end. scale: the largest magnitude."""

    def __init__(self, scale: float):
        self.figure, self.height, self.scale = Figure(figsize=(WIDTH, SHEET), facecolor="white"), MARGIN, scale

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        """Write words at a distance from the left and from the top."""
        self.figure.text(x / WIDTH, 1 - y / SHEET, words, **{"color": INK, **style})

    def heading(self, words: str, colour: str) -> None:
        """Begin a section."""
        self.height += 1.6 * LINE
        self.text(MARGIN, self.height - 0.3 * LINE, words, color=colour, weight="bold", size=9.5)

    def columns(self, columns: Sequence[Sequence[str]]) -> None:
        """Write lines side by side, two columns in a row."""
        for start in range(0, len(columns), 2):
            row = columns[start : start + 2]
            for place, lines in enumerate(row):
                for i, line in enumerate(lines):
                    self.text(_left(place), self.height + (i + 0.8) * LINE, line, color=MUTED)
            self.height += LINE * max(map(len, row))

    def bars(self, titles: Sequence[str], rows: Sequence[Tensor], colour: str) -> None:
        """Draw each rank's entries, two ranks in a row; one alone takes the whole width."""
        width = _left(1) - MARGIN - 0.1 if len(rows) > 1 else WIDTH - 2 * MARGIN
        for i, (title, values) in enumerate(zip(titles, rows, strict=True)):
            self.height += BARS if i % 2 == 0 else 0
            left, bottom = _left(i % 2), self.height
            self.text(left, bottom - BARS + 0.8 * LINE, title, color=MUTED)
            axes = self.figure.add_axes((left / WIDTH, 1 - bottom / SHEET, width / WIDTH, (BARS - 1.2 * LINE) / SHEET))
            axes.set_axis_off()
            axes.set(xlim=(-0.6, len(values) - 0.4), ylim=(-1.45 * self.scale, 1.05 * self.scale))
            if len(values) > LABELLED:  # one path for all, not one for each
                axes.stairs(values.tolist(), torch.arange(len(values) + 1) - 0.5, baseline=0, fill=True, color=colour)
            else:
                axes.bar(range(len(values)), values.tolist(), width=0.7, color=colour)
            axes.axhline(0, color=AXIS, linewidth=0.8)
            for place, value in enumerate(values.tolist() if len(values) <= LABELLED else []):
                axes.text(place, -1.45 * self.scale, number(value), ha="center", color=INK if value else AXIS, size=7.5)

    def svg(self, title: str) -> str:
        """Return the picture's text."""
        cut, out = Bbox([[0, SHEET - self.height - MARGIN], [WIDTH, SHEET]]), io.StringIO()
        self.figure.savefig(out, format="svg", bbox_inches=cut, metadata={"Title": title, "Date": None, "Creator": None})
        drawn = out.getvalue().replace(" </defs>", f"  {STYLE}\n </defs>", 1)
        return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def _left(place: int) -> float:
    return MARGIN + place * (WIDTH / 2 - MARGIN / 2)


def number(value: float) -> str:
    """Write a number with two digits and a true minus sign."""
    text = f"{value:.2g}"
    return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")
