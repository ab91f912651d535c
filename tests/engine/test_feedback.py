"""What is around compressors: clipping, warm-up, rules by layer, learning rates, and changing the spec in mid-training."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import gradcomp
from gradcomp.compressors.dense import Dense
from gradcomp.compressors.topk import TopK
from gradcomp.engine.by_layer import ByLayer
from gradcomp.engine.feedback import Feedback
from gradcomp.engine.parameters import rates_of
from gradcomp.exchanges import routes
from gradcomp.messages import payload
from gradcomp.messages.sparse import CODECS
from gradcomp.native import kernels
from gradcomp.native.memory import Memory
from gradcomp.protocol import Acc, Layout
from gradcomp.requests import World

SHAPES = {"a.weight": (60, 50), "a.bias": (60,), "b.weight": (40, 60)}


def draw(seed: int, ranks: int, size: float = 1.0) -> list[dict[str, Tensor]]:
    torch.manual_seed(seed)
    return [{name: size * torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(ranks)]


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


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_clipping_what_is_not_finite(bad: float) -> None:
    simulation = gradcomp.Simulation("topk:clip=1,ratio=0.1", SHAPES, 2)
    grads = draw(0, 2)
    grads[1]["b.weight"][3, 3] = bad
    assert not simulation.step(grads)["b.weight"].isfinite().all() or not simulation.step(grads)["a.weight"].isfinite().all()
    assert all(left.isfinite().all() for rank in range(2) for left in simulation.residual(rank).values())


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
        simulation.load_state_dict(simulation.state_dict() | {"ranks": [_emptied(simulation)]})
        sent = int(simulation.step([{"w": laplace}])["w"].count_nonzero())
        assert sent / 1e5 == pytest.approx(0.001 ** (stage / 6), rel=0.25)


def _emptied(simulation: gradcomp.Simulation) -> dict[str, object]:
    state: dict[str, object] = simulation.state_dict()["ranks"][0]
    return state | {"residual": {"w": torch.zeros(100_000)}}


def test_rules_by_layer() -> None:
    made = gradcomp.make("sdagc:lam=3; *.bias=dense; b.*=topk:ratio=0.5")
    assert isinstance(made, ByLayer)
    assert made.rules == (("*.bias", Dense()), ("b.*", Feedback(TopK(ratio=0.5))))
    assert made == gradcomp.by_layer({"*.bias": "dense", "b.*": "topk:ratio=0.5"}, "sdagc:lam=3")
    simulation = gradcomp.Simulation("sdagc:lam=3; *.bias=dense; b.*=topk:ratio=0.5", SHAPES, 2)
    grads = draw(0, 2)
    update = simulation.step(grads)
    assert torch.equal(update["a.bias"], (grads[0]["a.bias"] + grads[1]["a.bias"]) * 0.5)
    assert 0 < update["a.weight"].count_nonzero() < 100
    assert update["b.weight"].count_nonzero() > 1200
    assert simulation.stats()["buckets"] == 3
    state = simulation.state_dict()
    other = gradcomp.Simulation("sdagc:lam=3; *.bias=dense; b.*=topk:ratio=0.5", SHAPES, 2)
    other.load_state_dict(state)
    ours, theirs = simulation.step(draw(1, 2)), other.step(draw(1, 2))
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


@pytest.mark.parametrize(
    "spec,sentence",
    [
        ("topk; =dense", "'=dense' is not of the form pattern=spec"),
        ("topk; *.bias", "'*.bias' is not of the form pattern=spec"),
        ("topk; *.bias=dens", "there is no compressor 'dens' (did you mean 'dense'?)"),
        (
            "topk; *.bias=dense:clip=1,clip_by=model",
            "needs the whole model in one bucket and cannot be used in rules for layers",
        ),
        ("topk:clip=-1", "topk: clip=-1 must be at least 0"),
        ("topk:clip_by=bucket", "topk: clip_by=bucket must be one of layer, model"),
        ("topk:warmup=-1", "topk: warmup=-1 must be at least 0"),
        ("dense:warmup=3", "dense has no gentler form to warm up with"),
    ],
)
def test_wrong_ones_get_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        gradcomp.make(spec)


@pytest.mark.parametrize(
    "after,kept",
    [
        ("sdagc:lam=2", "sdagc:lam=2"),
        ("topk:ratio=0.2", "topk:ratio=0.2"),
        ("dense", "dense:feedback=true"),
        ("sdagc; *.bias=dense", "sdagc; *.bias=dense:feedback=true"),
    ],
)
def test_changing_the_spec_carries_the_residual_over(after: str, kept: str) -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.01,momentum=0.9", SHAPES, 2)
    simulation.step(draw(0, 2))
    before = [simulation.residual(rank) for rank in range(2)]
    simulation.change(after)
    assert str(simulation._compressor) == kept
    for rank in range(2):
        assert all(torch.equal(simulation.residual(rank)[name], before[rank][name]) for name in SHAPES)
    grads = draw(1, 2)
    update = simulation.step(grads)
    for name in SHAPES:
        left = sum(simulation.residual(rank)[name] for rank in range(2)) / 2
        wanted = sum(before[rank][name] + grads[rank][name] for rank in range(2)) / 2
        torch.testing.assert_close(left + update[name], wanted, rtol=1e-6, atol=1e-6)  # float32 sums in another order
    assert simulation.stats()["steps"] == 2


def test_changing_keeps_the_velocity_where_both_have_one() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.01,momentum=0.9", SHAPES, 1)
    simulation.step(draw(0, 1))
    before = simulation.state_dict()["ranks"][0]["velocity"]
    simulation.change("sdagc:momentum=0.5,small=none")
    after = simulation.state_dict()["ranks"][0]["velocity"]
    assert all(torch.equal(before[name], after[name]) for name in SHAPES)


def test_rates_are_those_of_the_moment() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    rate = rates_of(optimizer, model.named_parameters())
    assert rate("0.weight") == 0.5 and rate("1.bias") == 0.1
    optimizer.param_groups[0]["lr"] = 0.25
    assert rate("0.weight") == 0.25
    few = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not have the parameter '1\.weight'"):
        rates_of(few, model.named_parameters())("1.weight")


def revised(spec: str, rates: list[float]) -> list[Tensor]:
    """What is left of one layer after each step, whose gradients are 1, 0, 0 ... and whose threshold nothing exceeds."""
    source = gradcomp.make(spec)
    assert isinstance(source, Feedback)
    layout = Layout(("w",), (4000,), torch.device("cpu"))
    state = source.init(layout, 0)
    left = []
    for step, rate in enumerate(rates):
        grad = torch.full((4000,), 1.0 if step == 0 else 0.0)
        grad[0] = 1e-3 * (step + 1)
        acc = source.collect([grad], state, Memory(), 1, (rate,))
        left.append(acc.residual.clone())
    return left


def test_what_waits_may_follow_the_learning_rate() -> None:
    """keep: the residual acts with the rate it was found under; rescale: it shrinks with the rate once more."""
    assert [float(x[9]) for x in revised("sdagc:small=none,lr_revision=none", [0.4, 0.1])] == [1, 1]
    assert [float(x[9]) for x in revised("sdagc:small=none,lr_revision=keep", [0.4, 0.1, 0.1])] == [1, 4, 4]
    assert [float(x[9]) for x in revised("sdagc:small=none,lr_revision=rescale", [0.4, 0.1, 0.2])] == [1, 0.25, 0.5]


def test_a_malformed_payload_raises_and_names_the_rank() -> None:
    for form in ("compact", "exact"):
        acc = Acc(torch.randn(100_000), Memory())
        taken = CODECS[form].allocate(acc, 50)
        kernels.take_topk(acc.residual, 50, *taken.entries)
        steps = routes.allgather(acc, taken, World(0, 2))
        request = next(steps)
        broken = payload.read(request.payload.form, request.payload.bytes.clone())
        broken["header"][0] = -5
        with pytest.raises(ValueError, match="the payload of rank 1 is malformed: its header holds the count -5"):
            steps.send([request.payload, broken])
