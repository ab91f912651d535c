"""The laws of an exchange of updates, over every spec that acts on them: weights are conserved, and equal on all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from replicas import Replica, Replicas
from specs import ALL
from torch import Tensor
from torch.optim import SGD, AdamW
from training import Named, draw, mean

import gradcomp

pytestmark = pytest.mark.slow

SHAPES = {"a": (40, 31), "b": (31,), "c": (3, 5, 4), "scalar": (), "empty": (0, 3), "wide": (2, 700)}
RATE, MOMENTUM = 0.1, 0.9
EVERYTHING = [
    "topk:ratio=1,wire=exact",
    "topk:ratio=1,wire=exact,route=split",
    "topk:ratio=1,route=tree",
    "topk:ratio=1,wire=exact,by_host=true",
    "topk:ratio=1,wire=exact; *b*=dense:feedback=true",
    "dense:feedback=true",
]
SPECS = [spec for spec in ALL if gradcomp.make(spec).traits.acts_on_updates]
SPECS += ["topk:ratio=0.05; b=dense", "topk:ratio=0.02,by_host=true", "blocks:feedback=true", "topk:ratio=0.1,bits=0"][:3]
every_spec = pytest.mark.parametrize("spec", SPECS)
WORLDS = [2, 3, 1, 4]
worlds = pytest.mark.parametrize("ranks", WORLDS)
# Those of which all that a rank does not send stays. Others round without bias, and lose what they round.
KEEP = [spec for spec in SPECS if getattr(gradcomp.make(spec), "feedback", True)]


def in_turn(names: str, *lists: Sequence[Any], ids: Sequence[str] | None = None) -> pytest.MarkDecorator:
    """Run every combination of all lists but the last with one value of the last in turn; the others are long tests.

    ids: of the last list's values.
    """
    cases, last = [], [*enumerate(lists[-1])]
    for at in itertools.product(*(range(len(each)) for each in lists[:-1])):
        before = [each[i] for each, i in zip(lists, at)]  # noqa: B905 - the last list has its turn
        for k, value in last:
            marks = [] if k == sum(at) % len(last) else [pytest.mark.long]
            name = "-".join(map(str, (*before, value if ids is None else ids[k])))
            cases.append(pytest.param(*before, value, marks=marks, id=name))
    return pytest.mark.parametrize(names, cases)


of_sgd = partial(SGD, lr=RATE, momentum=MOMENTUM)
sgd_forms: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {},
    "nesterov": {"nesterov": True, "momentum": 0.8},
    "weight decay": {"weight_decay": 0.1},
    "nesterov and weight decay": {"weight_decay": 0.1, "nesterov": True},
    "maximize": {"maximize": True, "weight_decay": 0.1},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def test_there_is_something_to_hold() -> None:
    names = {spec.partition(":")[0] for spec in SPECS}
    assert len(SPECS) > 20 and {"topk", "sdagc", "gtopk", "gs_sgd", "sketched_sgd", "sign", "lgc"} <= names


def drawn(step: int, ranks: int, size: float = 1.0) -> list[Named]:
    return [{name: size * each for name, each in own.items()} for own in draw(step, SHAPES, ranks)]


# --- Conservation


@in_turn("spec, ranks", KEEP, WORLDS)
def test_weights_are_conserved(spec: str, ranks: int) -> None:
    """Start - now, and the mean of what waits, are all that the ranks' optimizers have done.

    They have the whole effect of each gradient at once: rate / (1 - momentum).
    """
    ours = Replicas(spec, of_sgd, SHAPES, ranks, hosts=max(1, ranks // 2))
    start = ours.copied()
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    most = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(12):
        grads = drawn(step, ranks)
        ours.step(grads)
        ours.check_equal()
        whole = RATE / (1 - own_momentum(spec))
        for name in SHAPES:
            each = torch.stack([whole * own[name].double() for own in grads])
            given[name] += each.mean(0)
            most[name] += each.abs().sum(0)
        waits, now = ours.residual(), ours.copied()
        for name in SHAPES:
            moved = start[name] - now[name]
            rounding = 2.0**-22 * (step + 1) * (most[name] + start[name].abs() + moved.abs()) + 1e-9
            assert ((moved + waits[name] - given[name]).abs() <= rounding).all(), (step, name)


def own_momentum(spec: str) -> float:
    """Return the momentum that the residual stands for."""
    return 0.0 if gradcomp.make(spec).traits.momentum else MOMENTUM


@in_turn("spec, optimizer_of", SPECS, [of_sgd, partial(AdamW, lr=0.01, weight_decay=0.1)], ids=["sgd", "adamw"])
def test_ranks_are_equal_to_the_bit_after_every_step(spec: str, optimizer_of: Any) -> None:
    """In several buckets, too."""
    for bucket_mb in (25, 0.002):
        ours = Replicas(spec, optimizer_of, SHAPES, 3, bucket_mb=bucket_mb)
        before = ours.copied()
        ours.train(10)
        assert any(not torch.equal(before[name], now) for name, now in ours.copied().items())


@every_spec
def test_the_same_training_twice_gives_the_same_bits(spec: str) -> None:
    first, second = (Replicas(spec, of_sgd, SHAPES, 2, seed=3).train(5) for _ in range(2))
    first.ends_as(second, 0, 0)


# --- Everything sent


@in_turn("form, spec, ranks", [*sgd_forms], EVERYTHING, WORLDS)
def test_with_everything_sent_a_step_is_torchs_sgd(form: str, spec: str, ranks: int) -> None:
    optimizer_of = partial(SGD, **{"lr": RATE, "momentum": MOMENTUM, **sgd_forms[form]})
    ours, theirs = (Replicas(each, optimizer_of, ranks=ranks, hosts=max(1, ranks // 2)) for each in (spec, None))
    ours.train(15).ends_as(theirs.train(15), 2e-5, 5e-6)


@pytest.mark.parametrize("spec", EVERYTHING)
@pytest.mark.parametrize("case", ["rate", "decay", "weights"])
def test_with_everything_sent_what_the_program_does_between_steps_is_torchs(case: str, spec: str) -> None:
    """It sets rates, decays, and the weights themselves, which may lie elsewhere then, and in another order."""
    optimizer_of = partial(SGD, lr=RATE, weight_decay=0.1)
    both = [Replicas(each, optimizer_of, ranks=2) for each in (spec, None)]
    for step in range(12):
        for each in both:
            if case == "rate":
                each.set(lr=RATE / (1 + step))
            elif case == "decay":
                each.set(weight_decay=0.02 * step)
            for rank in each.ranks if case == "weights" else ():
                weight = rank.weights["0.weight"]
                weight.data = weight.data.t().contiguous().t() if step % 2 else weight.data.clone().clamp(-0.3, 0.3)
            each.train(1, step)
    both[0].ends_as(both[1], 2e-5, 5e-6)


@in_turn(
    "ratio, settings",
    [0.01, 0.05, 0.2, 0.7, 1.0],
    [{}, {"nesterov": True}, {"momentum": 0.0}],
    ids=["heavy ball", "nesterov", "plain"],
)
def test_the_gain_along_a_constant_gradient_is_1_at_every_ratio(ratio: float, settings: dict[str, Any]) -> None:
    """However little a step sends: after many steps weights have moved as far as by SGD, but for what waits."""
    steps, shapes = 600, {"w": (400,)}
    grads = draw(0, shapes, 2)
    ours, theirs = (
        Replicas(each, partial(of_sgd, **settings), shapes, 2, 0) for each in (f"topk:ratio={ratio},wire=exact", None)
    )
    for _ in range(steps):
        ours.step(grads)
        theirs.step(grads)
    meant = theirs.copied()["w"]
    moved = float((ours.copied()["w"] * meant).sum() / meant.square().sum())
    m = float(settings.get("momentum", MOMENTUM))
    assert moved == pytest.approx(1, abs=(2 / ratio + 1 / (1 - m)) / steps + 1e-3), moved
    waits = ours.residual()["w"]
    torch.testing.assert_close(meant.sum(), (ours.copied()["w"] - waits).sum(), rtol=0.05, atol=1.0)


def noise_and_lag(spec: str | None) -> tuple[float, float]:
    """Train on a constant gradient with noise, whose sign turns at the end: a step's effect is what its gradient is.

    Return the variance of five steps' mean effect about the signal, and by how many steps the effect follows the turn.
    """
    size, steps, ranks = 1000, 200, 4
    random = torch.Generator().manual_seed(0)
    signal = torch.empty(size).uniform_(math.log(0.02), 0, generator=random).exp()
    signal *= torch.randint(0, 2, (size,), generator=random) * 2 - 1
    ours = Replicas(spec, of_sgd, {"w": (size,)}, ranks, 0)

    def effect(steps: int, sign: int) -> Tensor:
        before = ours.copied()["w"]
        for _ in range(steps):
            noise = torch.randn(ranks, size, generator=random)
            ours.step([{"w": sign * signal + own} for own in noise])
        return (before - ours.copied()["w"]) * (1 - MOMENTUM) / RATE

    effect(steps, 1)
    variance = sum(float((effect(5, 1) / 5 - signal).square().mean()) for _ in range(40)) / 40
    late = effect(steps, -1) + steps * signal
    return variance, float((late * signal).sum() / (2 * signal.square().sum()))


def test_noise_and_lag_are_momentums_where_a_tenth_is_sent_and_bounded_at_a_hundredth() -> None:
    """Two queues would follow after 11 steps at a tenth, and after 31 at a hundredth. What arrives seldom arrives in lumps."""
    noise, lag = noise_and_lag(None)
    assert lag == pytest.approx(MOMENTUM / (1 - MOMENTUM), abs=0.5)
    for ratio, most_noise, most_lag in ((1.0, 1.01, 1.01), (0.3, 1.4, 1.01), (0.1, 3, 1.01), (0.01, 30, 2.5)):
        our_noise, our_lag = noise_and_lag(f"topk:ratio={ratio},wire=exact")
        assert our_noise <= most_noise * noise and our_lag <= most_lag * lag, (ratio, our_noise / noise, our_lag / lag)


@pytest.mark.parametrize("wire, of_square", [("exact", 1.0), ("compact", 8 / 9)])
@pytest.mark.parametrize("ratio", [0.02, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_every_exchange_shrinks_each_ranks_residual(momentum: float, ratio: float, wire: str, of_square: float) -> None:
    """By a share of its square that theorems on error feedback begin with, also where all entries are equally large.

    of_square: what is left of that for an offer that travels as a power of two, which errs by a third at most.
    """
    size, sent = 1000, int(ratio * 1000)
    ours = Replicas(f"topk:ratio={ratio},wire={wire}", partial(of_sgd, momentum=momentum), {"w": (size,)}, 2)
    least = of_square * sent / size * (1 - momentum) ** 2
    before = [torch.zeros(size, dtype=torch.float64)] * 2
    for step in range(30):
        grads = [{"w": own["w"].sign() * (1 + step // 10)} for own in draw(step % 3, {"w": (size,)}, 2)]
        given = [each + RATE / (1 - momentum) * own["w"].double() for each, own in zip(before, grads, strict=True)]
        ours.step(grads)
        before = [rank.session.resume.residual()["w"].double() for rank in ours.ranks]
        for own, left in zip(given, before, strict=True):
            assert left.square().sum() <= (1 - least) * own.square().sum() * (1 + 1e-6), step


# --- Layers that are frozen


def train_frozen(ours: Replicas, steps: int) -> tuple[Named, Named]:
    """Freeze two layers and train: they and their residuals stay. Return weights and residuals of before."""
    ours.freeze("a", "scalar")
    before, waits = ours.copied(), ours.residual()
    ours.train(steps, 4)
    now, still = ours.copied(), ours.residual()
    for name in ("a", "scalar"):
        assert torch.equal(now[name], before[name]) and torch.equal(still[name], waits[name]), name
    assert not torch.equal(now["wide"], before["wide"])
    return before, waits


@pytest.mark.parametrize("spec", [*SPECS, *EVERYTHING])
def test_a_frozen_layer_does_not_move_and_its_residual_comes_back(spec: str) -> None:
    ours = Replicas(spec, partial(of_sgd, weight_decay=0.1), SHAPES, 2).train(4)
    before, waits = train_frozen(ours, 4)
    ours.freeze()
    ours.train(12, 8)
    assert not torch.equal(ours.copied()["a"], before["a"])
    if spec in KEEP:
        assert waits["a"].any() and not torch.equal(ours.residual()["a"], waits["a"])


@pytest.mark.parametrize("spec", ["sign", "linear", "orq:levels=3", "bingrad", "orq:levels=3,route=alltoall"])
def test_a_frozen_layer_does_not_move_where_hosts_exchange(spec: str) -> None:
    """Levels between hosts round its zeros to something, also in the shard of another rank."""
    ours = Replicas(f"{spec}{',' if ':' in spec else ':'}by_host=true", of_sgd, SHAPES, 4, hosts=2).train(4)
    train_frozen(ours, 5)


@pytest.mark.parametrize("which", [(1,), (0, 2), (1, 3)])
def test_a_layer_that_some_ranks_of_a_host_have_frozen_moves_alike_on_all(which: tuple[int, ...]) -> None:
    """Also in the shards that they own."""
    ours = Replicas("sign:by_host=true", of_sgd, {"a": (40, 31), "b": (40, 31)}, 4, hosts=2).train(4)
    before = ours.copied()
    for rank in which:
        ours.ranks[rank].weights["b"].requires_grad_(False)
    ours.train(4, 4)
    first, *others = [{name: each.detach() for name, each in rank.weights.items()} for rank in ours.ranks]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    assert (first["b"] != before["b"]).all()


@pytest.mark.parametrize("spec", KEEP)
def test_a_layer_that_is_frozen_after_backward_and_moved_by_the_step_is_exchanged(spec: str) -> None:
    """As in a GAN that freezes one network while the other one's gradients come, and steps both at the end."""
    ours, same = (Replicas(spec, partial(SGD, lr=RATE), SHAPES, 2) for _ in range(2))
    for step in range(4):
        for each in (ours, same):
            each.exchange(drawn(step, 2))
        ours.freeze("a", "scalar")
        ours.step()
        same.step()
        ours.freeze()
    ours.ends_as(same, 0, 0)


def test_of_a_layer_that_is_frozen_and_unfrozen_nothing_is_lost() -> None:
    for spec in ("topk:ratio=0.05", "sdagc:density=0.05", "sign"):
        ours = Replicas(spec, of_sgd, SHAPES, 2, size=0)
        given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for step in range(12):
            if step in (3, 7):
                ours.freeze(*(["a"] if step == 3 else []))
            grads = drawn(step, 2)
            ours.step(grads)
            for name, each in mean(grads).items():
                given[name] += (not (name == "a" and 3 <= step < 7)) * RATE / (1 - MOMENTUM) * each.double()
        for name, waits in ours.residual().items():
            torch.testing.assert_close(waits - ours.copied()[name], given[name], rtol=1e-4, atol=1e-4)


# --- Weights in 16 bits


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["topk:ratio=1,wire=exact", "topk:ratio=0.1", "sign", "sdagc:density=0.1"])
def test_what_16_bits_round_off_returns_to_the_residual(form: torch.dtype, spec: str) -> None:
    """What moved, and what waits, are all that the ranks' optimizers have done, which write into weights of 16 bits."""
    ours = Replicas(spec, partial(SGD, lr=0.02, momentum=MOMENTUM), SHAPES, 2, form=form)
    start, given = ours.copied(), {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(20):
        grads = [{name: each.to(form) for name, each in own.items()} for own in drawn(step, 2)]
        for own in grads:
            alone = Replica(partial(SGD, lr=0.02 / (1 - MOMENTUM)), SHAPES, 0, form)
            for name, weight in alone.weights.items():
                weight.data.copy_(ours.weights[name].detach())
            alone.backward(own)
            alone.step()
            for name, weight in alone.weights.items():
                given[name] += (ours.copied()[name] - weight.detach().double()) / 2
        ours.step(grads)
        ours.check_equal()
    now, waits = ours.copied(), ours.residual()
    for name, each in given.items():
        torch.testing.assert_close(start[name] - now[name] + waits[name], each, rtol=1e-4, atol=2e-4)
    if "ratio=1" in spec:
        assert waits["wide"].any(), "bfloat16 cannot hold all that was sent"


# --- States


@in_turn("spec, optimizer_of", SPECS, [partial(AdamW, lr=0.01), of_sgd], ids=["adamw", "sgd"])
def test_a_resumed_training_goes_on_to_the_bit(spec: str, optimizer_of: Any) -> None:
    first = Replicas(spec, optimizer_of, SHAPES, 2, hosts=1 if "by_host" in spec else 2).train(10)
    second = first.resumed()
    assert first.train(10, 10).ends_as(second.train(10, 10), 0, 0) is None


def of_two_momenta(parameters: Iterable[Any]) -> SGD:
    first, *others = parameters
    return SGD([{"params": [first, *others[1::2]], "momentum": 0.5}, {"params": others[::2], "momentum": 0.9}], lr=0.1)


@pytest.mark.parametrize("spec", ["orq", "qsgd", "gs_sgd:ratio=0.3", "lgc", "topk:ratio=0.1"])
def test_buckets_that_two_momenta_have_divided_go_on_to_the_bit(spec: str) -> None:
    """The first layer has the same bucket before the first step and after it, by another number."""
    first = Replicas(spec, of_two_momenta, {"a": (300,), "b": (40,), "c": (30,)}, 2, bucket_mb=0.001).train(5)
    second = first.resumed()
    assert first.train(5, 5).ends_as(second.train(5, 5), 0, 0) is None


@in_turn("spec, ranks", SPECS, [1, 3, 4])
def test_another_number_of_ranks_keeps_what_waits(spec: str, ranks: int) -> None:
    """As a part of the mean: of 2 ranks' states. Then training goes on, and the ranks stay equal."""
    first = Replicas(spec, of_sgd, SHAPES, 2).train(6)
    second = first.resumed(ranks)
    before, after = first.residual(), second.residual()
    for name in SHAPES:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-6)
    second.train(4, 6)


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_another_number_of_ranks_divides_layers_as_the_saved_ones(ranks: int) -> None:
    """Also a rank that takes no saved rank's part."""
    first = Replicas("topk:ratio=0.1", of_two_momenta, SHAPES, 2).train(6)
    first.resumed(ranks).train(4, 6)


def test_a_resumed_training_of_another_number_of_ranks_is_torchs_where_everything_is_sent() -> None:
    """Also the momentum, which waits in the residual."""
    for spec in EVERYTHING[:3]:
        first, theirs = (Replicas(each, of_sgd, ranks=2).train(6, alike=True) for each in (spec, None))
        theirs.train(6, 6, alike=True)
        for ranks in (1, 3, 4):
            first.resumed(ranks).train(6, 6, alike=True).ends_as(theirs)


# --- Gradients that are not finite


@worlds
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all(bad: float, ranks: int) -> None:
    """Before any optimizer or scaler looks: each then decides as under DDP. Others keep their other gradients."""
    ours, other = (Replicas("topk:ratio=0.1", of_sgd, SHAPES, ranks).train(3) for _ in range(2))
    grads = drawn(3, ranks)
    grads[-1]["a"][3, 4] = bad
    ours.exchange(grads)
    for rank in ours.ranks:
        found = [weight.grad for weight in rank.weights.values() if weight.grad is not None]
        assert not all(bool(each.isfinite().all()) for each in found)
        assert sum(int((~each.isfinite()).sum()) for each in found) <= 2
    ours.train(3, 4)  # the step was skipped on all ranks alike
    other.train(3, 4).ends_as(ours, 0, 0)


@every_spec
def test_of_a_bad_step_that_nobody_skips_no_residual_is_spoiled(spec: str) -> None:
    ours = Replicas(spec, of_sgd, SHAPES, 2).train(2)
    grads = drawn(2, 2)
    grads[1]["a"][3, 4] = math.nan
    ours.step(grads)
    for rank in ours.ranks:
        assert all(bool(left.isfinite().all()) for left in rank.session.resume.residual().values())
        assert not all(bool(weight.isfinite().all()) for weight in rank.weights.values()), "as under DDP, it shows"


def test_huge_gradients_leave_every_value_finite() -> None:
    for spec in SPECS:
        ours = Replicas(spec, of_sgd, SHAPES, 2)
        for step in range(4):
            ours.step(drawn(step, 2, 1e36 if step == 1 else 1.0))
            for rank in ours.ranks:
                kept: list[Tensor] = [
                    *rank.session.resume.residual().values(),
                    *(each.detach() for each in rank.weights.values()),
                ]
                assert all(bool(each.isfinite().all()) for each in kept), (spec, step)
