"""Steps on two ranks, each on its own gradients: weights are equal to the bit, and plain DDP's where SGD sends all."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from doors import DDP, Training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import gradcomp

pytestmark = pytest.mark.slow

STEPS = 8
EXACT = "topk:ratio=1,wire=exact"
SPECS = ("topk:ratio=0.05", "sign", "sdagc:lam=2", "orq", "gs_sgd:ratio=0.05")


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, 0.003)


def made(kind: Any, spec: str | None, layers: Callable[[nn.Module], Any] | None = None, **options: Any) -> Training:
    """Make a training with several of DDP's buckets. layers: those of the optimizer, by default all."""
    model = small_net.net()
    inner = kind((model if layers is None else layers(model)).parameters())
    return Training(DDP, model, spec, inner=inner, **{"bucket_mb": 0.02, "given": False} | options)


def rank() -> int:
    return dist.get_rank()


# Trainings, which end with the weights.


def plain(kind: Any, spec: str | None) -> Tensor:
    return made(kind, spec).train(STEPS)


def views(kind: Any, spec: str | None) -> Tensor:
    return made(kind, spec, gradient_as_bucket_view=True).train(STEPS)


def one_rank_leaves_a_layer_out(kind: Any, spec: str | None) -> Tensor:
    return made(kind, spec, find_unused_parameters=True).train(STEPS, lambda step: (step + rank()) % 3 == 0)


def keep_gradients(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    for step in range(STEPS):
        run.backward()
        run.optimizer.step()
        if step % 2:
            run.optimizer.zero_grad()
    return run.weights


def leave_out_on_all(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.backward()
        if step % 3:
            run.optimizer.step()
    return run.weights


def accumulate(kind: Any, spec: str | None, exchanges: int = 1, parts: int = 3) -> Tensor:
    run = made(kind, spec)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        for part in range(parts):
            with contextlib.nullcontext() if part >= parts - exchanges else run.whole.no_sync():
                run.backward()
        run.optimizer.step()
    return run.weights


def accumulate_in_all_passes(kind: Any, spec: str | None) -> Tensor:
    return accumulate(kind, spec, exchanges=3)


def accumulate_unevenly(kind: Any, spec: str | None) -> Tensor:
    """Run other passes on each rank, all but the last in no_sync()."""
    return accumulate(kind, spec, parts=2 + rank())


def close(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    for _ in range(STEPS):
        batch = next(run.data)

        def closure(batch: Any = batch) -> float:
            run.optimizer.zero_grad()
            small_net.backward(run.whole, batch)
            return 1.0

        assert run.optimizer.step(closure) == 1.0
    return run.weights


class Lookahead(Optimizer):
    """Goes back half of the way every three steps of another optimizer."""

    def __init__(self, inner: Optimizer):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.steps = inner, inner.param_groups, 0
        self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, each in zip(self.slow, self.param_groups[0]["params"], strict=True):
                each.copy_(slow.lerp_(each, 0.5))


def look_ahead(kind: Any, spec: str | None) -> Tensor:
    run = made(lambda parameters: Lookahead(kind(parameters)), spec)
    weights = run.train(STEPS)
    assert spec is None or run.handle.stats()["steps"] == STEPS
    return weights


def make_later(kind: Any, spec: str | None) -> Tensor:
    """Make the optimizer after attach()."""
    run = made(kind, spec)
    run.optimizer = kind(run.model.parameters())
    return run.train(STEPS)


def add_a_group(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec, lambda model: model.first)
    run.train(3)
    run.optimizer.add_param_group({"params": [*run.model.last.parameters()], "lr": 0.01})
    return run.train(STEPS)


def two_optimizers(kind: Any, spec: str | None, by_turns: bool = False) -> Tensor:
    run = made(kind, spec)
    parts = [[*run.model.first.parameters()], [each for name, each in run.model.named_parameters() if "first" not in name]]
    both = [kind(parts[0]), torch.optim.SGD(parts[1], 0.01)]
    for step in range(STEPS):
        run.model.zero_grad()
        run.backward()
        for each in both[step % 2 : step % 2 + 1] if by_turns else both:
            each.step()
    return run.weights


def two_optimizers_by_turns(kind: Any, spec: str | None) -> Tensor:
    return two_optimizers(kind, spec, by_turns=True)


def freeze(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec, find_unused_parameters=True)
    run.train(3)
    run.model.part.requires_grad_(False)
    run.train(2)
    return run.weights


ALIKE = (
    *(plain, views, one_rank_leaves_a_layer_out, keep_gradients, leave_out_on_all, accumulate, accumulate_in_all_passes),
    *(close, look_ahead, make_later, add_a_group, two_optimizers, two_optimizers_by_turns, freeze),
)


def joins(kind: Any, spec: str | None, fewest: int = 3) -> Tensor:
    """Train in DDP's join(), with more batches on rank 1."""
    run = made(kind, spec)
    with run.whole.join():
        run.train(fewest + 3 * rank())
    return run.weights


def joins_at_once(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    run.train(1)
    with run.whole.join():
        run.train(4 * rank())
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


# Trainings that plain DDP runs otherwise: clips of own gradients, Adam, several passes of a closure.


def clip(kind: Any, spec: str | None) -> Tensor:
    run = made(kind, spec)
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        run.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
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


def equal(tensors: list[Tensor]) -> None:
    own = torch.cat([each.detach().flatten() for each in tensors]) if tensors else torch.zeros(1)
    every = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(every, own)
    assert torch.equal(*every)


OTHERS = (joins, joins_at_once, joins_and_accumulates, accumulate_unevenly, clip, lbfgs, replace_the_optimizer, climb, change)


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


def norms() -> tuple[float, float]:
    run = made(sgd, "topk:ratio=0.05")
    run.optimizer.zero_grad()
    run.backward()
    return run.handle.stats()["grad_norm"], float(torch.cat([each.grad.flatten() for each in run.model.parameters()]).norm())


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
    for case in ALIKE:
        found[case.__name__, None] = case(sgd, None)
        found[case.__name__, EXACT] = case(sgd, EXACT)
    for i, case in enumerate((*ALIKE, *OTHERS)):
        for kind, spec in ((sgd, SPECS[i % 5]), (adamw, SPECS[(i + 2) % 5])):
            found[case.__name__, kind.__name__] = case(kind, spec)
    hooks()
    attached()
    return found | {
        "gradients": [*own_gradients(), *own_gradients(gradient_as_bucket_view=True)],
        "norms": norms(),
        "climbs": climb(sgd, "topk:ratio=0.05", by_copies=False),
    }


outcomes = ranks.once(lambda: ranks.launch(program, 2))


@pytest.mark.parametrize("case", [each.__name__ for each in ALIKE])
def test_with_everything_sent_sgd_trains_as_under_ddp_alone(case: str) -> None:
    for own in outcomes():
        torch.testing.assert_close(own[case, EXACT], own[case, None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("case", [each.__name__ for each in (*ALIKE, *OTHERS)])
def test_the_weights_of_all_ranks_are_equal_to_the_bit(case: str, kind: str) -> None:
    first, second = (own[case, kind] for own in outcomes())
    assert torch.equal(first, second) and first.isfinite().all()


def test_weights_that_each_rank_changes_by_its_own_gradients_and_back_differ_by_their_rounding() -> None:
    first, second = (own["climbs"] for own in outcomes())
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_between_backward_and_step_gradients_are_those_of_the_rank_alone() -> None:
    for own in outcomes():
        assert len(own["gradients"]) == 2 * 4 * 2 * 8 and all(own["gradients"])
        assert own["norms"][0] == pytest.approx(own["norms"][1], rel=1e-5)
    first, second = (own["norms"] for own in outcomes())
    assert first != second
