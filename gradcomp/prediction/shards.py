"""Measures FSDP2 over shards here: a rank gathers each module's weights and reduces its gradients, on a recording network.

A way says how gradients travel, and after " weights=" how weights do; without that, they travel in the model's own type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

import torch

from gradcomp.engine.gathered_weights import Division, GatheredWeights, bits_of
from gradcomp.engine.modules import Axis, ModuleDoor, is_native, rounded_of
from gradcomp.networks import gather
from gradcomp.prediction import measure
from gradcomp.prediction.link import Sharded
from gradcomp.prediction.measure import HALVES, NONE, DoStep
from gradcomp.prediction.recording_network import RecordingNetwork
from gradcomp.spec import make, names

# The baselines beside FSDP2 in the model's own type, and the advice to take them.
MIXED = {"stock weights=bf16": "stay with bfloat16 weights", "bf16 weights=bf16": "take bfloat16 for weights and gradients"}


def every_way() -> list[str]:
    """Return the specs that act over shards, beside bfloat16 weights, and one that rounds weights, too."""
    return [*(f"{name} weights=bf16" for name in names() if why_not(name) is None), "blocks weights=blocks:bits=8"]


def why_not(way: str) -> str | None:
    """Return why a way is not predicted; None: it is. Refuse one that is wrong."""
    gradients, _, weights = way.partition(" weights=")
    if weights and weights not in HALVES:
        bits_of(make(weights))
    if measure.accumulated(gradients) or (gradients == NONE and weights):
        return "under FSDP2, accumulation is not predicted, and none has no weights to gather"
    if not measure.is_baseline(gradients):
        compressor = make(gradients)
        try:
            ModuleDoor(has_shards=True).acts_on_updates(compressor)
        except ValueError as error:
            return str(error).replace(str(compressor), "it", 1)
    return None


def modules_of(layers: Collection[str]) -> dict[str, list[str]]:
    """Group layers by module, as scripts shard them: each part of a list, such as blocks.0, and before them the rest, ""."""
    modules: dict[str, list[str]] = {"": []}
    for name in layers:
        part = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
        modules.setdefault(part[0] if part else "", []).append(name)
    return {part: each for part, each in modules.items() if each}


# A layer's shape, whether it is trained, and the type of its weights.
Layer = tuple[tuple[int, ...], bool, torch.dtype]


def measure_shards(way: str, layers: Mapping[str, Layer], network: RecordingNetwork) -> list[Sharded]:
    """Let a rank do some steps. Return the modules in the order of forward. Equal ones are measured once."""
    modules = {part: tuple(layers[name] for name in each) for part, each in modules_of(layers).items()}
    places = {form: 2 * place for place, form in enumerate(dict.fromkeys(modules.values()))}
    acts = [act for form in places if way != NONE for act in _acts_of(form, way, network)]

    def do_step() -> None:
        for place, act in enumerate(acts):
            network.begin(place)
            act()
            network.close()

    found = measure.repeated(network, do_step, measure.SECONDS)
    entries = {form: sum(math.prod(shape) for shape, *_ in form) for form in places}
    whole = sum(entries[form] for form in modules.values())
    return [  # the rest keeps its weights until backward
        Sharded(entries[form] / whole, found.get(places[form], ()), found.get(places[form] + 1, ()), part != "")
        for part, form in modules.items()
    ]


def _acts_of(form: Sequence[Layer], way: str, network: RecordingNetwork) -> tuple[DoStep, DoStep]:
    """Return functions that gather a module's weights, and that reduce its gradients, with the copies that FSDP2 makes."""
    gradients, _, weights = way.partition(" weights=")
    own, ranks, device = form[0][2], network.world.size, network.device
    computed, reduced = HALVES.get(weights, torch.bfloat16 if weights else own), HALVES.get(gradients, own)
    division = Division.of([(math.prod(shape[1:]) * -(-(*shape, 1)[0] // ranks), len(shape)) for shape, *_ in form])
    part = sum(size for size, (_, trains, _) in zip(division.sizes, form, strict=True) if trains)
    kept = torch.randn(sum(division.sizes), device=device).to(own)
    gathered, copied = torch.empty(2, ranks * len(kept), dtype=computed, device=device)
    grads = torch.randn(ranks * part, device=device).to(computed)
    given, mean = torch.empty_like(grads, dtype=reduced), torch.empty(part, dtype=reduced, device=device)
    compressor = None if measure.is_baseline(gradients) else make(gradients)
    rounded = None if compressor is None or is_native(compressor) else rounded_of(compressor)
    axis = None if rounded is None else Axis(rounded, network, seed=0)
    rounds = weights and weights not in HALVES and division.rounded
    rounding = GatheredWeights(bits_of(make(weights)), network) if rounds else None

    def gather_weights() -> None:
        shard = gathered[: len(kept)].copy_(kept)
        if rounding is None:
            gather(network, shard, "weights")()
        else:
            rounding.gather(0, shard, gathered, division)
        copied.copy_(gathered)

    def reduce_gradients() -> None:
        if part:
            given.copy_(grads)
            if axis is None:
                gather(network, mean, "gradients")()  # a ring moves as much in a reduction to parts
            else:
                axis.scatter(0, given, mean, 1.0, 1)
            mean.to(own, copy=True)

    return gather_weights, reduce_gradients
