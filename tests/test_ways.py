"""Ways of training that users know, by each door: the door's own weights where all is sent, and the same on all ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from doors import ALONE, DDP, DOORS, EVERY, OWN, Training
from torch import Tensor, nn

pytestmark = pytest.mark.slow

STEPS = 6
DENSE, EXACT, SPARSE = "dense", "topk:ratio=1,wire=exact", "topk:ratio=0.01"
OF_GRADIENTS = f"{EXACT},feedback=false"  # for what acts on a mean gradient otherwise than on each rank's own
Way = Callable[[str, str | None], Tensor]


def made(door: str, spec: str | None, model: nn.Module | None = None, **options: Any) -> Training:
    """Make a training with several buckets."""
    return Training(door, model, spec, **({"bucket_mb": 0.02} | options))


def trained(
    door: str, spec: str | None, *, passes: int = 1, dynamic: bool = False, alike: bool = False, **options: Any
) -> Tensor:
    """Train with a door's options.

    passes: backward passes a step. dynamic: ranks leave a layer out now and then. alike: all in the same passes.
    """
    if door == DDP:
        options |= {"find_unused_parameters": True} if dynamic else {}
    elif passes > 1:
        options["backward_passes_per_step"] = passes
    with warnings.catch_warnings():
        if "num_groups" in options:
            warnings.simplefilter("ignore")  # it is deprecated
        run = made(door, spec, small_net.net(unused=dynamic), **options)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        for turn in range(passes):
            skip = dynamic and (step + turn + doors.rank(door) * (not alike)) % 3 == 0
            with run.whole.no_sync() if door == DDP and turn + 1 < passes else nullcontext():
                run.backward(skip=skip)
        run.optimizer.step()
    return run.weights


def clipped(door: str, spec: str | None) -> Tensor:
    """Clip the mean, or each rank's own gradient where updates are exchanged (tests/test_user_clip.py)."""
    run = made(door, OF_GRADIENTS if spec == EXACT else spec)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        run.backward()
        if door != DDP:
            run.optimizer.synchronize()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        with nullcontext() if door == DDP else run.optimizer.skip_synchronize():
            run.optimizer.step()
    return run.weights


def hooked(door: str, spec: str | None) -> Tensor:
    """Train with a tenth of the odd columns' gradients, by a hook of each parameter."""
    run = made(door, spec, momentum=0.9)
    for each in run.model.parameters():
        each.register_hook(lambda grad: grad * (torch.arange(grad.shape[-1]) % 2 * -0.9 + 1))
    return run.train(STEPS)


def removed(door: str, spec: str | None) -> Tensor:
    """Remove a layer's gradient before all steps but the first."""
    run = made(door, spec)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward()
        if door != DDP:
            run.optimizer.synchronize()
        if step:
            run.model.part.weight.grad = None
        with nullcontext() if door == DDP else run.optimizer.skip_synchronize():
            run.optimizer.step()
    return run.weights


def changed(door: str, spec: str | None, **options: Any) -> Tensor:
    """Begin with gradients, go over to updates, and to others. Their momentum goes along."""
    run = made(door, spec and DENSE, momentum=0.9, **options)
    for later in (spec, "dense:feedback=true", spec):
        run.train(3)
        if spec not in (None, DENSE):
            run.handle.change(later)
    return run.train(3)


def by_groups(door: str, spec: str | None) -> Tensor:
    """Train with groups of other momenta, decays and rates."""
    model = small_net.net()
    first, *others = model.children()
    groups: Any = [{"params": first.parameters(), "momentum": 0.5}, {"params": nn.ModuleList(others).parameters(), "lr": 0.01}]
    inner = torch.optim.SGD(groups, 0.02, momentum=0.9, nesterov=True, weight_decay=0.05)
    return made(door, spec, model, inner=inner).train(STEPS)


def scaled(door: str, spec: str | None, told: bool = True) -> Tensor:
    """Train under a scaler that grows, and skips the steps in which one rank's gradient overflows. told: scaler= is passed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    run = made(door, spec, momentum=0.9, **({"scaler": scaler} if told and spec else {}))
    for step in range(10):
        run.optimizer.zero_grad()
        x, y = next(run.data)
        loss = nn.functional.cross_entropy(run.whole(x), y)
        scaler.scale(loss * (torch.inf if (step, doors.rank(door)) in ((3, 0), (7, 1)) else 1.0)).backward()
        run.apply(scaler)
    assert scaler.get_scale() == 2.0**10, "it has doubled twice, and was halved twice"
    return run.weights


def zeroed(door: str, spec: str | None) -> Tensor:
    """Train with three ways to clear gradients, in turn: the optimizer's zero_grad, None, and zeros."""
    run = made(door, spec)
    for turn in range(9):
        (run.optimizer.zero_grad, run.model.zero_grad, lambda: run.model.zero_grad(set_to_none=False))[turn % 3]()
        run.backward(skip=turn in (4, 5))
        run.optimizer.step()
    return run.weights


def dropped(door: str, spec: str | None) -> Tensor:
    """Drop the gradients of a pass after each step, as those that a generator's loss leaves in a discriminator."""
    run = made(door, spec)
    for turn in range(2 * STEPS):
        run.optimizer.zero_grad()
        run.backward()
        if door != DDP:
            run.optimizer.synchronize()
        with nullcontext() if door == DDP else run.optimizer.skip_synchronize():
            run.optimizer.step() if turn % 2 == 0 else None
    return run.weights


def adversaries(door: str, spec: str | None) -> Tensor:
    """Train two adversarial nets in turn; the judge's parameters are frozen while the maker trains."""
    judging, making = made(door, spec, small_net.net(3)), made(door, spec, small_net.net(4))
    judge, maker = judging.model, making.model
    for _ in range(8):
        x, y = next(judging.data)
        judging.optimizer.zero_grad()
        small_net.backward(judge, (torch.cat([x[:, :10], maker(x).detach()], 1), y))
        judging.optimizer.step()
        making.optimizer.zero_grad()
        judge.requires_grad_(False)
        small_net.backward(judge, (torch.cat([x[:, :10], maker(x)], 1), y))
        judge.requires_grad_(True)
        making.optimizer.step()
    return torch.cat([judging.weights, making.weights])


def together(door: str, spec: str | None, left_out: int = 0) -> Tensor:
    """Train one model with two optimizers in one backward pass; rank 1 skips the second one's layers in step left_out."""
    model, data = small_net.net(), doors.batches()
    named = doors.named(model, f"{spec}/{door}/{left_out}.")
    both = []
    for of_part in (False, True):
        own = [(name, parameter) for name, parameter in named if (".part." in name) == of_part]
        both.append(doors.wrapped(door, torch.optim.SGD([parameter for _, parameter in own], 0.02), own, spec))
    for turn in range(6):
        for optimizer in both:
            optimizer.zero_grad()
        small_net.backward(model, next(data), skip=turn == left_out and hvd.rank() == 1)
        for optimizer in both:
            optimizer.step()
    return small_net.weights(model)


def with_closure(door: str, spec: str | None) -> Tensor:
    """Train with a closure. LBFGS asks for the gradient several times in a step; for updates, SGD takes its place."""
    model = small_net.net(width=20)
    inner: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    if spec == SPARSE:
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = made(door, OF_GRADIENTS if spec == EXACT else spec, model, inner=inner)
    for _ in range(3):
        batch = next(run.data)

        def closure(batch: Any = batch) -> Tensor:
            run.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            run.optimizer.synchronize()
            return loss.detach() if spec == SPARSE else hvd.allreduce(loss.detach(), name="loss")

        with run.optimizer.skip_synchronize():
            run.optimizer.step(closure)
    return run.weights


def uneven(door: str, spec: str | None) -> Tensor:
    """One rank has more batches than the others: the others' part in it is zero."""
    run = made(door, spec)
    with run.whole.join():
        run.train(6 + 3 * (dist.get_rank() == 1))
    return run.weights


def some(door: str, spec: str | None) -> Tensor:
    """Train in a group of two of three ranks."""
    return torch.zeros(0) if dist.get_rank() == 1 else made(door, spec, process_group=dist.new_group([0, 2])).train(8)


# By name: the doors, and the way.
WAYS: dict[str, tuple[tuple[str, ...], Way]] = {
    "average": (EVERY, trained),
    "one bucket": (EVERY, partial(trained, bucket_mb=25)),
    "accumulate": (EVERY, partial(trained, passes=3, momentum=0.9)),
    "groups of parameters": (EVERY, by_groups),
    "scaled": (EVERY, scaled),
    "scaled, untold": (EVERY, partial(scaled, told=False)),
    "hooked": (EVERY, hooked),
    "removed": (EVERY, removed),
    "changed": (EVERY, changed),
    "dynamic": (EVERY, partial(trained, dynamic=True)),
    "clipped": (EVERY, clipped),
    "dropped": (EVERY, dropped),
    "views": ((DDP,), partial(trained, gradient_as_bucket_view=True)),
    "static graph": ((DDP,), partial(trained, static_graph=True)),
    "uneven": ((DDP,), uneven),
    "some": ((DDP,), some),
    "not given": (DOORS, partial(trained, given=False, momentum=0.9)),
    "sum": (DOORS, partial(trained, op=hvd.Sum, momentum=0.9, lr=0.01)),
    "sum of several": (DOORS, partial(trained, op=hvd.Sum, momentum=0.9, lr=0.01, passes=2)),
    "changed, sum": (DOORS, partial(changed, op=hvd.Sum, lr=0.01)),
    "predivide": (DOORS, partial(trained, gradient_predivide_factor=2.0)),
    "num_groups": (DOORS, partial(trained, num_groups=1)),
    "groups": (DOORS, partial(trained, groups=1)),
    "dynamic accumulate": (DOORS, partial(trained, dynamic=True, passes=2)),
    # A group that a pass leaves incomplete is exchanged in the step.
    "incomplete groups": (DOORS, partial(trained, dynamic=True, alike=True, groups=1, momentum=0.9, lr=0.01)),
    # Stock Horovod waits for ever here: ranks differ in which groups are complete.
    "dynamic groups": ((OWN,), partial(trained, dynamic=True, groups=1)),
    "zeroed": (DOORS, zeroed),
    "closure": (DOORS, with_closure),
    "adversaries": (DOORS, adversaries),
    # With carriers the ranks compare in the first backward pass, so they must meet in the same order.
    "together": ((OWN,), together),
    "together later": (DOORS, partial(together, left_out=2)),
}
# Ways that three ranks train in: those in which their number counts.
OF_THREE = ("average", "accumulate", "dynamic", "sum", "predivide", "dynamic groups", "uneven", "some")
CASES = [
    (door, count, name)
    for count in (2, 3)
    for name, (own, _) in WAYS.items()
    for door in own
    if (name != "some" if count == 2 else name in OF_THREE)
]
every_case = pytest.mark.parametrize("door, count, name", CASES)


def unused_everywhere() -> tuple[Tensor, Tensor]:
    """Leave a layer out on all ranks. Return how far the weights and the residual of the layer went."""
    run = made(DDP, "topk:ratio=0.05,wire=exact", find_unused_parameters=True)
    run.train(3)
    left = copy.deepcopy(run.residual()["part.weight"])
    before = run.model.part.weight.detach().clone()
    for step in range(4):
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
        run.backward(skip=True)
        run.optimizer.step()
    went = (left - run.residual()["part.weight"]).view_as(before)
    dist.all_reduce(went)
    return before - run.model.part.weight.detach(), went / dist.get_world_size()


def program(door: str, names: list[str]) -> dict[Any, Any]:
    """Train in every way with the door alone, with everything sent and with little."""
    doors.join(door)
    found: dict[Any, Any] = {}
    for name in names:
        _, alone = WAYS["dynamic" if name == "dynamic groups" else name]
        found[name, None] = alone(DDP if door == DDP else ALONE, None)
        for spec in (DENSE, EXACT, SPARSE):
            found[name, spec] = WAYS[name][1](door, spec)
    return found | ({"unused everywhere": unused_everywhere()} if door == DDP else {})


@ranks.once
def found(door: str, count: int) -> list[dict[Any, Any]]:
    return ranks.launch(program, count, door, [name for *start, name in CASES if start == [door, count]])


@every_case
def test_with_nothing_left_out_training_is_the_doors_own(door: str, count: int, name: str) -> None:
    for rank in found(door, count):
        theirs = rank[name, None]
        if count == 2:  # a + b is b + a, whoever adds
            assert torch.equal(theirs, rank[name, DENSE])
        # Three summands in another order, or weights whose differences are the updates: a rounding of 2^-24 each, in ten steps.
        for spec in (DENSE, EXACT):
            assert (theirs - rank[name, spec]).norm() <= 1e-6 * theirs.norm()


@every_case
def test_all_ranks_hold_the_same_weights_to_the_last_bit(door: str, count: int, name: str) -> None:
    first, *others = (rank[name, SPARSE] for rank in found(door, count) if rank[name, SPARSE].numel())
    assert first.isfinite().all() and all(torch.equal(first, other) for other in others)
    assert not torch.equal(first, found(door, count)[0][name, EXACT])  # something was left out indeed


@pytest.mark.parametrize("count", [2, 3])
def test_the_residual_of_an_unused_layer_still_arrives(count: int) -> None:
    """DDP itself would drop it. Rounding: four steps of float32 weights of up to 1/8 against one difference."""
    for own in found(DDP, count):
        came, expected = own["unused everywhere"]
        assert came.abs().sum() > 0
        torch.testing.assert_close(came, expected, rtol=1e-3, atol=1e-7)
