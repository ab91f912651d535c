"""Steps on two ranks, each on its own gradients: weights are equal to the bit, and plain DDP's where SGD sends all."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import loops
import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from doors import DDP, Training
from loops import Body, adamw, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradcomp

pytestmark = pytest.mark.slow

STEPS = 8
EXACT = "topk:ratio=1,wire=exact"
SPECS = ("topk:ratio=0.05", "sign", "sdagc:lam=2", "orq", "gs_sgd:ratio=0.05")


def made(kind: Any, spec: str | None, **options: Any) -> Training:
    """Make a training with several of DDP's buckets."""
    model = small_net.net()
    return Training(DDP, model, spec, inner=kind(model.parameters()), bucket_mb=0.02, given=False, **options)


def rank() -> int:
    return dist.get_rank()


# Trainings, which end with the weights.


def by(body: Body, kind: Any, spec: str | None) -> Tensor:
    options = {"find_unused_parameters": True, "layers": loops.Branching} if body in UNUSED else {}
    return weights(loops.Run(kind, spec, **SETTINGS, **options).on(range(STEPS), body))


def by_optimizers(training: Any, kind: Any, spec: str | None) -> Tensor:
    return weights(training(kind, spec, **{name: value for name, value in SETTINGS.items() if name != "given"}))


def weights(run: loops.Run) -> Tensor:
    return small_net.weights(run.model)


# Of several of DDP's buckets.
SETTINGS: dict[str, Any] = {"width": 200, "bucket_mb": 0.004, "given": False}
UNUSED = (loops.freeze, loops.use_now_and_then, loops.use_in_the_second_pass)
# What plain DDP does with the mean gradient, each rank does with its own; or the weights of DDP's ranks differ afterwards.
OWN = (loops.clip_norm, loops.clip_value, loops.replace, loops.climb, loops.alone, loops.in_no_sync)
LOOPS = {each.__name__: partial(by, each) for each in (*loops.BODIES, *UNUSED) if each is not loops.climb}
LOOPS |= {each.__name__: partial(by_optimizers, each) for each in loops.TRAININGS}
ALIKE = {name: each for name, each in LOOPS.items() if name not in {own.__name__ for own in (*OWN, *UNUSED)}}


# Trainings of ranks that differ, or that are no loop of one body. They end with the weights.


def accumulate_unevenly(kind: Any, spec: str | None) -> Tensor:
    """Run other passes on each rank, all but the last in no_sync()."""
    run = made(kind, spec)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        for part in range(2 + rank()):
            with run.whole.no_sync() if part <= rank() else contextlib.nullcontext():
                run.backward()
        run.optimizer.step()
    return run.weights


def joins_at_once(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    run.train(1)
    with run.whole.join():
        run.train(4 * rank())
    return run.weights


def joins_with_decay(kind: Any, spec: str | None) -> Tensor:
    """The decay of weights goes on at full strength, as under DDP alone."""
    decayed = {sgd: lambda each: torch.optim.SGD(each, 0.02, momentum=0.9, weight_decay=0.5)}.get(kind, kind)
    run = made(decayed, spec)
    with run.whole.join():
        run.train(2 + 6 * rank())
    return run.weights


def joins_with_unused_layers(kind: Any, spec: str | None) -> Tensor:
    """DDP's ranks tell one another which layers they use, before the step. A group has unused layers alone."""

    def decayed(parameters: Any) -> torch.optim.Optimizer:
        *others, weight, bias = parameters
        return torch.optim.SGD([{"params": others}, {"params": [weight, bias]}], 0.02, momentum=0.9, weight_decay=0.5)

    run = loops.Run({sgd: decayed}.get(kind, kind), spec, find_unused_parameters=True, layers=loops.Branching, **SETTINGS)
    run.model.uses = False
    with run.whole.join():
        run.on(range(2 + 4 * rank()), loops.plain)
    return weights(run)


class Hybrid(torch.optim.Optimizer):
    """Steps matrices itself, and leaves the other layers to an inner optimizer."""

    def __init__(self, layers: Any, kind: Any):
        layers = [*layers]
        super().__init__(layers, {})
        self.matrices, self.inner = (
            [each for each in layers if each.dim() > 1],
            kind([each for each in layers if each.dim() < 2]),
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.matrices:
            each -= 0.02 * each.grad
        self.inner.step()


def joins_with_an_inner_optimizer(kind: Any, spec: str | None) -> Tensor:
    """A rank that has joined exchanges of each step what the others do, and no more."""
    run = made(lambda layers: Hybrid(layers, kind), spec)
    with run.whole.join():
        run.train(2 + 4 * rank())
    return run.weights


def joins_and_accumulates(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    with run.whole.join():
        for _ in range(3 + 2 * rank()):
            run.optimizer.zero_grad()
            with run.whole.no_sync():
                run.backward()
            run.backward()
            run.optimizer.step()
    return run.weights


def lbfgs(kind: Any, spec: str | None) -> Tensor:
    """It is refused: its directions follow from steps of its own."""
    run = made(lambda parameters: torch.optim.LBFGS(parameters, 0.1), spec)
    said = small_net.refused(lambda: run.optimizer.step(lambda: torch.zeros(())))
    assert "LBFGS takes its next direction" in said and '"blocks"' in said
    return run.weights


def replace_the_optimizer(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    run.train(4)
    left = run.residual()
    run.optimizer = adamw(run.model.parameters())
    assert spec is None or any(each.any() for each in left.values())
    run.train(4)
    return run.weights


def climb(kind: Any, spec: str | None, by_copies: bool = True) -> Tensor:
    """Take steps of SAM, and go back to where they began: by copies, or by what was added."""
    run = made(kind, spec)
    parameters = [each.data for each in run.model.parameters()]
    for _ in range(STEPS):
        batch, starts = next(run.data), [each.clone() for each in parameters]
        run.optimizer.zero_grad()
        small_net.backward(run.whole, batch)
        climbs = [0.05 * each.grad for each in run.model.parameters()]
        torch._foreach_add_(parameters, climbs)
        run.optimizer.zero_grad()
        small_net.backward(run.whole, batch)
        if by_copies:
            torch._foreach_copy_(parameters, starts)
        else:
            torch._foreach_sub_(parameters, climbs)
        run.optimizer.step()
    return run.weights


def change(kind: Any, spec: str | None) -> Tensor:
    """Change to an exchange of gradients and back. The optimizers' states are equal then."""
    run = made(kind, spec)
    run.train(4)
    for each in ("blocks", "half", spec):
        run.handle.change(each)
        state = [each for of in run.optimizer.state.values() for each in of.values() if torch.is_tensor(each)]
        if each != spec:
            equal([each.float() for each in state])
            equal([*run.model.parameters()])
            run.train(3)
    return run.train(3)


def go_back_after_a_change(kind: Any, spec: str | None) -> Tensor:
    """Load a state of torch from a time when updates were exchanged, each rank its own, where gradients are."""
    run = made(kind, spec)
    run.train(4)
    kept = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    run.handle.change("blocks")
    run.train(2)
    run.model.load_state_dict(kept[0])
    run.optimizer.load_state_dict(kept[1])
    return run.train(3)


def resume_and_change(kind: Any, spec: str | None) -> Tensor:
    """Load each rank's state, and exchange gradients before its optimizer has stepped, as a load under "blocks" advises."""
    run, again = made(kind, spec), made(kind, spec)
    run.train(4)
    again.model.load_state_dict(run.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    again.handle.load_state_dict(run.handle.state_dict())
    again.handle.change("half")
    again.handle.change("blocks")
    return again.train(4)


def wrap_anew_and_change(kind: Any, spec: str | None) -> Tensor:
    """Wrap the model anew, and exchange gradients before the optimizer's next step."""
    run = made(kind, spec)
    run.train(4)
    state = run.handle.state_dict()
    run.whole = DistributedDataParallel(run.model)
    run.handle = gradcomp.ddp.attach(run.whole, spec)
    run.handle.load_state_dict(state)
    run.handle.change("blocks")
    return run.train(4)


def wrap_anew_for_gradients(kind: Any, spec: str | None, keeps: bool = False) -> Tensor:
    """Exchange gradients where an earlier exchange has left each rank's optimizer a state of its own. keeps: it lives on."""
    run = made(kind, spec)
    run.train(4)
    kept = (run.handle, run.whole) if keeps else ()
    run.handle = run.whole = None
    run.whole = DistributedDataParallel(run.model)
    run.handle = gradcomp.ddp.attach(run.whole, "blocks")
    run.train(4)
    assert not kept or kept[0].stats()["steps"] == 4
    return run.weights


def wrap_after_local_steps(kind: Any, spec: str | None) -> Tensor:
    """Exchange gradients where local steps have left each rank's optimizer a state of its own."""
    model, data = small_net.net(), small_net.examples(rank())
    optimizer: Any = kind(model.parameters())
    small_net.train(model, gradcomp.local.LocalSteps(model, optimizer, spec or "sign", every=2), data, 4)
    whole = DistributedDataParallel(model)
    gradcomp.ddp.attach(whole, "blocks")
    return small_net.train(whole, optimizer, data, 4)


def load_local_steps_and_wrap(kind: Any, spec: str | None) -> Tensor:
    """Exchange gradients where a state of local steps has been loaded, and no step came since."""
    model, data = small_net.net(), small_net.examples(rank())
    local = gradcomp.local.LocalSteps(model, kind(model.parameters()), spec or "sign", every=2)
    small_net.train(model, local, data, 4)
    model, state = small_net.net(), local.state_dict()
    optimizer: Any = kind(model.parameters())
    gradcomp.local.LocalSteps(model, optimizer, spec or "sign", every=2).load_state_dict(state)
    gradcomp.ddp.attach(whole := DistributedDataParallel(model), "blocks")
    return small_net.train(whole, optimizer, data, 4)


def load_into_a_new_optimizer(kind: Any, spec: str | None) -> Tensor:
    """Load each rank's state from a time when updates were exchanged, where gradients have been for some steps."""
    run = made(kind, spec)
    run.train(4)
    kept = copy.deepcopy(run.optimizer.state_dict())
    run.handle.change("blocks")
    run.train(2)
    run.optimizer = kind(run.model.parameters())
    run.optimizer.load_state_dict(kept)
    return run.train(3)


def save_before_the_first_step(kind: Any, spec: str | None) -> Tensor:
    """Resume where a new optimizer has got each rank's state, and gradients are exchanged since, but nothing has stepped."""
    run, again = made(kind, spec), made(kind, "blocks")
    run.train(4)
    kept = copy.deepcopy(run.optimizer.state_dict())
    run.handle.change("blocks")
    again.model.load_state_dict(run.model.state_dict())
    again.handle.load_state_dict(run.handle.state_dict())
    again.optimizer.load_state_dict(kept)
    return again.train(4)


def equal(tensors: list[Tensor]) -> None:
    own = torch.cat([each.detach().flatten() for each in tensors]) if tensors else torch.zeros(1)
    every = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(every, own)
    assert torch.equal(*every)


OTHERS = (
    joins_at_once,
    joins_with_decay,
    joins_with_unused_layers,
    joins_with_an_inner_optimizer,
    joins_and_accumulates,
    accumulate_unevenly,
    lbfgs,
    replace_the_optimizer,
    climb,
    change,
    go_back_after_a_change,
    resume_and_change,
    wrap_anew_and_change,
    wrap_anew_for_gradients,
    wrap_after_local_steps,
    load_local_steps_and_wrap,
    load_into_a_new_optimizer,
    save_before_the_first_step,
)
ALIKE |= {each.__name__: each for each in (joins_with_decay, joins_with_unused_layers, joins_with_an_inner_optimizer)}
EVERY: dict[str, Any] = {**LOOPS, **{each.__name__: each for each in OTHERS}}


def own_gradients(**options: Any) -> list[bool]:
    """Compare gradients, after the backward pass and as the optimizer sees them, with those of the model without DDP."""
    run, found = made(sgd, "topk:ratio=0.05", **options), list[bool]()
    twin = copy.deepcopy(run.model)
    for step in range(4):
        twin.load_state_dict(run.model.state_dict())
        run.optimizer.zero_grad()
        twin.zero_grad()
        for part in range(2):
            batch = next(run.data)
            small_net.backward(twin, batch)
            with run.whole.no_sync() if part == 0 and step > 1 else contextlib.nullcontext():
                small_net.backward(run.whole, batch)
        pairs = [*zip(run.model.parameters(), twin.parameters(), strict=True)]
        found += [torch.equal(own.grad, wanted.grad) for own, wanted in pairs]
        before = [own.grad.clone() for own, _ in pairs]
        run.optimizer.step()
        found += [torch.equal(own.grad, each) for (own, _), each in zip(pairs, before, strict=True)]
    return found


def hooks() -> None:
    """Let hooks after a step see equal weights."""
    run, seen = made(sgd, "topk:ratio=0.05"), list[str]()

    def look(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seen.append(name)
            equal([*run.model.parameters()])

        return hook

    run.optimizer.register_step_post_hook(look("early"))
    everywhere = register_optimizer_step_post_hook(look("everywhere"))
    run.train(2)
    run.optimizer.register_step_post_hook(look("late"))
    run.train(2)
    everywhere.remove()
    assert [seen.count(each) for each in ("early", "late", "everywhere")] == [4, 2, 4]


def wrapped_anew() -> Tensor:
    """Wrap a model anew for an exchange of gradients. The collector has found the old exchange on one rank alone by then."""
    ranks.join()
    gc.disable()
    run = loops.Run(sgd, SPECS[0], given=False).on(range(2))
    run.whole.belongs_to_a_cycle = run.whole.__dict__
    run.whole = DistributedDataParallel(run.model)
    run.handle = None
    if rank():
        gc.collect()
    run.handle = gradcomp.ddp.attach(run.whole, "blocks")
    return weights(run.on(range(2, 5)))


def attached() -> None:
    """Take the first rank's weights and buffers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    whole = DistributedDataParallel(model)
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.add_(rank() + 1)
    wanted = [each.clone() for each in (*model.parameters(), *model.buffers())]
    gradcomp.ddp.attach(whole, "topk")
    found = [*model.parameters(), *model.buffers()]
    equal([each.float() for each in found])
    assert rank() or all(map(torch.equal, found, wanted))


def program() -> dict[Any, Any]:
    ranks.join()
    found: dict[Any, Any] = {}
    for name, case in ALIKE.items():
        found |= {(name, spec): case(sgd, spec) for spec in (None, EXACT)}
    for i, (name, case) in enumerate(EVERY.items()):
        for kind, spec in ((sgd, SPECS[i % 5]), (adamw, SPECS[(i + 2) % 5])):
            found[name, kind.__name__] = case(kind, spec)
    hooks()
    attached()
    return found | {
        "gradients": [*own_gradients(), *own_gradients(gradient_as_bucket_view=True)],
        "climbs": climb(sgd, "topk:ratio=0.05", by_copies=False),
        "wraps": [wrap_anew_for_gradients(adamw, "topk:ratio=0.05", keeps=keeps) for keeps in (False, True)],
    }


outcomes = ranks.once(lambda: ranks.launch(program, 2))


@pytest.mark.parametrize("case", ALIKE)
def test_with_everything_sent_sgd_trains_as_under_ddp_alone(case: str) -> None:
    for own in outcomes():
        torch.testing.assert_close(own[case, EXACT], own[case, None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("case", EVERY)
def test_the_weights_of_all_ranks_are_equal_to_the_bit(case: str, kind: str) -> None:
    first, second = (own[case, kind] for own in outcomes())
    assert torch.equal(first, second) and first.isfinite().all()


def test_weights_that_each_rank_changes_by_its_own_gradients_and_back_differ_by_their_rounding() -> None:
    first, second = (own["climbs"] for own in outcomes())
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_between_backward_and_step_gradients_are_those_of_the_rank_alone() -> None:
    for own in outcomes():
        assert len(own["gradients"]) == 2 * 4 * 2 * 8 and all(own["gradients"])


def test_a_new_exchange_of_gradients_ends_an_old_one_of_updates() -> None:
    for own in outcomes():
        assert torch.equal(*own["wraps"])


def test_an_exchange_that_nobody_has_any_more_ends_on_all_ranks_when_the_model_is_wrapped_anew() -> None:
    first, second = ranks.launch(wrapped_anew, 2, seconds=60)
    assert torch.equal(first, second)
