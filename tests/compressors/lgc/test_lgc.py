"""lgc: three phases, codes of the same entries from all ranks, and the checks of these codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gradients
import pytest
import reference
import torch
from laws import check_conservation
from learned_codes import MIDDLE, SHAPES, draw, learned, spec_of, states
from torch import Tensor

import gradcomp
from gradcomp.compressors.lgc import autoencoder
from gradcomp.compressors.lgc.phases import SUMMARY_LENGTH
from gradcomp.core.compressor import Layout
from gradcomp.engine.feedback import Feedback
from gradcomp.messages import ascending

LINE = 64


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def rows(n: int, ratio: float, world: int) -> tuple[int, int, int]:
    """Return rows, entries of a row, and entries of its part. Every rank leads, or one if entries are too few for parts."""
    count = world if n >= LINE * world else 1
    size = -(-n // (LINE * count)) * LINE
    k = max(1, math.ceil(ratio * -(-n // count)))
    return count, min(k, n // (LINE * count) * LINE if count > 1 else n), size


def lead_bytes(n: int, ratio: float, world: int, bands: int = 16, code: int = 0) -> int:
    """Count the bytes of a row's places, its scale, and the leader's code with `code` bytes a number."""
    _, k, size = rows(n, ratio, world)
    bands = min(bands, k)
    numbers = 4 * autoencoder.code_length(k)
    return 8 + _padded(ascending.length(bands * size, k)) + (_padded(code * numbers) if code else 0)


def _learning(ratio: float) -> Callable[[int, int, int], int]:
    """Promise the bytes of a step in which entries travel as they are. The last of the laws' layers has 1400 of them."""

    def promised(n: int, rank: int, world: int) -> int:
        last = 1400 if n > 60 else 0
        ends = reference.compact_bytes(last, math.ceil(ratio * last)) if last else 0
        n -= last
        count, k, _ = rows(n, ratio, world)
        lead = lead_bytes(n, ratio, world)
        led = lead if count > 1 else (world - 1) * lead if rank == 0 else 0
        return ends + led + _padded(4 * count * k) + 4 * SUMMARY_LENGTH

    return promised


PROMISED_BYTES: dict[str, Any] = {
    "lgc": lambda n: 4 * n,
    "lgc:dense=0,learn=500,ratio=0.1,window=64,first=code": _learning(0.1),
}

pytestmark = pytest.mark.usefixtures("one_thread")  # the autoencoder's tensors are small here

instances = pytest.mark.parametrize("knobs", ["", "instance=server"])


@pytest.mark.slow
@instances
def test_conservation_in_all_phases(knobs: str) -> None:
    simulation = gradcomp.Simulation(spec_of(knobs), SHAPES, 4)
    phases = []
    for step in range(22):
        check_conservation(simulation, draw(step))
        phases.append(simulation.stats()["phase"])
    assert phases == ["dense"] + ["learn"] * 15 + ["code"] * 6
    assert simulation.stats()["code_error"] < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 5])  # five ranks send codes in single precision
@instances
def test_conservation_for_any_number_of_ranks(knobs: str, world: int) -> None:
    simulation = learned(knobs, world)
    for step in range(100, 104):
        check_conservation(simulation, draw(step, world))


@pytest.mark.slow
@pytest.mark.parametrize("kind", gradients.KINDS)
@instances
def test_conservation_for_gradients_unlike_the_learned_ones(kind: str, knobs: str) -> None:
    """Check that poor codes lose nothing."""
    simulation = learned(knobs)
    for step in range(3):
        drawn = [
            {
                name: gradients.draw(kind, torch.Size(shape).numel(), 100 * step + 10 * rank + i, 4).view(shape)
                for i, (name, shape) in enumerate(SHAPES.items())
            }
            for rank in range(4)
        ]
        check_conservation(simulation, drawn)


def test_the_error_is_fed_back() -> None:
    """A code's error stays in the residual, which shrinks where entries were sent but does not vanish."""
    simulation = learned()
    before = [simulation.residual(rank)["a.weight"] for rank in range(4)]
    grads = draw(50)
    update = simulation.step(grads)["a.weight"]
    sent = update != 0
    assert int(sent.sum()) == pytest.approx(0.01 * MIDDLE, rel=0.05)
    for rank in range(4):
        had = before[rank] + grads[rank]["a.weight"]
        left = simulation.residual(rank)["a.weight"]
        assert reference.same(left[~sent], had[~sent])
        assert 0 < left[sent].norm() < 0.9 * had[sent].norm()


def code_bytes(knobs: str, world: int, ratio: float = 0.01) -> int:
    """Count the bytes of a step with codes where every rank leads: indices, codes, the last layer, innovations, the rest."""
    count, k, _ = rows(MIDDLE, ratio, world)
    server = knobs == "instance=server"
    numbers, each = 4 * autoencoder.code_length(k), 2 if server or world <= 4 else 4
    last = reference.compact_bytes(650, math.ceil(ratio * 650))
    first_and_notes = 4 * (144 + SUMMARY_LENGTH)
    if server:
        innovation = reference.compact_bytes(MIDDLE, 1)
        return last + lead_bytes(MIDDLE, ratio, world, code=each) + innovation + first_and_notes
    return last + lead_bytes(MIDDLE, ratio, world) + _padded(each * count * numbers) + first_and_notes


@pytest.mark.parametrize("world", [4, 5])
@instances
def test_bytes_of_codes_are_as_promised(knobs: str, world: int) -> None:
    simulation = learned(knobs, world)
    simulation.step(draw(50, world))
    assert simulation.stats()["phase"] == "code"
    assert simulation.bytes_sent == [code_bytes(knobs, world)] * world


def test_lower_precision_of_the_user_is_not_that_of_codes() -> None:
    simulation = learned("", 5)
    with torch.autocast("cpu", torch.bfloat16):
        check_conservation(simulation, draw(50, 5))


def test_innovations_at_any_index_begin_to_age_anew() -> None:
    simulation = learned("instance=server,momentum=0.9,innovation=0.01")
    update = simulation.step(draw(30))["a.weight"]
    bucket = simulation._reducers[1].buckets[0]
    fresh = bucket.layout.views(bucket.progress.ages)["a.weight"] == 0
    assert int(fresh.sum()) > 0.0125 * MIDDLE  # more than the 0.01 at common places
    assert bool((update.flatten()[fresh] != 0).all())


def test_a_step_that_waits_takes_nothing() -> None:
    simulation = learned("momentum=0.9")
    for state in states(simulation):
        state.coder.taps.mul_(50.0)
    own = simulation._reducers[2].buckets[0]
    ages, middle = own.progress.ages, states(simulation)[2].middle
    before, grads = own.progress.residual.clone(), draw(30)
    update = simulation.step(grads)
    assert not update["a.weight"].any() and not update["a.bias"].any()
    assert update["conv1.weight"].all() and update["fc.weight"].any()  # the ends travel all the same
    assert (ages[middle] != 0).all()
    whole = torch.cat([grads[2][name].flatten() for name in own.layout.names]) / (1 - 0.9)
    torch.testing.assert_close(own.progress.residual[middle], before[middle] + whole[middle])


def test_an_overflow_reaches_all_ranks_and_no_residual_with_codes() -> None:
    for knobs, world in (("", 4), ("instance=server", 4), ("", 5)):
        simulation = learned(knobs, world)
        grads = draw(50, world)
        before = residuals_of(simulation)
        grads[2]["a.weight"][0, 0, 0, 0] = math.nan
        update = simulation.step(grads)
        assert not update["a.weight"].isfinite().all()
        after = residuals_of(simulation)
        grads[2]["a.weight"][0, 0, 0, 0] = 0
        for rank in range(world):
            assert torch.allclose(after[rank], before[rank] + grads[rank]["a.weight"], rtol=1e-6, atol=1e-6)
        assert all(part.isfinite().all() for part in simulation.step(draw(51, world)).values())


def residuals_of(simulation: gradcomp.Simulation) -> list[Tensor]:
    return [simulation.residual(rank)["a.weight"] for rank in range(len(simulation._reducers))]


def parts_of(names: dict[str, int], knobs: str = ":first=dense") -> list[list[str]]:
    """List the layers that travel by their largest entries, as a code, and dense."""
    compressor = gradcomp.make("lgc" + knobs)
    assert isinstance(compressor, Feedback)
    layout = Layout(tuple(reversed(names)), tuple(names[name] for name in reversed(names)), torch.device("cpu"))
    state = compressor.inner.init(layout, 0)
    ends = [(part.start, part.stop) for part in (state.last, state.middle, state.first)]
    return [[n for n, (b, e) in zip(layout.names, layout.spans, strict=True) if begin <= b and e <= end] for begin, end in ends]


def test_first_and_last_layers_are_apart() -> None:
    net = {
        "stem.conv.weight": 90,
        "stem.conv.bias": 10,
        "body.0.weight": 70,
        "body.1.weight": 80,
        "fc.weight": 50,
        "fc.bias": 5,
    }
    assert parts_of(net) == [
        ["fc.bias", "fc.weight"],
        ["body.1.weight", "body.0.weight"],
        ["stem.conv.bias", "stem.conv.weight"],
    ]
    assert parts_of(net, ":first=code") == [["fc.bias", "fc.weight"], list(reversed(list(net)[:4])), []]
    assert parts_of({"w": 30}) == [[], ["w"], []]
    assert parts_of({"a.weight": 30, "b.weight": 30}) == [[], ["b.weight", "a.weight"], []]
    assert parts_of({"a": 30, "b": 30, "c": 20}) == [["c"], ["b"], ["a"]]
    nameless = {f"allreduce.noname.0.{i}": 30 for i in range(3)}  # as Horovod calls them
    assert [len(part) for part in parts_of(nameless)] == [1, 1, 1]


def test_a_large_first_layer_is_coded_unless_it_is_to_be_dense() -> None:
    net = {"embedding.weight": 1000, "body.weight": 900, "fc.weight": 100}
    assert parts_of(net, ":first=auto")[2] == []
    assert parts_of(net, ":first=dense")[2] == ["embedding.weight"]
    assert parts_of({**net, "body.weight": 99_900}, ":first=auto")[2] == ["embedding.weight"]


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3]])
@pytest.mark.parametrize("knobs", ["", "instance=server", "max_code_error=inf", "max_code_error=inf,instance=server"])
def test_a_spike_leaves_every_value_finite_with_codes(knobs: str, ranks: list[int]) -> None:
    simulation = learned(knobs)
    for step in range(6):
        grads = draw(50 + step)
        if step == 1:
            for rank in ranks:
                grads[rank] = {name: 3e38 * grad.sign() for name, grad in grads[rank].items()}
        if step == 2:
            grads[2]["a.weight"][0, 0, 0, 0] = 3e38
        assert all(part.isfinite().all() for part in simulation.step(grads).values())
        for rank in range(4):
            assert all(part.isfinite().all() for part in simulation.residual(rank).values())
