"""lgc over time: its state in checkpoints, codes that become bad, and a second learning."""

from __future__ import annotations

import pytest
import reference
import torch
from learned_codes import SHAPES, draw, learned, spec_of, state_after_learning, states

import gradcomp
from gradcomp.compressors.lgc import autoencoder
from gradcomp.compressors.lgc.phases import MOST_BAD_STEPS
from gradcomp.engine.reducer import Options, Reducer
from gradcomp.engine.slots import Slot
from gradcomp.native.memory import DELAY
from gradcomp.networks.memory import Board, MemoryNetwork

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # the autoencoder's tensors are small here


@pytest.mark.parametrize("knobs", ["", "instance=server"])
def test_training_on_codes_reaches_the_minimum(knobs: str) -> None:
    """After few steps of learning, with codes that are hardly good enough: those that are not have to be found out."""
    torch.manual_seed(0)
    goal = torch.randn(2000)
    simulation = gradcomp.Simulation(f"lgc:dense=0,learn=60,ratio=0.01,{knobs}".rstrip(","), {"w": (2000,)}, world=1)
    w, coded = torch.zeros(2000), 0
    for _ in range(900):
        w -= 0.0067 * simulation.step([{"w": w - goal}])["w"]
        coded += simulation.stats()["phase"] == "code"
    assert (w - goal).norm() < 0.02 * goal.norm()
    assert coded > 120


@pytest.mark.parametrize("knobs, stops", [("momentum=0.9", (1, 13)), ("instance=server", (5, 13)), ("wire=exact", (9, 13))])
def test_stopping_and_resuming_continues_to_the_bit_in_every_phase(knobs: str, stops: tuple[int, ...]) -> None:
    """Dense after one step, learning after five and nine, coding after thirteen.

    A job may go back to a checkpoint without being started anew: the second one has steps of its own before the first load.
    """
    spec, steps = spec_of(knobs, learn=9), 13 + DELAY + 2
    first = gradcomp.Simulation(spec, SHAPES, 4, seed=5)
    states_at, updates = {}, []
    for step in range(steps):
        if step in stops:
            states_at[step] = first.state_dict()
        updates.append({name: update.clone() for name, update in first.step(draw(step)).items()})
    assert first.stats()["phase"] == "code"
    second = gradcomp.Simulation(spec, SHAPES, 4, seed=5)
    for at, state in states_at.items():
        second.step(draw(99))
        second.load_state_dict(state)
        for step in range(at, steps):
            update = second.step(draw(step))
            assert all(reference.same(updates[step][name], update[name]) for name in SHAPES), f"step {step}"
        assert second.stats()["phase"] == "code"


# Codes that are somewhat off, so that their errors would add up, and codes that are quite off.
@pytest.mark.parametrize("knobs, times", [("", 3.5), ("instance=server", 50.0)])
def test_a_forced_divergence_recovers(knobs: str, times: float) -> None:
    """Bad codes are not used. Soon all ranks learn again, from the same step on, and then use codes again."""
    simulation = learned(knobs)
    for step in range(30, 36):
        simulation.step(draw(step))
    assert simulation.stats()["code_error"] < 0.9
    for reducer in simulation._reducers:  # as a damaged decoder would answer
        coder = reducer.buckets[0].inner.coder
        coder.taps.mul_(times)
    phases = []
    for step in range(36, 36 + DELAY + MOST_BAD_STEPS + 30 + 7):
        update = simulation.step(draw(step))
        assert max(float(part.abs().max()) for part in update.values()) < 400  # at most the whole residual
        phases.append({reducer.stats()["phase"] for reducer in simulation._reducers})
    began = phases.index({"learn"})
    assert DELAY + MOST_BAD_STEPS <= began <= DELAY + MOST_BAD_STEPS + 2  # not every step need be found off
    assert phases == [{"code"}] * began + [{"learn"}] * 30 + [{"code"}] * (len(phases) - began - 30)
    assert simulation.stats()["code_error"] < 0.9 and simulation.stats()["learned_anew"] == 1


def test_a_second_learning_begins_from_fresh_weights() -> None:
    simulation = learned()
    for state in states(simulation):
        state.coder.taps.mul_(50.0)
    fresh = states(gradcomp.Simulation(spec_of(""), SHAPES, 4))[0]
    for step in range(30, 30 + DELAY + MOST_BAD_STEPS):
        simulation.step(draw(step))
    drawn = autoencoder.Autoencoder(1, False, fresh.seed, torch.device("cpu"))
    for state in states(simulation):
        assert torch.equal(state.coder.weights, drawn.weights) and torch.equal(state.coder.taps, drawn.taps)
        assert state.coder.steps == 0 and not state.coder.moments.any()


def test_ranks_that_learned_something_else_agree_before_codes_are_used() -> None:
    """Processors may add up in different orders."""
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


def test_decoders_for_another_number_of_ranks_have_to_be_learned() -> None:
    """A job that continues from a checkpoint with other ranks has none of its decoders for them."""
    for knobs, phase in (("instance=server", "learn"), ("", "code")):
        state = state_after_learning(knobs, 4)
        fewer = gradcomp.Simulation(spec_of(knobs), SHAPES, 2)
        fewer.load_state_dict(state)
        fewer.step(draw(30, 2))
        assert fewer.stats()["phase"] == phase


def test_a_falling_learning_rate_refreshes_the_code() -> None:
    slots = {name: Slot(name, shape, torch.device("cpu")) for name, shape in SHAPES.items()}
    compressor = gradcomp.make("lgc:dense=1,learn=4,ratio=0.01")
    reducer = Reducer(compressor, slots, MemoryNetwork(Board(1), 0, 1), Options())
    phases = []
    for step in range(7 + DELAY + 5):
        reducer.context.layer_rates = dict.fromkeys(SHAPES, 0.1 if step < 7 else 0.01)
        for name, grad in draw(step, 1)[0].items():
            reducer.ready(slots[name], grad.flatten())
        reducer.finish()
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


def test_the_age_of_an_entry_begins_again_once_it_is_sent() -> None:
    """As of all that stays behind a momentum: of the whole model, dense or by codes. What is offered is the share 1 - m^age."""
    momentum = 0.9
    simulation = gradcomp.Simulation(spec_of(f"momentum={momentum}"), SHAPES, 4)
    before = torch.zeros(SHAPES["a.weight"], dtype=torch.long)
    waited = False
    for step in range(18):
        update = simulation.step(draw(step))["a.weight"]
        bucket = simulation._reducers[1].buckets[0]
        ages = bucket.layout.views(bucket.progress.ages)["a.weight"].view_as(update).long()
        assert torch.equal(ages, torch.where(update != 0, 0, before + 1))
        waited, before = waited or bool((before > 1).any()), ages
    assert waited and simulation.stats()["phase"] == "code"
