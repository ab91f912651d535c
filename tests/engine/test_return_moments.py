"""The moments go back to the optimizer where a new spec leaves them to it, and training goes on as torch's own."""

from __future__ import annotations

from functools import partial

import pytest
from torch.optim import SGD, Adam, AdamW
from training import SHAPES, OptimizerOf, Training, draw

STEPS, RANKS = 8, 3
OPTIMIZERS: dict[str, OptimizerOf] = {
    "sgd": partial(SGD, lr=0.02, momentum=0.9, weight_decay=0.1),
    "nesterov": partial(SGD, lr=0.02, momentum=0.8, nesterov=True),
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.1),
    "adam": partial(Adam, lr=0.02, weight_decay=0.1),
}
EVERYTHING = "topk:ratio=1,wire=exact"
LEFT, LEVELS = f"{EVERYTHING},momentum=0", "dense:feedback=true,momentum=0"


@pytest.mark.parametrize("specs", [[EVERYTHING, LEFT, LEFT], [EVERYTHING, LEFT, EVERYTHING], [EVERYTHING, LEVELS, EVERYTHING]])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_change_hands_the_moments_back(case: str, specs: list[str]) -> None:
    """Adam's ranks have the same gradients: the mean of directions is then Adam's of the mean."""
    ours, theirs = (Training(spec, OPTIMIZERS[case], ranks=RANKS) for spec in (specs[0], None))
    for turn, spec in enumerate(specs):
        if turn:
            ours.simulation.change(spec)
        for training in (ours, theirs):
            training.train(STEPS, turn * STEPS, alike="adam" in case)
    ours.ends_as(theirs)


def test_settings_that_change_in_mid_training_are_warned_of() -> None:
    """Adam's directions cannot be sent as gradients: the residuals are dropped, and the optimizer begins anew."""
    ours = Training("topk:ratio=0.1", OPTIMIZERS["adamw"], ranks=RANKS).train(1)
    (group,) = ours.optimizer.param_groups
    ours.optimizer.add_param_group({"params": [group["params"].pop()], "betas": (0.8, 0.9)})
    with pytest.warns(UserWarning, match=r"does not support AdamW.s settings now.* begin anew.*SPEC,momentum=0") as seen:
        for step in (1, 2):
            updates = ours.simulation.step(
                [{name: 1e-3 * each for name, each in own.items()} for own in draw(step, ranks=RANKS)]
            )
            assert all(each.abs().max() < 0.1 for each in updates.values()), "a direction came as a gradient"
    assert [each.filename for each in seen] == [__file__]


@pytest.mark.parametrize("nesterov", [False, True])
def test_residuals_of_velocities_move_the_weights_as_far_as_they_would_have(nesterov: bool) -> None:
    """Velocities that wait hold the momentum that the optimizer adds from now on."""
    optimizer_of = partial(SGD, lr=0.02, momentum=0.7, nesterov=nesterov)
    ours, theirs = (Training(spec, optimizer_of, ranks=RANKS) for spec in ("orq:levels=9,feedback=true", None))
    for step in range(80):
        if step == 20:
            ours.simulation.change(LEFT)
        grads = [{name: each * (step < 20) for name, each in own.items()} for own in draw(step, ranks=RANKS)]
        for training in (ours, theirs):
            training.step(grads)
    ours.ends_as(theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_turned_off_nothing_is_left_in_gradcomp(case: str) -> None:
    """As the documentation says: a change to dense without momentum, one step, and the optimizer's state is torch's own."""
    ours = Training("topk:ratio=0.1", OPTIMIZERS[case], SHAPES | {"empty": (0,)}, RANKS).train(5, alike=False)
    assert any(bool(left.any()) for left in ours.simulation.residual(0).values())
    ours.simulation.change("dense:momentum=0")
    ours.train(1, 5, alike=False)
    assert not any(bool(left.any()) for rank in range(RANKS) for left in ours.simulation.residual(rank).values())
    kept = "exp_avg" if "adam" in case else "momentum_buffer"
    assert all(bool(ours.optimizer.state[each][kept].any()) for each in ours.weights.values() if each.numel())


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_checkpoint_of_weights_and_optimizer_goes_on_without_gradcomp(case: str) -> None:
    ours, theirs = (Training(spec, OPTIMIZERS[case], ranks=RANKS) for spec in (EVERYTHING, None))
    for training in (ours, theirs):
        training.train(STEPS, alike="adam" in case)
    ours.simulation.change("dense:momentum=0")
    for training in (ours, theirs):
        training.train(1, STEPS, alike="adam" in case)
    ours.resumed(None).train(STEPS, STEPS + 1).ends_as(theirs.train(STEPS, STEPS + 1))
