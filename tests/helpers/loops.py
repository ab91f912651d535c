"""Loops that users write around a small model in DDP, with gradcomp or as torch alone, on any number of ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from doors import DDP, Training
from torch import Tensor, nn
from torch.optim import Optimizer

SPEC = "topk:ratio=1,wire=exact"
# The optimizer keeps its momentum.
LEFT = f"{SPEC},momentum=0"


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.02, momentum=0.9, nesterov=True, weight_decay=0.05)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.1)


class Run(Training):
    """A training in DDP, with gradcomp where there is a spec. width: of the hidden layer."""

    def __init__(
        self, optimizer_of: Any, spec: str | None = SPEC, layers: Any = nn.Sequential, *, width: int = 5, **options: Any
    ):
        torch.manual_seed(1)
        model = layers(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 3))
        super().__init__(DDP, model, spec, inner=optimizer_of(model.parameters()), **options)

    def loss(self, at: int, model: nn.Module | None = None) -> Tensor:
        """Return the loss of a batch of this rank's own."""
        generator = torch.Generator().manual_seed(at + 1000 * dist.get_rank())
        x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 3, generator=generator)
        error: Tensor = ((self.whole if model is None else model)(x) - y).square().mean()
        return error

    def on(self, steps: range = range(12), body: Body | None = None) -> Run:
        """Train, and return this training."""
        for step in steps:
            (body or plain)(self, step)
        return self


Body = Callable[[Run, int], None]


def plain(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step).backward()
    run.optimizer.step()


def same(training: Callable[[str | None], Run], spec: str = SPEC) -> None:
    """Compare a training's weights with those of torch alone."""
    ours, theirs = (training(each).model for each in (spec, None))
    for own, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


def accumulate(run: Run, step: int, exchanges: int = 2) -> None:
    run.optimizer.zero_grad()
    for part in range(2):
        with contextlib.nullcontext() if part >= 2 - exchanges else run.whole.no_sync():
            (run.loss(2 * step + part) / 2).backward()
    run.optimizer.step()


def accumulate_alone(run: Run, step: int) -> None:
    accumulate(run, step, exchanges=1)


def between(act: Callable[[Run, int], Any]) -> Body:
    """Make a loop that acts on the gradients of each pass before the step."""

    def body(run: Run, step: int) -> None:
        run.optimizer.zero_grad()
        run.loss(step).backward()
        act(run, step)
        run.optimizer.step()

    body.__name__ = act.__name__
    return body


def close(run: Run, step: int) -> None:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return loss

    assert run.optimizer.step(closure) > 0


def leave_out(run: Run, step: int) -> None:
    """Leave a step out now and then, as a guard does."""
    run.optimizer.zero_grad()
    run.loss(step).backward()
    if step % 3:
        run.optimizer.step()


def twice(run: Run, step: int) -> None:
    """Step twice with one gradient."""
    plain(run, step)
    run.optimizer.step()


def alone(run: Run, step: int) -> None:
    """Run later passes around DDP, whose hooks then see nothing."""
    run.optimizer.zero_grad()
    run.loss(step, run.whole if step < 3 else run.model).backward()
    run.optimizer.step()


def in_no_sync(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    with contextlib.nullcontext() if step < 3 else run.whole.no_sync():
        run.loss(step).backward()
    run.optimizer.step()


def step_of_zeros(run: Run, step: int) -> None:
    """Step with gradients of zeros, as hvd.broadcast_optimizer_state() does."""
    plain(run, step)
    for each in run.model.parameters():
        each.grad = torch.zeros_like(each)
    run.optimizer.step()


@between
def without_gradients(run: Run, step: int) -> None:
    """Clear the gradients of a bad batch, and step."""
    if step % 3 == 0:
        run.optimizer.zero_grad()


def write_weights(run: Run, step: int) -> None:
    """Change the weights between two steps, as a clip of weights or a reset of neurons does."""
    plain(run, step)
    with torch.no_grad():
        for each in run.model.parameters():
            each.clamp_(-0.2, 0.2)


@between
def clip_norm(run: Run, step: int) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


@between
def clip_value(run: Run, step: int) -> None:
    nn.utils.clip_grad_value_(run.model.parameters(), 0.01)


@between
def mask(run: Run, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for each in run.model.parameters():
        each.grad *= 0.3 * (torch.rand(each.shape, generator=generator) < 0.5)


@between
def cancel(run: Run, step: int) -> None:
    """Remove the last layer's gradient, as DINO does in its first epoch."""
    for each in run.model[2].parameters():
        each.grad = None


@between
def replace(run: Run, step: int) -> None:
    """Give the parameters other gradients than those of the backward pass."""
    for each in run.model.parameters():
        each.grad = each.grad.sign()


def keep(run: Run, step: int) -> None:
    """Keep gradients after every other step, so that the next backward pass adds to them."""
    run.loss(step).backward()
    run.optimizer.step()
    if step % 2:
        run.optimizer.zero_grad()


def keep_half(run: Run, step: int) -> None:
    run.loss(step).backward()
    run.optimizer.step()
    for each in run.model.parameters():
        each.grad.mul_(0.5)  # type: ignore[union-attr]


def keep_one_layer(run: Run, step: int) -> None:
    run.loss(step).backward()
    run.optimizer.step()
    for each in [*run.model.parameters()][1:]:
        each.grad = None


def clear_late(run: Run, step: int) -> None:
    """Clear gradients between the forward and the backward pass."""
    loss = run.loss(step)
    if step % 2:
        run.optimizer.zero_grad(set_to_none=step % 4 == 1)
    loss.backward()
    run.optimizer.step()


def in_two_passes_of_three(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    for part in range(3):
        with run.whole.no_sync() if part == 1 else contextlib.nullcontext():
            (run.loss(3 * step + part) / 3).backward()
    run.optimizer.step()


def play(run: Run, step: int) -> None:
    """Train a discriminator: two losses in two passes, a step, and a pass of the generator's loss, which is dropped."""
    accumulate(run, 2 * step)
    run.loss(2 * step + 1).backward()


@between
def regularise(run: Run, step: int) -> None:
    """Add the gradient of a loss that goes around DDP."""
    (0.1 * sum(each.square().sum() for each in run.model.parameters())).backward()
    torch.autograd.grad(run.loss(step), [*run.model.parameters()])


def climb(run: Run, step: int) -> None:
    """Take a step of SAM: climb by gradients, and step from the first place by those from up there."""
    parameters = [*run.model.parameters()]
    run.optimizer.zero_grad()
    run.loss(step).backward()
    with torch.no_grad():
        norm = torch.stack([each.grad.norm() for each in parameters]).norm()  # type: ignore[union-attr]
        climbs = [0.05 * each.grad / norm for each in parameters]  # type: ignore[operator]
        torch._foreach_add_(parameters, climbs)
        run.optimizer.zero_grad()
    run.loss(step).backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, climbs)
    run.optimizer.step()


@between
def change_settings(run: Run, step: int) -> None:
    run.optimizer.param_groups[0].update(weight_decay=0.1 * (step % 2), maximize=step % 4 == 3)


BODIES = [
    *(plain, close, leave_out, twice, alone, in_no_sync, step_of_zeros, write_weights),
    *(clip_norm, clip_value, mask, cancel, replace, keep, keep_half, keep_one_layer, clear_late),
    *(accumulate, accumulate_alone, in_two_passes_of_three, play, regularise, climb, change_settings),
]


# Layers without a gradient.


class Branching(nn.Sequential):
    """Layers, and one more that only some passes use."""

    uses = True

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        self.branch = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self[2](self[1](self[0](x)))
        return y + self.branch(y) if self.uses else y


def freeze(run: Run, step: int) -> None:
    run.model[2].requires_grad_(not 3 <= step < 7)
    plain(run, step)


def use_now_and_then(run: Run, step: int) -> None:
    run.model.uses = step % 3 == 0
    plain(run, step)


def use_in_the_second_pass(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    for part in range(2):
        run.model.uses = part == 1
        (run.loss(2 * step + part) / 2).backward()
    run.optimizer.step()


# Whole trainings, by optimizers that begin later, share a model, or call one another.


class Lookahead(Optimizer):
    """Goes back half of the way every three steps of another optimizer, which has the same groups."""

    def __init__(self, inner: Optimizer):
        super().__init__(inner.param_groups, {})
        self._begin(inner)

    def _begin(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.steps = inner, inner.param_groups, 0
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, each in zip(self.slow, (each for group in self.param_groups for each in group["params"]), strict=True):
                each.data.copy_(slow.lerp_(each.detach(), 0.5))


class BareLookahead(Lookahead):
    """Leaves out what Optimizer does at the start, and has the hooks of steps alone, as timm's."""

    def __init__(self, inner: Optimizer):
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.defaults, self.state = inner.defaults, defaultdict(dict)
        self._begin(inner)


def look_ahead(kind: Any, spec: str | None, by: type[Lookahead] = Lookahead, **options: Any) -> Run:
    run = Run(lambda parameters: by(kind(parameters)), spec, **options).on()
    assert spec is None or run.handle.stats()["steps"] == 12, "the innermost one exchanges, once"
    return run


def look_ahead_barely(kind: Any, spec: str | None, **options: Any) -> Run:
    return look_ahead(kind, spec, BareLookahead, **options)


def make_later(kind: Any, spec: str | None, **options: Any) -> Run:
    """Make the optimizer after attach(), which knows of none."""
    run = Run(lambda parameters: torch.optim.SGD(parameters, 1.0), spec, given=False, **options)
    run.optimizer = kind(run.model.parameters())
    return run.on()


def add_a_group(kind: Any, spec: str | None, **options: Any) -> Run:
    run = Run(lambda parameters: kind([*parameters][2:]), spec, find_unused_parameters=True, **options).on(range(4))
    run.optimizer.add_param_group({"params": [*run.model[0].parameters()], "lr": 0.005})
    return run.on(range(4, 12))


def share_a_model(kind: Any, spec: str | None, stepping: Callable[[int], slice], **options: Any) -> Run:
    """Train with an optimizer of each layer, of which these step."""
    run = Run(sgd, spec, given=False, **options)
    run.optimizer = [each(layer.parameters()) for each, layer in zip((kind, sgd), run.model[::2], strict=True)]

    def body(run: Run, step: int) -> None:
        run.model.zero_grad()
        run.loss(step).backward()
        for each in run.optimizer[stepping(step)]:
            each.step()

    return run.on(body=body)


def both_at_once(kind: Any, spec: str | None, **options: Any) -> Run:
    return share_a_model(kind, spec, lambda step: slice(2), **options)


def by_turns(kind: Any, spec: str | None, **options: Any) -> Run:
    return share_a_model(kind, spec, lambda step: slice(step % 2, step % 2 + 1), **options)


def one_more_often(kind: Any, spec: str | None, **options: Any) -> Run:
    return share_a_model(kind, spec, lambda step: slice(1 + (step % 3 == 0)), **options)


def share_a_layer(kind: Any, spec: str | None, **options: Any) -> Run:
    """Train two models that share a layer, each in a DDP of its own. One exchanges it, and no warning comes of the other."""
    run = Run(sgd, spec, given=False, **options)
    other = nn.Sequential(run.model[0], nn.Tanh(), nn.Linear(run.model[2].in_features, 3))
    second = Training(DDP, other, spec, inner=kind(other[2].parameters()), given=False)
    run.optimizer = kind(run.model.parameters())

    def body(run: Run, step: int) -> None:
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run.loss(step + 50, second.whole).backward()
        run.optimizer.step()
        second.optimizer.step()
        second.optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run.on(body=body)


TRAININGS = (look_ahead, look_ahead_barely, make_later, add_a_group, both_at_once, by_turns, one_more_often, share_a_layer)
