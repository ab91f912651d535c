"""A clip after the exchange, as usual loops have it: undone there, and done to each rank's own gradients before it."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import doors
import pytest
import ranks
import torch
import torch.distributed as dist
from clipping import ALL, BOUND, MADE, STEPS, Three, adamw, by_norm, equal, finish, gradients, said, sgd, train
from doors import DDP, OWN, Training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine.user_clip import ABSENT

pytestmark = pytest.mark.slow

RANKS = 2
DOORS = (DDP, OWN)


# Cases beside the usual loop, each with what torch alone does with equal gradients on all ranks. More cases are of DDP alone.


def scaled(door: str | None, made: Any, clip: Callable[..., Any] = by_norm, *, told: bool = True) -> list[Tensor]:
    """Train under a GradScaler, with a scale that changes on the way. told: scaler= is passed."""
    model, scaler = Three(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    given = scaler if told else None
    run = None if door is None else Training(door, model, ALL, inner=made(model.parameters()), scaler=given)
    optimizer = made(model.parameters()) if run is None else run.optimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale((model if run is None else run.whole)(gradients(step))).backward()
        if door == OWN:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        clip(model)
        with optimizer.skip_synchronize() if door == OWN else contextlib.nullcontext():
            scaler.step(optimizer)
        scaler.update()
    return [each.detach().clone() for each in model.parameters()]


def accumulated(spec: str | None, made: Any, exchanges_all: bool) -> list[Tensor]:
    """Add up two gradients in each step."""
    model = Three()
    run = None if spec is None else Training(DDP, model, spec, inner=made(model.parameters()))
    optimizer = made(model.parameters()) if run is None else run.optimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        for last in (False, True):
            alone = last or exchanges_all or run is None
            with contextlib.nullcontext() if alone else run.whole.no_sync():
                (0.5 * (model if run is None else run.whole)(gradients(step))).backward()
        by_norm(model)
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def refused(play: Callable[[], Any]) -> str:
    """Return the error of a loop, or its warnings, or nothing."""
    try:
        _, warned = said(play)
    except RuntimeError as error:
        return f"error: {error}"
    return "; ".join(text for text, _ in warned)


def unequal(spec: str, made: Any, spike: float) -> list[Tensor]:
    """Train on gradients that differ between the ranks, one of them multiplied. Return the weights from before it on."""
    model, rank = Three(), dist.get_rank()
    run, found = Training(DDP, model, spec, inner=made(model.parameters())), []
    for step in range(2 * STEPS):
        run.optimizer.zero_grad()
        given = gradients(0, 100 * step + rank)
        factor = 1.0 if step < STEPS else spike if step == STEPS else 0.0
        run.whole([factor * each for each in given]).backward()
        by_norm(model)
        run.optimizer.step()
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    return found[STEPS - 1 :]


def values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.05)


def third(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad /= 3


def long(model: nn.Module) -> None:
    by_norm(model, 1e9)


def largest(model: nn.Module) -> None:
    by_norm(model, 0.1, norm_type=float("inf"))


def counted(model: Any) -> None:
    """Divide by a number of tokens, which varies."""
    model.count = getattr(model, "count", 20) * 7 % 41 + 20
    for parameter in model.parameters():
        parameter.grad /= model.count


COUNTS: dict[str, Callable[[int], float]] = {"32": lambda _: 32, "4": lambda _: 4, "tokens": lambda step: 20 + 7 * step % 25}
COUNTS["weights"] = lambda step: (5.03, 29.31, 17.17, 44.71)[step % 4]


def divided(door: str | None, made: Any, count: Callable[[int], float]) -> list[Tensor]:
    """Train on sums of gradients, divided by their count after the exchange, and clipped."""
    steps = itertools.count()

    def clip(model: nn.Module) -> None:
        number = count(next(steps))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= number
        by_norm(model)

    return train(door, made, clip, given=lambda step: [count(step) * each for each in gradients(step)])


def sometimes(door: str | None) -> list[Tensor]:
    """Train by SGD under a clip in two of three steps."""
    steps = itertools.count()
    clip = lambda model: next(steps) % 3 == 2 or by_norm(model)  # noqa: E731
    return train(door, sgd, clip, given=lambda step: [2 * each for each in gradients(step % 3)])


def two(parameters: Any) -> Any:
    a, b, c = parameters
    return [sgd([a, b], weight_decay=0.0), adamw([c])]


def listed(spec: str | None) -> list[Tensor]:
    """Train with SGD and AdamW in one list, under one clip."""
    model = Three()
    optimizers = two(model.parameters())
    whole: Any = model
    if spec is not None:
        whole = DistributedDataParallel(model)
        gradcomp.ddp.attach(whole, spec, optimizer=optimizers)
    for step in range(STEPS):
        model.zero_grad()
        whole(gradients(step)).backward()
        by_norm(model)
        for each in optimizers:
            each.step()
    return [each.detach().clone() for each in model.parameters()]


def carried() -> list[Tensor]:
    """Change to another exact spec after the clip is known, before longer gradients."""
    model = Three()
    run = Training(DDP, model, ALL, inner=adamw(model.parameters()))
    for step in range(STEPS):
        if step == 3:
            run.handle.change("dense:feedback=true")
        run.optimizer.zero_grad()
        run.whole(gradients(step)).backward()
        by_norm(model, foreach=step % 2 == 0)
        run.optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def summed(made: Any) -> list[Tensor]:
    """Train on the sum of all ranks' gradients, each its share of them."""
    import horovod.torch as hvd

    model = Three()
    run = Training(OWN, model, ALL, inner=made(model.parameters()), op=hvd.Sum)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.whole([each / RANKS for each in gradients(step)]).backward()
        finish(run, lambda: by_norm(model))
    return [each.detach().clone() for each in model.parameters()]


def left(spec: str | None, made: Any) -> list[Tensor]:
    """Clip in 6 steps only. torch alone clips as long as gradcomp remembers."""
    model = Three()
    run = None if spec is None else Training(DDP, model, spec, inner=made(model.parameters()))
    optimizer = made(model.parameters()) if run is None else run.optimizer
    for step in range(6 + ABSENT + 5):
        optimizer.zero_grad()
        longer = 1.0 if step < 3 else 3.0
        (model if run is None else run.whole)([longer * each for each in gradients(0, step)]).backward()
        if step < 6 or (run is None and step < 6 + ABSENT):
            by_norm(model)
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def resumed(made: Any, at: int | None) -> list[Tensor]:
    """Train on unequal gradients, from some step on with all that was saved there in a new process's place."""
    model, file = Three(), io.BytesIO()
    run = Training(DDP, model, "topk:ratio=0.1", inner=made(model.parameters()))
    losses = []
    run.whole([float("inf") * each for each in gradients(0)]).backward()  # refused, and never applied
    for step in range(STEPS):
        if step == at:
            parts = {"model": model.state_dict(), "optimizer": run.optimizer.state_dict(), "handle": run.handle.state_dict()}
            torch.save(parts, file)
            model = Three()
            run = Training(DDP, model, "topk:ratio=0.1", inner=made(model.parameters()))
            parts = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            model.load_state_dict(parts["model"])
            run.optimizer.load_state_dict(parts["optimizer"])
            run.handle.load_state_dict(parts["handle"])
        run.optimizer.zero_grad()
        longer = {0: 2.5, 1: 1.6}.get(step, 1.0)  # than the bound, but not the updates, of which little is sent
        loss = run.whole([longer * each for each in gradients(step, dist.get_rank())])
        losses.append(loss.detach())
        loss.backward()
        by_norm(model)
        run.optimizer.step()
    return [torch.stack(losses), *(each.detach().clone() for each in model.parameters())]


def undecayed(parameters: Any) -> Any:
    return sgd(parameters, weight_decay=0.0)


def fallen_back(spec: str | None, at: int | None = None) -> list[Tensor]:
    """Train by SGD under a clip of values, which ends the momentum once. Go on from a state at some step."""
    model = Three()
    run = None if spec is None else Training(DDP, model, spec, inner=undecayed(model.parameters()))
    optimizer = undecayed(model.parameters()) if run is None else run.optimizer
    for step in range(STEPS):
        if run is None and step == 1:
            optimizer.state.clear()
        if run is not None and step == at:
            parts = copy.deepcopy([model.state_dict(), optimizer.state_dict(), run.handle.state_dict()])
            model = Three()
            run = Training(DDP, model, spec, inner=undecayed(model.parameters()))
            optimizer = run.optimizer
            for each, part in zip((model, optimizer, run.handle), parts, strict=True):
                each.load_state_dict(part)
        optimizer.zero_grad()
        (model if run is None else run.whole)(gradients(step)).backward()
        values(model)
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


SENT_BY = {"topk": "topk:ratio=0.1", "levels": "orq", "left": "topk:ratio=0.1,momentum=0"}


def of_ddp() -> dict[Any, Any]:
    found: dict[Any, Any] = {
        ("accumulated", name, every): accumulated(ALL, MADE[name], every)
        for name in ("sgd", "adamw")
        for every in (False, True)
    }
    found |= {
        ("refused", clip.__name__, made.__name__): refused(lambda clip=clip, made=made: train(DDP, made, clip))  # type: ignore[misc]
        for clip in (values, third, long, largest, counted)
        for made in (sgd, adamw)
    }
    for name in ("sgd", "adamw"):
        found["refused", "untold", name] = refused(lambda m=MADE[name]: scaled(DDP, m, told=False))  # type: ignore[misc]
    found |= {("divided", name): said(lambda c=each: divided(DDP, sgd, c)) for name, each in COUNTS.items()}  # type: ignore[misc]
    found |= {"sometimes": said(lambda: sometimes(DDP)), "listed": listed(ALL), "carried": carried()}
    found["fallen back"] = [
        said(lambda spec=spec, at=at: fallen_back(spec, at)) for spec in (ALL, "topk:ratio=0.1") for at in (None, 5)
    ]  # type: ignore[misc]
    found |= {("left", name): left(ALL, MADE[name]) for name in ("sgd", "adamw")}
    found |= {("auto", name): said(lambda m=MADE[name]: train(DDP, m, spec="auto")) for name in ("sgd", "adamw")}  # type: ignore[misc]
    found |= {("resumed", name, at): resumed(MADE[name], at) for name in ("sgd", "adamw") for at in (None, 1, 5)}
    found |= {
        ("spike", key, name): [unequal(spec, MADE[name], spike) for spike in (1e4, 2.0)]
        for key, spec in SENT_BY.items()
        for name in ("sgd", "adamw")
    }
    return found


def program(door: str) -> dict[Any, Any]:
    doors.join(door)
    found: dict[Any, Any] = {("law", name): said(lambda m=made: train(door, m)) for name, made in MADE.items()}  # type: ignore[misc]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradcomp: the gradients were clipped")
        found |= {("scaled", name): scaled(door, MADE[name]) for name in ("sgd", "adamw")}
        found["unscaled"] = said(lambda: scaled(door, adamw, long))
        found |= of_ddp() if door == DDP else {name: summed(MADE[name]) for name in ("plain", "adamw")}
    return found


@ranks.once
def found(door: str) -> list[dict[Any, Any]]:
    return ranks.launch(program, RANKS, door)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", MADE)
def test_with_everything_sent_and_equal_gradients_clip_and_optimizer_are_torchs(name: str, door: str) -> None:
    for rank, own in enumerate(found(door)):
        weights, warned = own["law", name]
        equal(weights, train(None, MADE[name]))
        assert [here and "clipped to a norm of 3 " in text for text, here in warned] == [True] * (rank == 0)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_clip_under_a_loss_scale_is_torchs_and_unscaling_is_none(name: str, door: str) -> None:
    for own in found(door):
        equal(own["scaled", name], scaled(None, MADE[name]))
        weights, warned = own["unscaled"]
        assert warned == []
        equal(weights, scaled(None, adamw, long))


@pytest.mark.parametrize("door, name", [(DDP, "listed"), (DDP, "carried"), (OWN, "plain"), (OWN, "adamw")])
def test_a_clip_by_several_optimizers_and_after_a_change_and_of_sums_is_torchs(door: str, name: str) -> None:
    for own in found(door):
        # Adam divides by the root of a square: an entry near 0 shows the rounding of another order of sums.
        equal(own[name], listed(None) if name == "listed" else train(None, MADE.get(name, adamw)), 1e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_clip_is_forgotten_once_the_user_has_not_clipped_for_some_steps(name: str) -> None:
    for own in found(DDP):
        equal(own["left", name], left(None, MADE[name]), 1e-5)


def test_a_clip_of_values_leaves_the_momentum_to_sgd() -> None:
    for own in found(DDP):
        (exact, warned), (resumed_exact, _), (sent, _), (resumed_sent, more) = own["fallen back"]
        equal(exact, fallen_back(None), 1e-5)
        equal(resumed_exact, exact, 0.0)
        equal(resumed_sent, sent, 0.0)
        assert ["From the next step on the exchange is of gradients" in text for text, _ in warned] == [True] and len(more) == 1


def far(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the distance of two results, as a share of the way to the second."""
    ours, torchs, begin = (torch.cat([each.detach().flatten() for each in of]) for of in (found, wanted, Three().parameters()))
    return float((ours - torchs).norm() / (torchs - begin).norm())


@pytest.mark.parametrize("name", COUNTS)
def test_a_division_and_a_clip_after_the_exchange_leave_the_momentum_to_sgd(name: str) -> None:
    """As long as the division was undone, steps were a count's times too long. Weights leap."""
    words = (
        "and a clip to a norm that leaps is not" if name == "weights" else "the gradients were divided, for example by a count"
    )
    for rank, own in enumerate(found(DDP)):
        weights, warned = own["divided", name]
        assert far(weights, divided(None, sgd, COUNTS[name])) < 0.8
        assert [words in text for text, _ in warned][-1:] == [True] * (rank == 0)


def test_a_clip_in_some_steps_leaves_the_momentum_to_sgd() -> None:
    for rank, own in enumerate(found(DDP)):
        weights, warned = own["sometimes"]
        assert far(weights, sometimes(None)) < 0.5
        assert ["in some steps they were not, although longer" in text for text, _ in warned][-1:] == [True] * (rank == 0)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_under_auto_a_clip_acts_as_without_gradcomp(name: str) -> None:
    for own in found(DDP):
        weights, warned = own["auto", name]
        assert warned == []
        # It tries lossy candidates in these steps. A spike that is not clipped leads 9 times as far away with SGD.
        assert far(weights, train(None, MADE[name])) < 0.5


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_training_with_a_clip_resumes_to_the_bit(name: str, at: int) -> None:
    """Before the clip is seen for the first time, and after it."""
    for own in found(DDP):
        assert all(map(torch.equal, own["resumed", name, at], own["resumed", name, None]))


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_clip_of_accumulated_gradients_is_torchs(name: str, every: bool) -> None:
    for own in found(DDP):
        equal(own["accumulated", name, every], accumulated(None, MADE[name], every))


@pytest.mark.parametrize(
    "clip, made, words",
    [
        (
            "values",
            "adamw",
            "error: the gradients were changed between their exchange and step(), and not each layer by one factor up to 1",
        ),
        (
            "values",
            "sgd",
            "the gradients were changed between their exchange and step(), and not each layer by one factor up to 1",
        ),
        ("third", "adamw", ""),
        ("third", "sgd", ""),
        ("long", "adamw", ""),
        ("long", "sgd", ""),
        ("largest", "adamw", "the gradients were multiplied by one factor between their exchange and step(), and norms of"),
        ("largest", "sgd", "the gradients were multiplied by one factor between their exchange and step(), and norms of"),
        (
            "untold",
            "adamw",
            "error: the gradients were changed between their exchange and step(), which looks like GradScaler.",
        ),
        ("untold", "sgd", "a GradScaler steps the optimizer, but gradcomp does not know its scale"),
        ("counted", "adamw", ""),
        ("counted", "sgd", ""),
    ],
)
def test_other_changes_are_refused_or_warned_of_unless_they_are_one_factor_or_none(clip: str, made: str, words: str) -> None:
    for rank, own in enumerate(found(DDP)):
        text, of_rank_0 = own["refused", clip, made], words.startswith(("the gradients were multiplied", "a GradScaler"))
        words = "" if rank and of_rank_0 else words
        assert text.startswith(words) and bool(text) == bool(words) and text.count("by one factor") <= 1


@pytest.mark.parametrize("key", SENT_BY)
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_spike_moves_weights_as_a_gradient_of_the_bounds_length_does(name: str, key: str) -> None:
    """One of 10^4 times, and one of twice the length: both are cut to the same gradient. Error feedback brings nothing back."""
    first, second = (own["spike", key, name] for own in found(DDP))
    for own, other in zip(first, second, strict=True):
        assert all(map(torch.equal, own, other)), "the replicas differ"
    for spiked, usual in zip(*first, strict=True):
        if key != "left":  # its clip acts on the spike for the first time
            torch.testing.assert_close(spiked, usual, rtol=1e-3, atol=1e-3)
    if name == "sgd":
        path = torch.stack([(after - before).norm() for before, after in itertools.pairwise(first[0])]).sum()
        assert 0 < path < (10 if key == "left" else 3) * 0.05 * BOUND / (1 - 0.9), path
