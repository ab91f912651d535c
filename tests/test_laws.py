"""The laws, over every compressor and number of ranks: conservation, agreement, repeatability, bytes, convergence."""

from __future__ import annotations

from collections.abc import Sequence

import gradients
import pytest
import reference
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import SHAPES, SPIKES, Named, check_conservation, check_resumes, draw, mean, residuals
from specs import ALL, promised
from torch import Tensor

import gradcomp
from gradcomp.engine.feedback import Feedback
from gradcomp.native import extension

WORLDS = [1, 2, 3, 4, 8]
# Numbers of ranks for the emulator, which is slow and does not know them, and for laws that hardly depend on them.
FEW = [1, 3]
PLACES = [(device, world) for device in DEVICES for world in (FEW if device == "simt" else WORLDS)]

worlds = pytest.mark.parametrize("world", WORLDS)
few_worlds = pytest.mark.parametrize(
    "world", [pytest.param(world, marks=[] if world in FEW else [pytest.mark.long]) for world in WORLDS]
)
specs = pytest.mark.parametrize("spec", ALL)
NATIVE = extension.native


def in_turn(name: str, values: Sequence[float | str], every: int = 1) -> pytest.MarkDecorator:
    """Run every spec at every place, or every second one, with one of the values in turn. All other triples are long tests."""
    cases = []
    for i, spec in enumerate(ALL):
        for j, (device, world) in enumerate(PLACES):
            for k, value in enumerate(values):
                marks = [] if (i + j) % (every * len(values)) == every * k else [pytest.mark.long]
                marks += [pytest.mark.slow] if device == "simt" or world > 3 else []
                cases.append(pytest.param(spec, device, world, value, marks=marks))
    return pytest.mark.parametrize(f"spec,device,world,{name}", cases, indirect=["device"])


def test_every_compressor_has_its_laws() -> None:
    assert {spec.partition(":")[0] for spec in ALL} == set(gradcomp.names())


@in_turn("bucket_mb", [25, 0.004])
def test_conservation(spec: str, world: int, device: torch.device, bucket_mb: float) -> None:
    """Nothing is lost and nothing is made up, step after step, in one bucket and in several. step() checks agreement."""
    simulation = gradcomp.Simulation(spec, SHAPES, world, bucket_mb=bucket_mb, device=device)
    for step, kind in enumerate(gradients.KINDS[:: 2 if extension.native is not NATIVE else 1]):  # the emulator takes its time
        check_conservation(simulation, draw(kind, 17 * step, world, device))


@pytest.mark.slow
@specs
@given(
    kinds=st.lists(gradients.kinds, min_size=1, max_size=4),
    world=st.sampled_from(WORLDS),
    bucket_mb=st.sampled_from([25, 0.004]),
    seed=gradients.seeds,
)
@settings(max_examples=12)
def test_conservation_for_any_gradients(spec: str, kinds: list[str], world: int, bucket_mb: float, seed: int) -> None:
    simulation = gradcomp.Simulation(spec, SHAPES, world, bucket_mb=bucket_mb)
    for step, kind in enumerate(kinds):
        check_conservation(simulation, draw(kind, seed + step, world))


@few_worlds
@specs
def test_the_same_run_twice_gives_the_same_bits(spec: str, world: int) -> None:
    def run() -> list[Named]:
        simulation = gradcomp.Simulation(spec, SHAPES, world, seed=3)
        return [simulation.step(draw("normal", step, world)) for step in range(3)]

    for first, second in zip(run(), run(), strict=True):
        assert all(reference.same(first[name], second[name]) for name in SHAPES)


@worlds
@specs
def test_bytes_are_as_promised(spec: str, world: int) -> None:
    simulation = gradcomp.Simulation(spec, SHAPES, world)
    simulation.step(draw("normal", 0, world))
    n = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert simulation.bytes_sent == promised(spec, n, world)
    sent = simulation.bytes_sent[0]
    assert simulation.stats()["compression"] == (4 * n / sent if sent else None)


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 4])
@specs
def test_training_reaches_the_minimum(spec: str, world: int) -> None:
    """Ranks that pull towards one point with different strength bring the weights there, however little a step sends."""
    torch.manual_seed(0)
    goal = torch.randn(60)
    strengths = 0.5 + torch.rand(world)
    simulation = gradcomp.Simulation(spec, {"w": (60,)}, world)
    share = min(1.0, max(promised(spec, 60, 2)) / 240)
    rate = 0.15 * share  # an entry waits for some 1 / share steps; the steps it waits for together must not overshoot
    w = torch.zeros(60)
    for _ in range(round(8 / rate)):
        w -= rate * simulation.step([{"w": strength * (w - goal)} for strength in strengths])["w"]
    assert (w - goal).norm() < 0.01 * goal.norm()


@in_turn("bad", [float("inf"), float("-inf"), float("nan")], every=2)
def test_an_overflow_reaches_all_ranks_and_no_residual(spec: str, world: int, bad: float, device: torch.device) -> None:
    """One bad entry on one rank makes the update not finite, so that a GradScaler skips the step everywhere.

    The residuals stay finite and hold all other gradients of the step, of every bucket: nothing else is lost.
    """
    simulation = gradcomp.Simulation(spec, SHAPES, world, device=device, bucket_mb=0.004)
    simulation.step(draw("normal", 1, world, device))
    grads = draw("normal", 2, world, device)
    grads[-1]["weight"][3, 4] = bad
    before = residuals(simulation)
    update = simulation.step(grads)
    assert not all(part.isfinite().all() for part in update.values())
    after = residuals(simulation)
    assert all(part.isfinite().all() for own in after for part in own.values())
    if isinstance(made := gradcomp.make(spec), Feedback) and made.feedback:
        grads[-1]["weight"][3, 4] = 0
        for name in SHAPES:
            wanted = mean(before, name) + mean(grads, name)
            assert torch.allclose(mean(after, name), wanted, rtol=1e-6, atol=1e-6)  # one float32 addition apart
    check_conservation(simulation, draw("normal", 3, world, device))


@in_turn("spike", [*SPIKES], every=2)
def test_a_spike_leaves_every_value_finite(spec: str, world: int, spike: str, device: torch.device) -> None:
    """Huge gradients of one step spoil neither its update nor a later one, nor a residual. Nothing is lost."""
    simulation = gradcomp.Simulation(spec, SHAPES, world, device=device)
    for step in range(6):
        grads = draw("normal", 7 * step, world, device)
        if step == 2:
            SPIKES[spike](grads)
        update = check_conservation(simulation, grads)
        assert all(part.isfinite().all() for part in update.values()), step
        assert all(part.isfinite().all() for own in residuals(simulation) for part in own.values()), step


@pytest.mark.parametrize(
    "spec", ["dense", "topk:wire=exact", "topk:route=split,wire=exact", "topk:route=tree", "gtopk", "gs_sgd", "sketched_sgd"]
)
def test_a_spike_that_was_sent_is_over(spec: str) -> None:
    """Its step's update is the mean. The next update is as before the spike, where values travel unrounded."""
    simulation = gradcomp.Simulation(spec, SHAPES, 4)
    simulation.step(draw("normal", 0, 4))
    grads = draw("normal", 1, 4)
    SPIKES["one entry of 1e38"](grads)
    assert simulation.step(grads)["weight"][3, 4] == pytest.approx(1e38)
    update = simulation.step(draw("normal", 2, 4))
    assert all((part.abs() < 100).all() for part in update.values())


@few_worlds
@specs
def test_a_checkpoint_continues_to_the_bit(spec: str, world: int) -> None:
    check_resumes(lambda: gradcomp.Simulation(spec, SHAPES, world), world)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@specs
def test_half_gradients_are_taken_as_they_are(spec: str, dtype: torch.dtype) -> None:
    halves = [{name: grad.to(dtype) for name, grad in own.items()} for own in draw("normal", 0, 2)]
    full = [{name: grad.float() for name, grad in own.items()} for own in halves]
    ours = gradcomp.Simulation(spec, SHAPES, 2).step(halves)
    theirs = gradcomp.Simulation(spec, SHAPES, 2).step(full)
    assert all(reference.same(ours[name], theirs[name]) for name in SHAPES)


@specs
def test_a_missing_gradient_counts_as_zero(spec: str) -> None:
    grads = draw("normal", 0, 2)
    zeros = [dict(own) for own in grads]
    zeros[1]["weight"] = torch.zeros(SHAPES["weight"])
    missing: list[dict[str, Tensor | None]] = [dict(own) for own in grads]
    missing[1]["weight"] = None
    ours, theirs = (gradcomp.Simulation(spec, SHAPES, 2).step(g) for g in (missing, zeros))
    assert all(reference.same(ours[name], theirs[name]) for name in SHAPES)


@pytest.mark.parametrize("nesterov", [False, True])
def test_local_momentum_without_masking_is_momentum_of_the_mean(nesterov: bool) -> None:
    """Sending everything, the local momenta add up to the momentum of one big batch: PyTorch's own SGD."""
    w = torch.nn.Parameter(torch.zeros(50))
    sgd = torch.optim.SGD([w], lr=0.1, momentum=0.9, nesterov=nesterov)
    simulation = gradcomp.Simulation(f"dense:momentum=0.9,nesterov={nesterov}", {"w": (50,)}, 4)
    ours = torch.zeros(50)
    for step in range(10):
        parts = [gradients.draw("normal", 50, 10 * step + rank) for rank in range(4)]
        w.grad = torch.stack(parts).mean(0)
        sgd.step()
        ours -= 0.1 * simulation.step([{"w": part} for part in parts])["w"]
    torch.testing.assert_close(ours, w.detach(), rtol=1e-5, atol=1e-6)  # sums in another order
