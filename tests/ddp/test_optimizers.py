"""Optimizers under DDP, on one rank in the test's own process: whatever steps is found, and its steps are torch's own."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from doors import DDP, Training
from loops import LEFT, SPEC, TRAININGS, Lookahead, Run, adamw, plain, same, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradcomp
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.updates import steps

pytestmark = pytest.mark.usefixtures("group_of_one")


def loss_of(run: Run, step: int) -> Tensor:
    run.optimizer.zero_grad()
    loss = run.loss(step)
    loss.backward()
    return loss


# Kinds.


class SignAdam(torch.optim.Adam):
    """A subclass that steps in its own way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


class SAM(Optimizer):
    """Takes the gradient of a step after a climb, as the usual code of SAM does: its step() calls the closure by itself."""

    def __init__(self, inner: Optimizer):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [each for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.grad.norm() for each in every]).norm()
        climbs = [0.05 * each.grad / norm for each in every]
        torch._foreach_add_(every, climbs)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(every, climbs)
        self.inner.step()
        return loss


def lbfgs(parameters: Any) -> Optimizer:
    return torch.optim.LBFGS(parameters, 0.1, max_iter=4)


def close(run: Run, step: int) -> None:
    if not isinstance(run.optimizer, torch.optim.LBFGS):
        loss_of(run, step)
    run.optimizer.step(lambda: loss_of(run, step))


KINDS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW, maximize": lambda p: torch.optim.AdamW(p, 0.01, maximize=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "SGD, dampening": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "a subclass": lambda p: SignAdam(p, 0.01),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_of_torch_keeps_its_own_momentum_where_the_spec_says_so(kind: str) -> None:
    same(lambda spec: Run(KINDS[kind], spec).on(), LEFT)


@pytest.mark.parametrize("kind", ["Adagrad", "Adadelta", "Adafactor", "ASGD", "Rprop", "a subclass"])
def test_an_optimizer_whose_momentum_is_not_known_keeps_it(kind: str) -> None:
    same(lambda spec: Run(KINDS[kind], spec).on())


@pytest.mark.parametrize("kind, spec", [(sgd, SPEC), (adamw, LEFT)])
@pytest.mark.parametrize("training", TRAININGS)
def test_optimizers_that_come_later_or_call_or_share_step_as_alone(training: Any, kind: Any, spec: str) -> None:
    same(lambda spec: training(kind, spec), spec)


@pytest.mark.parametrize("kind, spec", [(sgd, SPEC), (adamw, LEFT)])
def test_an_optimizer_that_calls_its_closure_around_another_ones_step_exchanges_once(kind: Any, spec: str) -> None:
    def training(spec: str | None) -> Run:
        run = Run(lambda parameters: SAM(kind(parameters)), spec).on(body=close)
        assert spec is None or run.handle.stats()["steps"] == 12
        return run

    same(training, spec)


@pytest.mark.parametrize("spec", [SPEC, "auto", "sign:feedback=false,group=32", "dense", "half"])
def test_lbfgs_may_call_its_closure_several_times(spec: str) -> None:
    if spec in ("dense", SPEC):
        same(lambda spec: Run(lbfgs, spec).on(range(3), close), spec)
    run = Run(lbfgs, spec).on(range(3), close)
    assert all(bool(each.isfinite().all()) for each in run.model.parameters())
    assert spec == SPEC or run.handle.stats()["steps"] >= 3


# Which one steps.


def test_two_optimizers_may_step_the_same_layers_in_turn() -> None:
    """One of them at a time, as where a training switches from Adam to SGD and back."""

    def training(spec: str | None) -> Run:
        run = Run(adamw, spec)
        both = [run.optimizer, sgd(run.model.parameters())]
        for step in range(12):
            run.optimizer = both[step % 2]
            plain(run, step)
        return run

    same(training, LEFT)


def test_optimizers_that_share_layers_deliver_by_their_own_momenta() -> None:
    """From the second time on: that they take turns shows when the first one steps again."""

    def training(spec: str | None) -> Run:
        run = Run(lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9), spec)
        both = [run.optimizer, torch.optim.SGD(run.model[0].parameters(), 0.02, momentum=0.5)]

        def body(run: Run, step: int) -> None:
            run.model.zero_grad()
            (run.loss(step) * (step > 1)).backward()
            for each in both:
                each.step()

        run.on(body=body)
        optimizers = run.handle._session.updates.optimizers if spec else None
        before = optimizers and [optimizers.known(each) for each in both]
        body(run, 12)
        assert before == (optimizers and [optimizers.known(each) for each in both]), "each is looked at once"
        return run

    same(training)


@pytest.mark.parametrize("at_4", ["change", "load", "wrap"])
def test_an_optimizer_that_calls_another_takes_no_turns_with_it(at_4: str) -> None:
    """Also where gradcomp looks at both anew, or at the outer one after the inner one."""

    def training(spec: str | None) -> Run:
        run = Run(sgd if at_4 == "wrap" else lambda parameters: Lookahead(sgd(parameters)), spec).on(range(4))
        if at_4 == "wrap":
            run.optimizer = Lookahead(run.optimizer)
        elif spec:
            run.handle.set_spec(spec) if at_4 == "change" else run.handle.load_state_dict(run.handle.state_dict())
        run.on(range(4, 12))
        assert not spec or not run.handle._session.updates.in_step
        return run

    same(training)


@pytest.mark.parametrize("reason", ["it is shared", "its spec says so"])
def test_a_group_of_two_models_keeps_its_momentum_if_one_of_them_does(reason: str) -> None:
    is_shared = reason == "it is shared"

    def training(spec: str | None) -> Run:
        run, other = Run(sgd, spec, given=False), nn.Linear(7, 3)
        its_spec = spec if spec is None or is_shared else LEFT
        second = Training(DDP, other, its_spec, inner=torch.optim.SGD(other.parameters(), 0.02, momentum=0.5), given=False)
        run.optimizer = torch.optim.SGD([*run.model.parameters(), *other.parameters()], 0.02, momentum=0.9)

        def body(run: Run, step: int) -> None:
            run.optimizer.zero_grad()
            ((run.loss(step) + run.loss(step, second.whole)) * (step > 1)).backward()
            run.optimizer.step()
            if is_shared:
                second.optimizer.step()

        run.on(body=body)
        run.model.append(other)
        return run

    same(training)


# Refused.


def test_an_optimizer_in_shards_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def sharded(parameters: Any) -> Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)

    with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer steps a part of the parameters .*\"blocks\""):
        Run(sharded, "topk").on(range(1))
    Run(sharded, "blocks").on(range(2))


def test_a_step_within_backward_is_refused() -> None:
    run = Run(sgd, "topk")
    run.model[0].weight.register_post_accumulate_grad_hook(lambda _: run.optimizer.step())
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) was called within backward\(\).*\"blocks\""):
        plain(run, 0)


def test_a_change_within_backward_is_refused() -> None:
    run = Run(sgd, "blocks", bucket_mb=1e-5).on(range(2))
    run.model[0].weight.register_hook(lambda grad: run.handle.change("topk"))
    with pytest.raises(RuntimeError, match=r"change\(\) came in the middle of a step"):
        plain(run, 2)


@pytest.mark.parametrize(
    "spec, sentence",
    [
        ("auto:los=high", r"auto has no knob 'los' \(did you mean 'loss'"),
        ("auto:loss=medium", "must be one of none, low, high"),
        ("auto; *.bias=dense", "auto is not a compressor"),
    ],
)
def test_wrong_knobs_of_auto_get_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Run(sgd, spec)


# Changes of spec.


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Hold that nothing is left to the collector of cycles, which may come dozens of changes later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "spec", ["topk", "sdagc", "orq:levels=5,feedback=true", "gtopk", "gs_sgd", "topk; *bias=dense:feedback=true", "blocks"]
)
def test_buffers_end_with_their_spec(spec: str) -> None:
    others = {id(each) for each in gc.get_objects() if type(each) is Reducer}
    run = Run(sgd, spec).on(range(1))
    (before,) = (weakref.ref(each) for each in gc.get_objects() if type(each) is Reducer and id(each) not in others)
    run.handle.change("topk:ratio=0.5")
    plain(run, 1)
    assert before() is None


def test_a_lone_rank_stays_with_ddp_under_auto() -> None:
    auto: Any = Run(sgd, "auto").on(range(5)).handle.stats()["auto"]
    assert (auto["way"], auto["reason"], auto["choices"]) == ("stock", "one rank exchanges nothing", 1)


# Another DDP, and hooks.


def wrap(run: Run, spec: str | None = SPEC) -> None:
    """Wrap the model anew. An earlier session has ended by then."""
    run.whole = run.handle = None
    gc.collect()
    run.whole = DistributedDataParallel(run.model)
    if spec is not None:
        run.handle = gradcomp.ddp.attach(run.whole, spec)


@pytest.mark.parametrize("kind, spec, remedy", [(sgd, SPEC, "state_dict"), (sgd, LEFT, ""), (adamw, LEFT, "")])
@pytest.mark.parametrize("unfreezes", [True, False])
def test_a_model_may_be_wrapped_anew(kind: Any, spec: str, remedy: str, unfreezes: bool) -> None:
    """For layers that are unfrozen in mid-training. What the residual holds goes on with its state."""
    if unfreezes and remedy:
        return

    def training(spec: str | None) -> Run:
        run = Run(kind, None)
        run.model[0].requires_grad_(not unfreezes)
        wrap(run, spec)
        run.on(range(4))
        saved = run.handle.state_dict() if spec and remedy else None
        run.model.requires_grad_(True)
        wrap(run, spec)
        if saved:
            run.handle.load_state_dict(saved)
        return run.on(range(4, 8))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(training, spec)


def test_the_optimizer_of_a_model_that_is_wrapped_anew_has_nothing_to_deliver() -> None:
    """Its first moments hold the last gradient alone, since its momentum was hidden."""
    run = Run(torch.optim.Adam, "topk:ratio=0.3").on(range(4))
    wrap(run, "topk:ratio=0.3")
    before = [each.detach().clone() for each in run.model.parameters()]
    for each in run.model.parameters():
        each.grad = torch.zeros_like(each)
    run.optimizer.step()
    assert all(map(torch.equal, before, run.model.parameters()))


def test_a_model_that_is_wrapped_anew_leaves_its_updates_to_the_new_exchange() -> None:
    """A notebook, or a list, may keep the old handle."""

    def training(spec: str | None) -> Run:
        run = Run(sgd, spec).on(range(4))
        old, run.whole = run.handle, DistributedDataParallel(run.model)
        if old is not None:
            run.handle = gradcomp.ddp.attach(run.whole, SPEC)
            run.handle.load_state_dict(old.state_dict())
        run.on(range(4, 8))
        assert old is None or (old.stats()["steps"], run.handle.stats()["steps"]) == (4, 8)
        return run

    same(training)


def test_what_an_ended_session_leaves_behind_exchanges_nothing() -> None:
    """The collector of cycles may free a session well before its parts."""
    run = Run(sgd, SPEC).on(range(2))
    session = steps._living()[-1]
    left_behind, ended = session.updates, weakref.ref(session)
    del session
    run.whole = run.handle = None
    gc.collect()
    assert ended() is None and left_behind.optimizers
    run.whole = DistributedDataParallel(run.model)
    run.handle = gradcomp.ddp.attach(run.whole, SPEC)
    assert run.on(range(2)).handle.stats()["steps"] == 2


def test_an_exchange_takes_its_layers_again_when_a_later_one_has_ended() -> None:
    run = Run(sgd, SPEC)
    later = gradcomp.ddp.attach(DistributedDataParallel(run.model), SPEC)
    run.on(range(2))
    assert (run.handle.stats()["steps"], later.stats()["steps"]) == (0, 2)
    del later
    gc.collect()
    assert run.on(range(2, 4)).handle.stats()["steps"] == 2
