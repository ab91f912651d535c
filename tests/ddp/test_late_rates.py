"""Learning rates that a program sets between the exchange and the optimizer's step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from one_rank import Run
from torch import Tensor, nn
from torch.optim import SGD

pytestmark = pytest.mark.usefixtures("group_of_one")
STEPS, RATE = 6, 0.01


@pytest.mark.parametrize("swing, factor", [(10.0, 1.0), (1.5, 1.5)])
@pytest.mark.parametrize("given", [True, False])
def test_a_residual_has_the_rate_of_the_step_where_it_leaps_after_the_exchange(
    swing: float, factor: float, given: bool
) -> None:
    """Otherwise a residual is multiplied for the smaller rate, and then sent by the larger one.

    swing: of the rate, by turns. factor: of a residual, in every second step, and its inverse in the others.
    """
    two = lambda first, *_: nn.Sequential(first, nn.Linear(5, 3))  # noqa: E731
    run, own = Run(partial(SGD, lr=RATE), "topk:ratio=0.2,wire=exact", two, given=given), dict[str, Tensor]()
    named = dict(run.model.named_parameters())
    for name, each in named.items():
        each.register_hook(partial(lambda name, grad: own.update({name: grad.clone()}), name))
    before = run.handle.residual()
    for step in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(step).backward()
        rate = RATE * swing ** ((step + 1) % 2)
        run.optimizer.param_groups[0]["lr"] = rate
        # The exchange finds the rate of the step before.
        first = 1 if given else 2  # a first leap is a schedule's
        of_step = swing if step == first else factor
        wanted = 1.0 if step < first else of_step ** (1 if step % 2 == 0 else -1)
        left = run.handle.residual()
        for name, each in named.items():
            assert each.grad is not None
            torch.testing.assert_close(left[name] + each.grad, wanted * before[name] + own[name], rtol=1e-4, atol=1e-6)
        before = left
        run.optimizer.step()
    assert all(each.any() for each in before.values())
