"""Compute what a step's exchange costs a host as hosts are added: bytes at its interface, messages, and memory.

One rank on each host, of a residual net. Rank 0's messages are those of gradcomp's own code, on a network that records
them; no other rank sends more.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradcomp.core.requests import World
from gradcomp.prediction import measure
from gradcomp.prediction.link import RINGS, both_ways
from gradcomp.prediction.recording_network import Message
from laboratory import options, report
from laboratory.harness import ways
from laboratory.report import Progress, columns
from laboratory.tasks import cifar
from laboratory.timing import threads

SPECS = "stock;bf16;powersgd:rank=4;blocks;orq;topk;topk:route=split;topk:route=tree;gs_sgd;topk:by_host=true"
HOSTS = [4**power for power in range(1, 6)]
# Ranks on a host, for a spec that compresses between hosts alone.
OF_HOST = 8
# The bucket's size, and the channels of the net.
BUCKET_MB, WIDTH = 25, 96

EXAMPLES = """\
example:
  scripts/lab scale      # five minutes"""

Shapes = Mapping[str, Sequence[int]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--specs", type=ways.several, default=SPECS, help=f"(default: {SPECS})")
    options.add_places(parser, "none")


@threads(1)
def run(chosen: argparse.Namespace) -> int:
    """Compute every spec at every number of hosts, and write the table."""
    shapes = {name: tuple(each.shape) for name, each in cifar.residual(0, WIDTH, 1).named_parameters()}
    progress, lines = Progress(), list[dict[str, Any]]()
    for done, spec in enumerate(chosen.specs):
        for hosts in HOSTS:
            progress(f"{spec}, {hosts} hosts", done / len(chosen.specs))
            lines.append({"spec": spec, "hosts": hosts, **costs(spec, shapes, hosts)})
    progress.end()
    parameters = sum(math.prod(shape) for shape in shapes.values())
    rows = [["spec", *map(str, HOSTS)]]
    rows += [
        [spec, *(f"{each['interface_bytes'] / 1e6:,.1f}" for each in lines if each["spec"] == spec)] for spec in chosen.specs
    ]
    print(f"\n{parameters:,} parameters: megabytes at a host's interface, by hosts\n\n{columns(rows)}\n")
    report.save(chosen, None, {"parameters": parameters, "ranks_of_by_host": OF_HOST, "lines": lines})
    return 0


def costs(spec: str, shapes: Shapes, hosts: int) -> dict[str, float]:
    """Return the cost of a step's messages to a host: those of one rank, or of several where the spec acts between hosts."""
    of_host = OF_HOST if "by_host=true" in spec else 1
    world = World(0, hosts * of_host, tuple(rank // of_host for rank in range(hosts * of_host)))
    other = ways.other(spec)
    if other is not None and other[0] == "powersgd":
        messages = powersgd(shapes, int(other[1]))
    else:
        every = measure.measure(spec, shapes, world, BUCKET_MB, torch.device("cpu"))
        messages = [part.message for bucket in every for part in bucket.parts if part.message is not None]
    out, into = map(sum, zip(*(both_ways(message, world) for message in messages), strict=True))
    return {
        "interface_bytes": max(out, into),
        "messages": sum(sent(message, world) for message in messages),
        "received_bytes": sum(received(message, world) for message in messages),
    }


def sent(message: Message, world: World) -> int:
    """Return the messages that a rank sends for an operation."""
    return RINGS.get(message.kind, 0) * (world.size - 1) or len(message.to)


def received(message: Message, world: World) -> int:
    """Return the bytes of the reply to an operation, which a rank holds at once."""
    if message.kind == "gather":
        return world.size * message.bytes
    return message.bytes if message.kind == "reduce" else message.bytes_in * len(message.senders)


def powersgd(shapes: Shapes, rank: int) -> list[Message]:
    """List the reductions of torch's PowerSGD hook: vectors, and both factors of the matrices that these make smaller."""
    vectors = left = right = 0
    for shape in shapes.values():
        rows, n = shape[0], math.prod(shape)
        if len(shape) > 1 and 2 * rank * (rows + n // rows) < n:
            left, right = left + rank * rows, right + rank * (n // rows)
        else:
            vectors += n
    return [Message("reduce", 4 * n) for n in (vectors, left, right)]
