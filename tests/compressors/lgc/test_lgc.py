"""lgc: three phases, codes that all ranks send of the same entries, and what keeps them from going wrong."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import gradients
import pytest
import reference
import torch
from laws import check_conservation
from torch import Tensor

import gradcomp
from gradcomp.compressors.lgc import autoencoder
from gradcomp.compressors.lgc.code_error import SUMMARY_LENGTH
from gradcomp.compressors.lgc.phases import MOST_BAD_STEPS
from gradcomp.engine.feedback import Feedback
from gradcomp.engine.reducer import Reducer
from gradcomp.exchanges.delayed_counts import DELAY
from gradcomp.messages import places
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.protocol import Layer, Layout

LINE = 64


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def rows(n: int, ratio: float, world: int) -> tuple[int, int, int]:
    """Where every rank leads, or one if there are too few entries for parts: rows, entries of a row, and of its part."""
    count = world if n >= LINE * world else 1
    size = -(-n // (LINE * count)) * LINE
    k = max(1, math.ceil(ratio * -(-n // count)))
    return count, min(k, n // (LINE * count) * LINE if count > 1 else n), size


def lead_bytes(n: int, ratio: float, world: int, bands: int = 16, code: int = 0) -> int:
    """A row's places, its scale, and the leader's code of so many bytes a number."""
    _, k, size = rows(n, ratio, world)
    bands = min(bands, k)
    numbers = 4 * autoencoder.code_length(k)
    return 8 + _padded(places.length(bands * size, k)) + (_padded(code * numbers) if code else 0)


def _learning(ratio: float) -> Callable[[int, int, int], int]:
    """A step in which entries travel as they are."""

    def promised(n: int, rank: int, world: int) -> int:
        count, k, _ = rows(n, ratio, world)
        lead = lead_bytes(n, ratio, world)
        led = lead if count > 1 else (world - 1) * lead if rank == 0 else 0
        return led + _padded(4 * count * k) + 4 * SUMMARY_LENGTH

    return promised


ENDS = "first=code,last=code"
PROMISED_BYTES: dict[str, Any] = {
    "lgc": lambda n: 4 * n,
    f"lgc:dense=0,learn=500,ratio=0.1,window=64,{ENDS}": _learning(0.1),
}

SHAPES = {"conv1.weight": (16, 1, 3, 3), "a.weight": (64, 32, 3, 3), "a.bias": (64,), "fc.weight": (10, 64), "fc.bias": (10,)}
MIDDLE = 64 * 32 * 9 + 64


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """The autoencoder's tensors are small here."""


def common(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 3
        for name, shape in SHAPES.items()
    }


def draw(step: int, world: int = 4, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """Gradients that ranks have in common in part."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        {name: scale * (part + 0.3 * torch.randn(part.shape, generator=generator)) for name, part in common().items()}
        for _ in range(world)
    ]


def spec_of(knobs: str, learn: int = 15) -> str:
    return f"lgc:dense=1,learn={learn},ratio=0.01,window=2048{',' if knobs else ''}{knobs}"


@functools.cache
def state_after_learning(knobs: str, world: int) -> dict[str, Any]:
    simulation = gradcomp.Simulation(spec_of(knobs), SHAPES, world)
    for step in range(16):
        simulation.step(draw(step, world))
    assert simulation.stats()["phase"] == "learn"
    return simulation.state_dict()


def learned(knobs: str = "", world: int = 4) -> gradcomp.Simulation:
    """A simulation whose next step is the first with codes."""
    simulation = gradcomp.Simulation(spec_of(knobs), SHAPES, world)
    simulation.load_state_dict(state_after_learning(knobs, world))
    return simulation


INSTANCES = [
    "",
    "instance=server",
    "leader=rotate",
    "instance=server,leader=seed",
    "code=single",
    "instance=server,code=single",
]
instances = pytest.mark.parametrize("knobs", INSTANCES)


@instances
def test_conservation_in_all_phases(knobs: str) -> None:
    simulation = gradcomp.Simulation(spec_of(knobs), SHAPES, 4)
    phases = []
    for step in range(22):
        check_conservation(simulation, draw(step))
        phases.append(simulation.stats()["phase"])
    assert phases == ["dense"] + ["learn"] * 15 + ["code"] * 6
    assert simulation.stats()["code_error"] < 0.9 and simulation.stats()["code_off"] < 1e-5


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("knobs", ["", "instance=server", "instance=server,leader=rotate"])
def test_conservation_for_any_number_of_ranks(knobs: str, world: int) -> None:
    simulation = learned(knobs, world)
    for step in range(100, 104):
        check_conservation(simulation, draw(step, world))


@pytest.mark.parametrize("kind", gradients.KINDS)
@pytest.mark.parametrize("knobs", ["", "instance=server"])
def test_conservation_whatever_codes_meet(kind: str, knobs: str) -> None:
    """Also where they are far from anything that was learned from."""
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
    """What a code misses stays: a residual of what was sent is not zero, and smaller than what it was."""
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


def test_what_a_published_decoder_is_off_by_is_said() -> None:
    simulation = learned("decoder=leaky,bound=10")
    for _ in range(10):
        before = [simulation.residual(rank)["a.weight"] for rank in range(4)]
        grads = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(4)]
        update = simulation.step(grads)["a.weight"]
        had = torch.stack([own["a.weight"] for own in grads]) + torch.stack(before)
        left = torch.stack([simulation.residual(rank)["a.weight"] for rank in range(4)])
        sent = update != 0
        off = ((had - left).mean(0) - update)[sent].norm() / had.mean(0)[sent].norm()
        assert off > 1e-5  # a linear one is off by 1e-7
        said = simulation.stats()["code_off"]
        assert off / 3 < said < 3 * off  # a quotient of two sums of sixteen squares


def test_with_a_server_nothing_is_lost_whatever_the_decoder() -> None:
    simulation = learned("instance=server,decoder=leaky")
    for step in range(50, 53):
        check_conservation(simulation, draw(step))
        assert simulation.stats()["code_off"] < 1e-5


def code_bytes(instance: str, world: int = 4, half: bool = True, ratio: float = 0.01) -> int:
    """Of a step with codes, where every rank leads: places and codes, entries of the last layer, innovations, the rest."""
    count, k, _ = rows(MIDDLE, ratio, world)
    numbers, each = 4 * autoencoder.code_length(k), 2 if half else 4
    last = 8 + 8 + _padded(4 * math.ceil(ratio * 650))
    first_and_notes = 4 * (144 + SUMMARY_LENGTH)
    if instance == "server":
        return last + lead_bytes(MIDDLE, ratio, world, code=each) + (8 + 8 + 8) + first_and_notes  # one innovation
    return last + lead_bytes(MIDDLE, ratio, world) + _padded(each * count * numbers) + first_and_notes


@pytest.mark.parametrize("knobs,wanted", [
    ("", code_bytes("ring")),
    ("code=single", code_bytes("ring", half=False)),
    ("instance=server", code_bytes("server")),
    ("instance=server,code=single", code_bytes("server", half=False)),
])  # fmt: skip
def test_bytes_of_codes_are_as_promised(knobs: str, wanted: int) -> None:
    simulation = learned(knobs)
    simulation.step(draw(50))
    assert simulation.stats()["phase"] == "code"
    assert simulation.bytes_sent == [wanted] * 4


def test_one_leader_sends_its_places_to_all_others() -> None:
    simulation = learned("leader=rotate")
    simulation.step(draw(50))
    lead = lead_bytes(MIDDLE, 0.01, 1)
    rest = code_bytes("ring") - lead_bytes(MIDDLE, 0.01, 4)
    sent = sorted(simulation.bytes_sent)
    assert sent[3] - sent[0] == 3 * lead and sent[0] == sent[1] == sent[2]
    assert sent[0] == pytest.approx(rest, abs=64)  # codes of one row in place of four


def test_a_state_that_is_loaded_replaces_what_was_there() -> None:
    """As where a job goes back to a checkpoint without being started anew."""
    spec = spec_of("", learn=9)
    simulation = gradcomp.Simulation(spec, SHAPES, 4)
    states_at = {}
    for step in range(30):
        if step in (0, 20):
            states_at[step] = simulation.state_dict()
        simulation.step(draw(step))
    for at, state in states_at.items():
        fresh = gradcomp.Simulation(spec, SHAPES, 4)
        for restored in (simulation, fresh):
            restored.load_state_dict(state)
        for step in range(at, at + 13):
            ours, theirs = simulation.step(draw(step)), fresh.step(draw(step))
            assert all(reference.same(ours[name], theirs[name]) for name in SHAPES)
        assert (
            simulation.state_dict()["ranks"][0]["buckets"][0]["own"]["inner"]["phases"]
            == (fresh.state_dict()["ranks"][0]["buckets"][0]["own"]["inner"]["phases"])
        )


def test_lower_precision_of_the_user_is_not_that_of_codes() -> None:
    simulation = learned("code=single")
    with torch.autocast("cpu", torch.bfloat16):
        check_conservation(simulation, draw(50))


@pytest.mark.parametrize("knobs", ["", "instance=server"])
def test_training_on_codes_reaches_the_minimum(knobs: str) -> None:
    """After few steps of learning, with codes that are hardly good enough: those that are not have to be found out."""
    torch.manual_seed(0)
    goal = torch.randn(2000)
    simulation = gradcomp.Simulation(f"lgc:dense=0,learn=60,ratio=0.01,{knobs}".rstrip(","), {"w": (2000,)}, world=1)
    w, coded = torch.zeros(2000), 0
    for _ in range(1500):
        w -= 0.004 * simulation.step([{"w": w - goal}])["w"]
        coded += simulation.stats()["phase"] == "code"
    assert (w - goal).norm() < 0.02 * goal.norm()
    assert coded > 200


@pytest.mark.parametrize("at", [1, 5, 9, 25])
@pytest.mark.parametrize("knobs", ["momentum=0.9", "instance=server", "leader=seed"])
def test_stopping_and_resuming_continues_to_the_bit_in_every_phase(knobs: str, at: int) -> None:
    spec = spec_of(knobs, learn=9)
    first = gradcomp.Simulation(spec, SHAPES, 4, seed=5)
    for step in range(at):
        first.step(draw(step))
    second = gradcomp.Simulation(spec, SHAPES, 4, seed=5)
    second.load_state_dict(first.state_dict())
    for step in range(at, 29):
        ours, theirs = first.step(draw(step)), second.step(draw(step))
        assert all(reference.same(ours[name], theirs[name]) for name in SHAPES), f"step {step}"
    assert first.stats()["phase"] == second.stats()["phase"] == "code"


@pytest.mark.parametrize("times", [3.5, 50.0])  # somewhat off, whose errors would add up; and quite
@pytest.mark.parametrize("knobs", ["", "instance=server", "leader=rotate"])
def test_a_forced_divergence_recovers(knobs: str, times: float) -> None:
    """Codes that say nothing are not used; soon all ranks learn anew at the same step, and then codes are used again."""
    simulation = learned(knobs)
    for step in range(30, 36):
        simulation.step(draw(step))
    assert simulation.stats()["code_error"] < 0.9
    for reducer in simulation._reducers:  # what a worn-out or damaged decoder says
        coder = reducer.buckets[0].state.inner.coder
        coder.taps.mul_(times)
    phases = []
    for step in range(36, 36 + DELAY + MOST_BAD_STEPS + 30 + 7):
        update = simulation.step(draw(step))
        assert max(float(part.abs().max()) for part in update.values()) < 400  # what has waited all the time, no more
        phases.append({reducer.stats()["phase"] for reducer in simulation._reducers})
    began = phases.index({"learn"})
    assert DELAY + MOST_BAD_STEPS <= began <= DELAY + MOST_BAD_STEPS + 2  # not every step need be found off
    assert phases == [{"code"}] * began + [{"learn"}] * 30 + [{"code"}] * (len(phases) - began - 30)
    assert simulation.stats()["code_error"] < 0.9 and simulation.stats()["learned_anew"] == 1


def states(simulation: gradcomp.Simulation) -> list[Any]:
    """What lgc keeps, of every rank."""
    return [reducer.buckets[0].state.inner for reducer in simulation._reducers]


def test_what_is_learned_anew_begins_anew() -> None:
    simulation = learned()
    for state in states(simulation):
        state.coder.taps.mul_(50.0)
    fresh = states(gradcomp.Simulation(spec_of(""), SHAPES, 4))[0]
    for step in range(30, 30 + DELAY + MOST_BAD_STEPS):
        simulation.step(draw(step))
    drawn = autoencoder.Autoencoder(1, False, True, fresh.seed, torch.device("cpu"))
    for state in states(simulation):
        assert torch.equal(state.coder.weights, drawn.weights) and torch.equal(state.coder.taps, drawn.taps)
        assert state.coder.steps == 0 and not state.coder.moments.any()


def test_ranks_that_learned_something_else_agree_before_codes_are_used() -> None:
    """As they do where one's processor adds up in another order."""
    simulation = gradcomp.Simulation(spec_of("", learn=3), SHAPES, 4)
    for step in range(3):
        simulation.step(draw(step))
    for rank, state in enumerate(states(simulation)):
        state.coder.weights += 1e-4 * rank
    simulation.step(draw(3))
    first, *others = states(simulation)
    for state in others:
        assert torch.equal(state.coder.weights, first.coder.weights) and torch.equal(state.coder.taps, first.coder.taps)
    simulation.step(draw(4))  # which holds the ranks' updates equal
    assert simulation.stats()["phase"] == "code"


def test_innovations_start_with_fresh_momentum_wherever_they_are() -> None:
    simulation = learned("instance=server,momentum=0.9,innovation=0.01")
    update = simulation.step(draw(30))["a.weight"]
    own = simulation._reducers[1].buckets[0].state
    bucket = simulation._reducers[1].buckets[0]
    velocity = bucket.layout.views(own.velocity)["a.weight"]
    fresh = velocity == 0
    assert int(fresh.sum()) > 0.0125 * MIDDLE  # more than the 0.01 at common places
    assert bool((update.flatten()[fresh] != 0).all())


def test_entries_that_were_sent_start_with_fresh_momentum() -> None:
    for masking in (True, False):
        simulation = gradcomp.Simulation(spec_of(f"momentum=0.9,masking={masking}"), SHAPES, 4)
        for step in range(18):
            update = simulation.step(draw(step))["a.weight"]
            own = simulation._reducers[1].buckets[0].state
            velocity = simulation._reducers[1].buckets[0].layout.views(own.velocity)["a.weight"].view_as(update)
            if step:  # what was dense keeps its momentum
                assert bool((velocity[update != 0] == 0).all()) == masking
            else:
                assert (velocity != 0).all()
        assert simulation.stats()["phase"] == "code"


def test_a_step_that_waits_takes_nothing() -> None:
    simulation = learned("momentum=0.9")
    for state in states(simulation):
        state.coder.taps.mul_(50.0)
    own = simulation._reducers[2].buckets[0].state
    middle = states(simulation)[2].middle
    before = own.residual.clone()
    update = simulation.step(draw(30))
    assert not update["a.weight"].any() and not update["a.bias"].any()
    assert update["conv1.weight"].all() and update["fc.weight"].any()  # the ends travel all the same
    assert (own.velocity[middle] != 0).all()
    assert reference.same(own.residual[middle], before[middle] + own.velocity[middle])


def test_decoders_for_another_number_of_ranks_have_to_be_learned() -> None:
    """A job that continues from a checkpoint with other ranks has none of its decoders for them."""
    for knobs, phase in (("instance=server", "learn"), ("", "code")):
        state = state_after_learning(knobs, 4)
        fewer = gradcomp.Simulation(spec_of(knobs), SHAPES, 2)
        fewer.load_state_dict({**state, "ranks": state["ranks"][:2]})
        fewer.step(draw(30, 2))
        assert fewer.stats()["phase"] == phase


def test_what_is_not_finite_reaches_all_ranks_and_no_residual_with_codes() -> None:
    for knobs in ("", "instance=server", "code=single"):
        simulation = learned(knobs)
        grads = draw(50)
        before = residuals_of(simulation)
        grads[2]["a.weight"][0, 0, 0, 0] = math.nan
        update = simulation.step(grads)
        assert not update["a.weight"].isfinite().all()
        after = residuals_of(simulation)
        grads[2]["a.weight"][0, 0, 0, 0] = 0
        for rank in range(4):
            assert torch.allclose(after[rank], before[rank] + grads[rank]["a.weight"], rtol=1e-6, atol=1e-6)
        assert all(part.isfinite().all() for part in simulation.step(draw(51)).values())


def residuals_of(simulation: gradcomp.Simulation) -> list[Tensor]:
    return [simulation.residual(rank)["a.weight"] for rank in range(4)]


def parts_of(names: dict[str, int], knobs: str = ":first=dense") -> list[list[str]]:
    """What travels as it is by its largest entries, as a code, and dense."""
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
    assert parts_of(net, ":last=code")[0] == []
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


def test_a_falling_learning_rate_refreshes_the_code() -> None:
    """Where the rates are known: with Horovod's optimizer, or Compression(optimizer=...)."""
    rate, board = [0.1], Board(1)
    layers = {name: Layer(torch.Size(shape).numel(), torch.device("cpu"), len(shape)) for name, shape in SHAPES.items()}
    compressor = gradcomp.make("lgc:dense=1,learn=4,ratio=0.01")
    reducer = Reducer(
        compressor,
        layers,
        MemoryNetwork(board, 0, 1),
        25,
        0,
        rates=lambda name: rate[0],
        deliver=lambda bucket, update: None,
    )
    phases = []
    for step in range(7 + DELAY + 5):
        rate[0] = 0.1 if step < 7 else 0.01
        for name, grad in draw(step, 1)[0].items():
            reducer.mark_ready(name, grad.flatten())
        reducer.finish_step()
        phases.append(reducer.stats()["phase"])
    assert phases == ["dense"] + ["learn"] * 4 + ["code"] * (2 + DELAY) + ["learn"] * 4 + ["code"]


def test_neither_draws_nor_weights_of_the_user_are_touched() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    simulation = gradcomp.Simulation(spec_of("", learn=2), SHAPES, 4)
    for step in range(5):
        simulation.step(draw(step))
    assert torch.equal(torch.rand(4), wanted)


def test_how_long_learning_takes_is_said() -> None:
    simulation = gradcomp.Simulation(spec_of("", learn=3), SHAPES, 4)
    for step in range(6):
        simulation.step(draw(step))
    assert 0 < simulation.stats()["learning_seconds"] < 3 * 2.0


@pytest.mark.parametrize("spec,said", [
    ("lgc:instance=mesh", "lgc: instance=mesh must be one of ring, server"),
    ("lgc:leader=me", "lgc: leader=me must be one of parts, rotate, seed"),
    ("lgc:learn=0", "lgc: learn=0 must be at least 1"),
    ("lgc:dense=-1", "lgc: dense=-1 must be at least 0"),
    ("lgc:window=5", "lgc: window=5 must be at least 32"),
    ("lgc:bound=0", "lgc: bound=0 must be above 0"),
    ("lgc:innovation=2", r"lgc: innovation=2 must be in \(0, 1\]"),
    ("lgc:decoder=deep", "lgc: decoder=deep must be one of linear, leaky"),
    ("lgc:by_host=true", "lgc cannot use by_host: it treats the first and last layers"),
    ("lgc:warmup=5", "lgc has no gentler form to warm up with"),
])  # fmt: skip
def test_bad_knobs_are_refused(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gradcomp.make(spec)
