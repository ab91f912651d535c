"""Drawings of compressors that send whole entries: all of them, or the largest with their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradcomp.core.requests import Payload
from gradcomp.messages.codec import Entries
from gradcomp.messages.sparse import COMPACT, EXACT
from laboratory.drawings.canvas import RESIDUAL, SENT, UPDATE, WAITS, Canvas, Panel, number
from laboratory.drawings.trace import Message, Trace, trace

# The gradients of four ranks; most drawings need two.
GRADS = [
    [1.0, -6.0, 2.0, 0.0, 3.0, -2.0, 8.0, 2.0],
    [2.0, -5.0, 0.0, 7.0, 1.0, -3.0, 2.0, -4.0],
    [0.0, -4.0, 5.0, 1.0, -2.0, 1.0, 1.0, 3.0],
    [1.0, 2.0, 6.0, 0.0, -3.0, 0.0, -1.0, -2.0],
]
# Entries that 16 bits do not hold.
FRACTIONS = [[3.1416, -1.2345, 2.7183, 0.5772], [1.4142, 0.3333, -1.6180, 2.2361]]


def largest(step: Trace) -> float:
    """Return the largest magnitude of a step: the scale of its bars."""
    return max(abs(value) for values in (*step.accs, step.update, *step.residuals) for value in values)


def ranks(step: Trace, taken: Sequence[Mapping[int, float]] = (), lines: Sequence[float] = ()) -> list[Panel]:
    """Make a panel for each rank's entries. taken: the entries that each rank sends. lines: each rank's threshold."""
    panels = []
    for rank, values in enumerate(step.accs):
        chosen = taken[rank] if taken else dict.fromkeys(range(len(values)), 0.0)
        colours = [SENT if place in chosen else WAITS for place in range(len(values))]
        levels = (lines[rank], -lines[rank]) if lines else ()
        panels.append(Panel(f"rank {rank}", values, colours, levels))
    return panels


def finish(canvas: Canvas, step: Trace, way: str, nothing: str = "", columns: int = 2) -> str:
    """Draw what all drawings end with: the update on all ranks, and each rank's residual. nothing: why nothing stays."""
    scale = largest(step)
    canvas.arrow(way)
    canvas.heading("On every rank: the update", UPDATE)
    several = len(step.update) > 16
    canvas.panels([Panel("", step.update, [UPDATE] * len(step.update), labelled=not several)], scale, 1)
    canvas.heading("Stays in the residual, for the next step", RESIDUAL)
    if nothing:
        canvas.note(nothing)
    else:
        residuals = [
            Panel(f"rank {rank}", values, [RESIDUAL] * len(values), labelled=not several)
            for rank, values in enumerate(step.residuals)
        ]
        canvas.panels(residuals, scale, columns)
    return canvas.svg()


def dense() -> str:
    """Draw a step of dense."""
    step = trace("dense", [GRADS[:2]])
    canvas = Canvas("dense: every entry travels as it is")
    canvas.heading("In each rank: the gradient", WAITS)
    canvas.panels(ranks(step), largest(step))
    canvas.heading("Sent: every entry, 4 bytes each", SENT)
    canvas.boxes([[f"{len(step.update)} entries, {size} bytes"] for size in step.bytes_sent])
    return finish(canvas, step, "allreduce: the sum over the ranks", "Nothing.")


def half() -> str:
    """Draw a step of half."""
    step = trace("half", [FRACTIONS])
    canvas = Canvas("half: every entry travels in 16 bits")
    canvas.heading("In each rank: the gradient", WAITS)
    canvas.panels(ranks(step), largest(step))
    canvas.heading("Sent: the nearest number of bf16, 2 bytes each", SENT)
    texts = []
    for values, messages in zip(step.accs, step.messages, strict=True):
        rounded = _payload(messages[0])["values"].tolist()
        texts.append([f"{number(value, 5)} as {number(sent, 8)}" for value, sent in zip(values, rounded, strict=True)])
    canvas.boxes(texts)
    return finish(canvas, step, "gather, and the mean in float32", "Nothing: the rounding errors are lost.")


def topk() -> str:
    """Draw a step of topk."""
    step = trace("topk:ratio=0.25", [GRADS[:2]])
    canvas = Canvas("topk: the largest entries travel with their places")
    canvas.heading("In each rank: residual + gradient", WAITS)
    taken = [_entries(messages[0]) for messages in step.messages]
    canvas.panels(ranks(step, taken), largest(step))
    canvas.heading("Sent: the largest quarter, as powers of two", SENT)
    canvas.boxes(_texts(step, taken))
    return finish(canvas, step, "gather: all payloads to all ranks")


def sdagc() -> str:
    """Draw a step of sdagc."""
    step = trace("sdagc:density=0.25", [GRADS[:2]])
    canvas = Canvas("sdagc: the entries beyond a threshold travel with their places")
    canvas.heading("In each rank: residual + gradient", WAITS)
    taken = [_entries(messages[0]) for messages in step.messages]
    bars = [float(state.inner.thresholds[0]) for state in step.states]
    canvas.panels(ranks(step, taken, bars), largest(step))
    canvas.note("Dashed: lam times the entries' standard deviation")
    canvas.heading("Sent: what is beyond it, as powers of two", SENT)
    canvas.boxes(_texts(step, taken))
    return finish(canvas, step, "gather: all payloads to all ranks")


def gtopk() -> str:
    """Draw a step of gtopk."""
    step = trace("gtopk:ratio=0.25", [GRADS])
    canvas = Canvas("gtopk: the largest entries are merged up a tree")
    taken = [_entries(next(each for each in messages if each.payload), EXACT.read) for messages in step.messages]
    own = [dict.fromkeys(_largest(values, len(taken[0])), 0.0) for values in step.accs]
    canvas.heading("In each rank: residual + gradient", WAITS)
    canvas.panels(ranks(step, own), largest(step))
    canvas.heading("Sent: two sums a message, as they are", SENT)
    canvas.boxes([_tree(step)], 1)
    return finish(canvas, step, "the sums that came through, over the number of ranks")


def _tree(step: Trace) -> list[str]:
    """Write a line for each message of a tree; the root's last message goes down the tree to all."""
    lines, rounds = [], len(step.messages[0])
    for number_ in range(rounds // 2):
        for rank, messages in enumerate(step.messages):
            message = messages[number_]
            lines += [f"round {number_ + 1}, rank {rank} to {to}: {_sums(step, message)}" for to in message.to]
    root = next(message for message in step.messages[0][rounds // 2 :] if message.to)
    return [*lines, f"then rank 0 to all: {_sums(step, root)}"]


def _sums(step: Trace, message: Message) -> str:
    share = 2.0 ** -(step.ranks - 1).bit_length()
    found = _entries(message, EXACT.read)
    return ", ".join(f"entry {place} is {number(value / share)}" for place, value in found.items())


def _largest(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda place: -abs(values[place]))[:count]


def _payload(message: Message) -> Payload:
    assert message.payload is not None
    return message.payload


def _entries(message: Message, read: Callable[[Payload], Entries] = COMPACT.read) -> dict[int, float]:
    values, places, header = read(_payload(message))
    count = int(header[0])
    return dict(zip(places[:count].tolist(), values[:count].tolist(), strict=True))


def _texts(step: Trace, taken: Sequence[Mapping[int, float]]) -> list[list[str]]:
    texts = []
    for values, entries, size in zip(step.accs, taken, step.bytes_sent, strict=True):
        lines = [f"entry {place}: {number(values[place])} as {number(value)}" for place, value in entries.items()]
        texts.append([*lines, f"{size} bytes, 8 of them a header"])
    return texts
