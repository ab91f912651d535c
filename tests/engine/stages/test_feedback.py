"""Error feedback: gradients are clipped before they are added to the residual, and a warm-up sends more at first."""

from __future__ import annotations

import math

import laws
import pytest
import torch
import training
from training import Named

import gradcomp

SHAPES = {"a.weight": (60, 50), "a.bias": (60,), "b.weight": (40, 60)}


def draw(seed: int, ranks: int, size: float = 1.0) -> list[Named]:
    return [{name: size * grad for name, grad in own.items()} for own in training.draw(seed, SHAPES, ranks)]


@pytest.mark.parametrize("by", ["layer", "model"])
def test_a_gradient_is_clipped_before_it_is_accumulated(by: str) -> None:
    """Each rank's is cut to clip / sqrt(ranks), so that four independent ones together are about as long as allowed."""
    simulation = gradcomp.Simulation(f"dense:clip=2,clip_by={by}", SHAPES, 4)
    grads = draw(0, 4)
    grads[3] = {name: 1e-4 * grad for name, grad in grads[3].items()}  # short enough as it is
    update = simulation.step(grads)
    clipped = []
    for own in grads:
        whole = math.sqrt(sum(float(grad.double().square().sum()) for grad in own.values()))
        norms = {name: float(grad.double().norm()) if by == "layer" else whole for name, grad in own.items()}
        clipped.append({name: grad * min(1.0, 1.0 / (norms[name] + 1e-6)) for name, grad in own.items()})
    for name in SHAPES:
        torch.testing.assert_close(update[name], torch.stack([own[name] for own in clipped]).mean(0))
    assert simulation.stats()["overlap"] == (by == "layer")
    assert simulation.stats()["buckets"] == 1


def test_clipping_by_model_waits_for_the_last_gradient() -> None:
    layers = gradcomp.Simulation("topk:clip=1", SHAPES, 1, bucket_mb=0.01)
    model = gradcomp.Simulation("topk:clip=1,clip_by=model", SHAPES, 1, bucket_mb=0.01)
    assert layers.stats()["buckets"] > 1 and layers.stats()["overlap"]
    assert model.stats()["buckets"] == 1 and not model.stats()["overlap"]


@pytest.mark.parametrize("size", [1e38, 3e38, -3.4e38])
@pytest.mark.parametrize(
    "spec",
    [
        "topk:momentum=0.9",
        "sign:momentum=0.9",
        "topk:momentum=0.9,nesterov=true,route=split",
        "topk:clip=1e30,momentum=0.9",
        "dense:momentum=0.9",
        "gtopk:momentum=0.9",
        "sdagc:momentum=0.9",
        "sdagc:sam=0.9",
        "gs_sgd:momentum=0.9",
        "orq:sigmas=2.5,momentum=0.9",
        "topk:momentum=0.9,by_host=true",
    ],
)
def test_spikes_leave_every_value_finite(spec: str, size: float) -> None:
    """Nor is an entry refused for ever that stands at the largest magnitude."""
    simulation = gradcomp.Simulation(spec, SHAPES, 2, ranks_per_host=2)
    for step in range(20):
        grads = draw(step, 2)
        if 2 <= step < 6:
            grads = [{name: size * grad.sign() for name, grad in own.items()} for own in grads]
        assert all(part.isfinite().all() for part in simulation.step(grads).values())
        assert all(left.isfinite().all() for rank in range(2) for left in simulation.residual(rank).values())


def test_an_entry_that_grows_without_being_sent_is_refused_never() -> None:
    """Its residual stays at the largest magnitude until it is sent."""
    simulation = gradcomp.Simulation("topk:ratio=0.001,wire=exact", {"w": (100,)}, 1)
    grad = torch.zeros(100)
    grad[:2] = torch.tensor([3.3e38, 3e38])  # the second waits
    assert simulation.step([{"w": grad}])["w"][0] > 3e38
    for _ in range(20):
        grad[:2] = torch.tensor([3.39e38, 1e37])
        assert simulation.step([{"w": grad}])["w"].isfinite().all()
    assert simulation.residual(0)["w"].isfinite().all()
    assert simulation.step([{"w": torch.zeros(100)}])["w"][:2].max() > 3e38


@pytest.mark.parametrize("spec,each", [("topk:ratio=0.001,warmup=5,wire=exact", 1), ("topk:ratio=0.001,warmup=15", 3)])
def test_warming_up_goes_down_in_five_stages(spec: str, each: int) -> None:
    simulation = gradcomp.Simulation(spec, {"w": (100, 100)}, 1)
    sent = []
    for step in range(6 * each):
        torch.manual_seed(step)
        sent.append(int(simulation.step([{"w": torch.randn(100, 100)}])["w"].count_nonzero()))
    assert sent[::each] == [math.ceil(10_000 * 0.001 ** (stage / 6)) for stage in range(1, 7)]
    assert all(sent[i] == sent[i // each * each] for i in range(len(sent)))


def test_a_threshold_warms_up_as_a_density_does() -> None:
    simulation = gradcomp.Simulation("sdagc:lam=4.885,warmup=5,cap=1", {"w": (1000, 100)}, 1)
    for stage in range(1, 7):
        laplace = torch.empty(1000, 100).exponential_() * torch.randn(1000, 100).sign()
        simulation.load_state_dict(simulation.state_dict() | {"of_rank": {"0": _emptied(simulation)}})
        sent = int(simulation.step([{"w": laplace}])["w"].count_nonzero())
        assert sent / 1e5 == pytest.approx(0.001 ** (stage / 6), rel=0.25)


def _emptied(simulation: gradcomp.Simulation) -> dict[str, object]:
    state: dict[str, object] = simulation.state_dict()["of_rank"]["0"]
    return state | {"layers": {"feedback": {"residual": {"w": torch.zeros(100_000)}}}}


@pytest.mark.parametrize("clip_by", ["layer", "model"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_loses_no_finite_gradient_of_a_failed_step(clip_by: str, bad: float) -> None:
    """They wait, clipped by a norm in which the layer with the other entry counts as zero."""
    simulation = gradcomp.Simulation(f"topk:ratio=0.001,clip=1,clip_by={clip_by}", SHAPES, 2)
    grads = draw(1, 2)
    grads[1]["a.weight"][0, 0] = bad
    assert not all(part.isfinite().all() for part in simulation.step(grads).values()), "the overflow stays visible"
    left = simulation.residual(1)
    for name, given in grads[1].items():
        factors = (left[name] / given)[given.isfinite()]
        assert factors.min() > 0 and factors.max() <= 1 and factors.max() - factors.min() < 1e-5


def test_a_spike_waits_until_it_is_sent_and_a_clipped_one_does_not() -> None:
    """docs/training.md: it takes about 1 / ratio steps."""
    largest = {}
    for spec in ("topk:ratio=0.1,wire=exact", "topk:ratio=0.1,wire=exact,clip=1"):
        simulation = gradcomp.Simulation(spec, SHAPES, 2)
        simulation.step(draw(0, 2, 1e36))
        updates = [simulation.step(draw(step, 2, 0.0)) for step in range(1, 16)]
        largest[spec] = [max(part.abs().max().item() for part in update.values()) for update in updates]
    plain, clipped = largest.values()
    assert max(plain[:5]) > 1e30 and max(plain[-2:]) == 0.0
    assert max(clipped) < 1


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "topk:route=tree", "topk:wire=coarse", "sdagc", "blocks:feedback=true"])
def test_a_residual_that_decays_is_conserved_after_its_factor(spec: str) -> None:
    """The mean over ranks of decay * residual + gradient is in the residuals and the update."""
    simulation = gradcomp.Simulation(f"{spec}{',' if ':' in spec else ':'}momentum=0,decay=0.5", laws.SHAPES, 3)
    for step in range(4):
        laws.check_conservation(simulation, laws.draw("normal", step, 3), decay=0.5)
    assert any(each.any() for own in laws.residuals(simulation) for each in own.values())


def test_an_entry_that_never_goes_fades() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.5,decay=0.5,momentum=0", {"w": (2,)}, 1)
    for waits in (1.0, 1.5, 1.75):
        assert simulation.step([{"w": torch.tensor([8.0, 1.0])}])["w"].tolist() == [8, 0]
        assert simulation.residual(0)["w"].tolist() == [0, waits]


def test_the_residual_of_a_frozen_layer_does_not_decay() -> None:
    named = [(name, torch.nn.Parameter(torch.zeros(64))) for name in "ab"]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    shapes = {name: (64,) for name, _ in named}
    simulation = gradcomp.Simulation("topk:ratio=0.1,decay=0.5", shapes, 1, optimizer=optimizer, named_parameters=named)
    simulation.step([{name: torch.arange(64.0) for name in shapes}])
    before = simulation.residual(0)["b"].clone()
    named[1][1].requires_grad_(False)
    for _ in range(4):
        simulation.step([{"a": torch.arange(64.0), "b": torch.zeros(64)}])
    assert before.any() and torch.equal(simulation.residual(0)["b"], before)
