"""by_host: dense inside a host, compressed between hosts; the laws once more, with several ranks on a host."""

from __future__ import annotations

import pytest
import torch
from laws import SHAPES, SPIKES, check_conservation, check_resumes, draw, residuals

import gradcomp
from gradcomp.core.by_host import position_of
from gradcomp.core.requests import World
from gradcomp.native.extension import LARGEST

# Ranks, and ranks on each host.
PLACES = [(2, 2), (4, 2), (6, 3), (8, 4), (8, 2)]
SPECS = [
    "dense",
    "topk:ratio=0.03",
    "topk:ratio=0.03,route=split,wire=exact",
    "topk:ratio=0.03,route=tree",
    "blocks:feedback=true",
    "sdagc:lam=2",
    "sdagc:lam=2.5,small=none,flush=3",
    "gtopk:ratio=0.03",
    "gs_sgd:ratio=0.01,rows=3,columns=160,candidates=2",
    "sketched_sgd:ratio=0.01,rows=3,columns=160",
]
places = pytest.mark.parametrize("world,per_host", PLACES)
specs = pytest.mark.parametrize("spec", [f"{spec}{',' if ':' in spec else ':'}by_host=true" for spec in SPECS])


@places
@specs
def test_nothing_is_lost_and_all_agree(spec: str, world: int, per_host: int) -> None:
    for bucket_mb in (25, 0.004):
        simulation = gradcomp.Simulation(spec, SHAPES, world, bucket_mb=bucket_mb, ranks_per_host=per_host)
        for step, kind in enumerate(("normal", "heavy", "zeros", "laplace")):
            check_conservation(simulation, draw(kind, 17 * step, world))


@pytest.mark.parametrize("spec", ["topk:ratio=0.03", "sdagc:lam=2,small=none"])
def test_a_host_is_one_sender(spec: str) -> None:
    """Between hosts goes what as many single ranks would send, shared among the ranks of a host."""
    alone = gradcomp.Simulation(spec, {"w": (40, 100)}, 2)
    alone.step([{"w": torch.randn(40, 100)} for _ in range(2)])
    shared = gradcomp.Simulation(f"{spec},by_host=true", {"w": (40, 100)}, 8, ranks_per_host=4)
    shared.step([{"w": torch.randn(40, 100)} for _ in range(8)])
    of_host = sum(reducer.traffic.between_hosts for reducer in shared._reducers[:4])
    assert alone.bytes_sent[0] <= of_host <= 1.35 * alone.bytes_sent[0]
    stats = shared.stats()
    assert stats["compression"] == stats["bytes_dense"] / stats["bytes_sent"]
    assert stats["bytes_sent"] > stats["bytes_between_hosts"] + 4 * 4000


@specs
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_reaches_all_hosts_and_no_residual(spec: str, bad: float) -> None:
    world = 4
    simulation = gradcomp.Simulation(spec, SHAPES, world, ranks_per_host=2)
    simulation.step(draw("normal", 1, world))
    grads = draw("normal", 2, world)
    grads[-1]["weight"][3, 4] = bad
    update = simulation.step(grads)
    assert not all(part.isfinite().all() for part in update.values())
    assert all(part.isfinite().all() for rank in range(world) for part in simulation.residual(rank).values())
    check_conservation(simulation, draw("normal", 3, world))


@pytest.mark.parametrize("spike", [*SPIKES])
@pytest.mark.parametrize("world,per_host", [PLACES[0], PLACES[3]])
@specs
def test_a_spike_leaves_every_value_finite(spec: str, world: int, per_host: int, spike: str) -> None:
    """Nothing is lost while a host's sum fits into the residual of the rank that keeps it. All ranks' 3e38 do not."""
    simulation = gradcomp.Simulation(spec, SHAPES, world, ranks_per_host=per_host)
    too_large = per_host * 1e38 if spike == "1e38 everywhere" else per_host * 3e38 * (spike == "3e38 everywhere")
    for step in range(5):
        grads = draw("normal", 7 * step, world)
        if step == 2:
            SPIKES[spike](grads)
        fits = step < 2 or too_large < LARGEST or spec.startswith("dense")
        update = check_conservation(simulation, grads) if fits else simulation.step(grads)
        assert all(part.isfinite().all() for part in update.values())
        assert all(part.isfinite().all() for own in residuals(simulation) for part in own.values())


@specs
def test_a_checkpoint_continues_to_the_bit(spec: str) -> None:
    check_resumes(lambda: gradcomp.Simulation(spec, SHAPES, 4, ranks_per_host=2), 4)


def test_other_hosts_take_over_the_residual() -> None:
    """Parts lie elsewhere after an elastic reset, and the residual of the old ones moves with the next gradients."""
    spec, world = "topk:ratio=0.03,by_host=true", 4
    first = gradcomp.Simulation(spec, SHAPES, world, ranks_per_host=4)
    first.step(draw("normal", 0, world))
    second = gradcomp.Simulation(spec, SHAPES, world, ranks_per_host=2)
    second.load_state_dict(first.state_dict())
    for step in range(3):
        check_conservation(second, draw("normal", step, world))


def test_positions() -> None:
    scattered = World(2, 4, (7, 9, 9, 7))
    position = position_of(scattered)
    assert (position.neighbours, position.peers, position.shard, position.peer_world) == ((1, 2), (3, 2), 1, World(1, 2))
    assert position_of(World(1, 3)).neighbours == (1,)
    with pytest.raises(ValueError, match="by_host=true needs as many ranks on every host, but the hosts have 2, 1"):
        position_of(World(0, 3, (0, 0, 1)))


def test_its_spec() -> None:
    assert gradcomp.make("topk:by_host=false") == gradcomp.make("topk")
