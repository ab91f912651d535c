"""DDP on one rank, in the test's own process: each use of momentum=auto trains as torch alone does, or is refused by name."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from one_rank import LEFT, SPEC, Body, Run, adamw, both, plain, same, sgd
from torch.optim import Optimizer
from torch.optim.adamw import adamw as adamw_of_torch

from gradcomp.engine.reducer import Reducer
from gradcomp.engine.taken_momentum import AdamMoments

pytestmark = [
    pytest.mark.usefixtures("group_of_one"),
    pytest.mark.filterwarnings("ignore:.* exchanges gradients, since"),  # some optimizers here are odd on purpose
]
IS_TURNED = "maximize of .* has changed in mid-training.*negate the loss"
IS_NEW = r"(SGD|AdamW) is new.*holds the moments of the one before.*momentum=0"


def without_exchange(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.loss(step, run.whole if step < 3 else run.model).backward()
    run.optimizer.step()


def in_no_sync(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    with contextlib.nullcontext() if step < 3 else run.whole.no_sync():
        run.loss(step).backward()
    run.optimizer.step()


def twice(run: Run, step: int) -> None:
    plain(run, step)
    run.optimizer.step()


@both
@pytest.mark.parametrize(
    "body, sentence",
    [
        (without_exchange, r"steps without an exchange.*last backward pass.*SPEC,momentum=0"),
        (in_no_sync, r"steps without an exchange.*last backward pass.*SPEC,momentum=0"),
        (twice, r"steps without an exchange.*last backward pass.*SPEC,momentum=0"),
    ],
)
def test_exchanges_and_steps_must_take_turns(optimizer_of: Any, body: Body, sentence: str) -> None:
    """Otherwise Adam would do nothing, and SGD would lose its momentum and weight decay."""
    with pytest.raises(RuntimeError, match=sentence):
        Run(optimizer_of).on(body=body)


@both
@pytest.mark.parametrize("on_gpu", [False, True], indirect=True)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_failed_need_not_be_applied(optimizer_of: Any, scaled: bool, on_gpu: None) -> None:
    """A GradScaler skips it, or the user's own check of the gradients does. Then change() may come, too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    run = Run(optimizer_of, scaler=scaler)
    for step in range(8):
        run.optimizer.zero_grad()
        error = (float("inf") if step in (3, 7) else 1.0) * run.loss(step)
        (error if scaler is None else scaler.scale(error)).backward()
        if scaler is not None:
            scaler.step(run.optimizer)
            scaler.update()
        elif all(bool(each.grad.isfinite().all()) for each in run.model.parameters()):  # type: ignore[union-attr]
            run.optimizer.step()
    run.handle.change(LEFT)
    assert all(bool(each.isfinite().all()) for each in run.model.parameters())


@both
def test_a_step_of_zeros_without_an_exchange_leaves_the_training_alone(optimizer_of: Any) -> None:
    """hvd.broadcast_optimizer_state() makes one. Neither the momentum nor the weight decay acts in it."""

    def body(run: Run, step: int) -> None:
        plain(run, step)
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run.optimizer.step()

    same(lambda spec: Run(optimizer_of, spec).on(body=plain if spec is None else body))


def resumed(optimizer_of: Any, given: bool, spec: str | None) -> Run:
    """Train 20 steps, and go on with new objects for 5."""
    first, run = Run(optimizer_of, spec).on(range(20)), Run(optimizer_of, spec, given=given)
    run.model.load_state_dict(first.model.state_dict())
    if spec is not None:
        run.handle.load_state_dict(first.handle.state_dict())
    run.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    return run.on(range(20, 25))


@both
def test_a_resumed_training_needs_its_optimizer(optimizer_of: Any) -> None:
    """Unknown in the first step, the optimizer would begin anew: what was loaded would be dropped without a word."""
    same(lambda spec: resumed(optimizer_of, True, spec))
    with pytest.raises(RuntimeError, match=r"the loaded state holds .* pass optimizer="):
        resumed(optimizer_of, False, SPEC)
    run = Run(optimizer_of, given=False)
    run.handle.load_state_dict(Run(optimizer_of).on(range(3)).handle.state_dict())
    with pytest.raises(RuntimeError, match=r"the loaded state holds .* pass optimizer="):
        run.handle.change(LEFT)


def test_a_state_without_moments_needs_no_optimizer() -> None:
    same(lambda spec: resumed(lambda parameters: torch.optim.SGD(parameters, 0.05), False, spec))


@both
@pytest.mark.parametrize("by", ["load_state_dict", "commit and roll_back"])
def test_a_rollback_in_mid_step_is_torchs_own(optimizer_of: Any, by: str) -> None:
    def training(spec: str | None) -> Run:
        """Go back by two steps in the middle of a step, and do them again."""
        run = Run(optimizer_of, spec).on(range(4))
        session: Any = None if spec is None else run.handle._session
        kept = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        if session is not None:
            session.commit()
            ours = session.state_dict()
        run.on(range(4, 6))
        run.optimizer.zero_grad()
        run.loss(99).backward()  # and an error of the user's own before step()
        run.model.load_state_dict(kept[0])
        run.optimizer.load_state_dict(kept[1])
        if session is not None:
            if by == "load_state_dict":
                session.load_state_dict(ours)
            else:
                session.roll_back()
        return run.on(range(4, 12))

    same(training)


def test_moments_that_are_loaded_again_have_their_own_step_count() -> None:
    """Torch's state of step 5, loaded into a training at step 60, goes on with the corrections of step 6."""
    fresh = Run(adamw, None).on(range(5))

    def training(spec: str | None) -> Run:
        run = Run(adamw, spec)
        for steps in (range(5, 60), range(60, 62)):
            run.model.load_state_dict(fresh.model.state_dict())
            run.optimizer.load_state_dict(copy.deepcopy(fresh.optimizer.state_dict()))
            run.on(steps)
        return run

    same(training)


@pytest.mark.filterwarnings("ignore:.* exchanges gradients, since")
@both
@pytest.mark.parametrize("reason", ["unknown", "other settings"])
def test_moments_that_the_optimizer_made_itself_stay(optimizer_of: Any, reason: str) -> None:
    """An unknown optimizer, or one with settings that are left to it, has moments of its own when the spec changes."""
    key, (odd, usual) = ("dampening", (0.3, 0)) if optimizer_of is sgd else ("amsgrad", (True, False))

    def prepared(parameters: Any) -> Optimizer:
        optimizer = optimizer_of(parameters)
        optimizer.param_groups[0]["nesterov"] = False
        if reason == "other settings":
            optimizer.param_groups[0][key] = odd
        return optimizer

    def training(spec: str | None) -> Run:
        steps = 1 if reason == "unknown" else 4
        run = Run(prepared, spec, given=reason == "other settings").on(range(steps))
        run.optimizer.param_groups[0][key] = usual
        if spec is not None:
            run.handle.change(LEFT)
        return run.on(range(steps, 10))

    same(training)


class SignAdam(torch.optim.Adam):
    """A subclass that steps in its own way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


class Renamed(torch.optim.AdamW):
    """A subclass that steps as its base does."""


class OldAdamW(Optimizer):
    """AdamW as before torch 2.7: no subclass of Adam, and without a word on its decay in the groups."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for own in (each for each in group["params"] if each.grad is not None):
                moments = [torch.zeros_like(own), torch.zeros_like(own)]
                state = self.state[own] or {"step": torch.zeros(()), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
                self.state[own] = state
                kept = [[state[name]] for name in ("exp_avg", "exp_avg_sq")]
                (beta1, beta2), settings = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
                adamw_of_torch(
                    [own],
                    [own.grad],
                    *kept,
                    [],
                    [state["step"]],
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    maximize=False,
                    **settings,
                )

    step.__wrapped__.__module__ = "torch.optim.adamw"  # type: ignore[attr-defined]


def test_adamw_of_an_older_torch_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AdamMoments.types == (torch.optim.Adam, torch.optim.AdamW)
    monkeypatch.setattr(AdamMoments, "types", (torch.optim.Adam, OldAdamW))
    monkeypatch.setattr(torch.optim, "AdamW", OldAdamW)
    same(lambda spec: Run(OldAdamW, spec).on())
    assert Run(OldAdamW).on().layers()["adam"]["second"]


@pytest.mark.filterwarnings("ignore:.* exchanges gradients, since")
def test_a_subclass_with_its_own_step_gets_gradients() -> None:
    same(lambda spec: Run(lambda parameters: SignAdam(parameters, 0.01), spec).on())
    assert "adam" not in Run(lambda parameters: SignAdam(parameters, 0.01)).on().layers()
    assert Run(lambda parameters: Renamed(parameters, 0.01)).on().layers()["adam"]["second"]


@both
def test_a_change_between_exchange_and_step_is_refused(optimizer_of: Any) -> None:
    run = Run(optimizer_of).on(range(3))
    run.loss(3).backward()
    with pytest.raises(RuntimeError, match=r"change\(\) came between an exchange and optimizer.step\(\)"):
        run.handle.change(LEFT)
    run.optimizer.step()
    run.handle.change(LEFT)


@pytest.mark.filterwarnings("ignore:AdamW is new")
@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_of_another_kind_is_refused(given: bool) -> None:
    run = Run(sgd, given=given).on(range(4))
    run.optimizer = adamw(run.model.parameters())
    with pytest.raises(RuntimeError, match=r"AdamW steps with updates that were made for SGD.*momentum=0"):
        run.on(range(4, 12))


class Lookahead(torch.optim.Optimizer):
    """Goes back half of the way every three steps of another optimizer, which has the same groups."""

    def __init__(self, inner: torch.optim.Optimizer):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.steps = inner, inner.param_groups, 0
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, each in zip(self.slow, (each for group in self.param_groups for each in group["params"]), strict=True):
                each.data.copy_(slow.lerp_(each.detach(), 0.5))


@both
def test_an_optimizer_around_another_one_is_refused_where_updates_hold_momentum(optimizer_of: Any) -> None:
    def around(parameters: Any) -> Lookahead:
        return Lookahead(optimizer_of(parameters))

    for given in (True, False):
        with pytest.raises(
            RuntimeError, match=r"Lookahead steps.* calls the step\(\) of another.* spec be auto, or write momentum=0"
        ):
            run = Run(optimizer_of, given=given)
            run.optimizer = Lookahead(run.optimizer)
            run.on(range(4))
    for spec in (LEFT, "auto"):
        same(lambda spec: Run(around, spec).on(), spec)


@pytest.mark.filterwarnings("ignore:.* exchanges gradients, since")
def test_settings_that_change_before_the_step_are_named() -> None:
    run = Run(lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    run.loss(0).backward()
    run.optimizer.param_groups[0]["dampening"] = 0.1
    with pytest.raises(RuntimeError, match=r"SGD's settings now.* dampening.*the update that it steps with was made before"):
        run.optimizer.step()


@both
def test_of_two_optimizers_the_one_that_steps_is_asked(optimizer_of: Any) -> None:
    """Alternating optimizers of one kind must not leave a momentum that acts twice."""
    run = Run(optimizer_of)
    first, other = run.optimizer, optimizer_of(run.model.parameters())
    for step in range(12):
        run.optimizer = other if 4 <= step < 8 else first
        with pytest.warns(UserWarning, match=IS_NEW) if step in (4, 8) else contextlib.nullcontext():
            plain(run, step)
        assert not run.optimizer.state, "torch has no momentum beside the exchange's"


@both
@pytest.mark.parametrize("hands_back", [True, False])
def test_a_new_optimizer_begins_anew(optimizer_of: Any, hands_back: bool) -> None:
    """Its first update is made before anybody can know it, unless the spec leaves the momentum to the optimizer then."""

    def training(spec: str | None) -> Run:
        run = Run(optimizer_of, spec).on(range(5))
        if spec and hands_back:
            run.handle.change(LEFT)
        run.optimizer = optimizer_of(run.model.parameters())
        with pytest.warns(UserWarning, match=IS_NEW) if spec and not hands_back else contextlib.nullcontext():
            plain(run, 5)
        if not hands_back:
            torch.manual_seed(7)
            run.optimizer.state.clear()
            for weight in run.model.parameters():
                weight.data.normal_()
        elif spec:
            run.handle.change(spec)
        return run.on(range(6, 12))

    same(training)


@both
def test_maximize_that_changes_is_refused_and_a_negated_loss_does_the_same(optimizer_of: Any) -> None:
    def training(spec: str | None) -> Run:
        run = Run(optimizer_of, spec).on(range(4))
        run.optimizer.zero_grad()
        run.loss(4).backward()
        run.optimizer.param_groups[0]["maximize"] = bool(spec)
        with pytest.raises(RuntimeError, match=IS_TURNED) if spec else contextlib.nullcontext():
            run.optimizer.step()
        run.optimizer.param_groups[0]["maximize"] = not spec
        if spec:
            run.optimizer.step()
        for step in range(5, 9):
            run.optimizer.zero_grad()
            (-run.loss(step) if spec else run.loss(step)).backward()
            run.optimizer.step()
        return run

    same(training)


def test_freezing_after_attach_keeps_the_momentum() -> None:
    run = Run(adamw, find_unused_parameters=True)
    run.model[0].weight.requires_grad_(False)
    plain(run, 0)
    assert run.layers()["adam"]["second"] and not run.optimizer.state


@pytest.mark.parametrize("known", [True, False])
def test_a_fused_optimizer_under_a_scaler(known: bool) -> None:
    def fused(kind: Any, **settings: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")
        run = Run(lambda parameters: kind(parameters, lr=0.01, fused=True, **settings), scaler=scaler if known else None)
        scaler.scale(run.loss(0)).backward()
        scaler.step(run.optimizer)

    with pytest.raises(RuntimeError, match="fused=False"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the unknown scaler
        fused(torch.optim.AdamW)
    if known:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fused(torch.optim.SGD, momentum=0.9)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Hold that nothing is left to the collector of cycles, which may come dozens of changes later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "spec", ["topk", "sdagc", "orq:levels=5,feedback=true", "gtopk", "gs_sgd", "topk; *bias=dense:feedback=true"]
)
def test_a_residual_ends_with_its_spec(spec: str) -> None:
    others = {id(each) for each in gc.get_objects() if type(each) is Reducer}
    run = Run(sgd, spec).on(range(1))
    (before,) = (weakref.ref(each) for each in gc.get_objects() if type(each) is Reducer and id(each) not in others)
    run.handle.change("topk:ratio=0.5")
    plain(run, 1)
    assert before() is None


def test_a_lone_rank_stays_with_ddp_under_auto() -> None:
    auto: Any = Run(sgd, "auto").on(range(5)).handle.stats()["auto"]
    assert (auto["way"], auto["reason"], auto["choices"]) == ("stock", "one rank exchanges nothing", 1)


@pytest.mark.parametrize(
    "spec, sentence",
    [
        ("auto:los=high", r"auto has no knob 'los' \(did you mean 'loss'"),
        ("auto:loss=medium", "must be one of none, low, high"),
        ("auto; *.bias=dense", "auto is no compressor"),
    ],
)
def test_wrong_knobs_of_auto_get_a_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Run(sgd, spec)


def test_adam_asks_for_the_optimizer() -> None:
    """The ranks do not compare its noise otherwise, and its steps are short."""
    told, untold, velocities = (
        Run(kind, given=given).on(range(2)).handle.stats()["exchanges"]
        for kind, given in ((adamw, True), (adamw, False), (sgd, False))
    )
    assert untold == f"{told}; pass optimizer= beside the spec: without it, the steps are shorter than torch's"
    assert velocities.endswith("(momentum taken over)")


@both
@pytest.mark.filterwarnings("ignore:gradcomp. the gradients were clipped")
def test_a_clip_in_a_hook_of_the_optimizer_is_one_before_its_step(optimizer_of: Any) -> None:
    hooked, other = Run(optimizer_of), Run(optimizer_of)
    clips = [lambda *_, r=each: torch.nn.utils.clip_grad_norm_(r.model.parameters(), 0.1) and None for each in (hooked, other)]
    hooked.optimizer.register_step_pre_hook(clips[0])
    for step, run in [(step, run) for step in range(9) for run in (hooked, other)]:
        run.optimizer.zero_grad()
        run.loss(step).backward()
        run is hooked or clips[1]()
        run.optimizer.step()
    assert all(map(torch.equal, hooked.model.parameters(), other.model.parameters()))
