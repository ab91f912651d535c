"""Spikes while lgc sends codes: a huge scale of a row, or a huge entry in a row of small scale."""

from __future__ import annotations

import pytest
from learned_codes import draw, learned

STEPS = 6


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3]])
@pytest.mark.parametrize("knobs", ["", "instance=server", "code=single", "bound=inf", "bound=inf,instance=server"])
def test_a_spike_leaves_every_value_finite_with_codes(knobs: str, ranks: list[int]) -> None:
    simulation = learned(knobs)
    for step in range(STEPS):
        grads = draw(50 + step)
        if step == 1:
            for rank in ranks:
                grads[rank] = {name: 3e38 * grad.sign() for name, grad in grads[rank].items()}
        if step == 2:
            grads[2]["a.weight"][0, 0, 0, 0] = 3e38
        assert all(part.isfinite().all() for part in simulation.step(grads).values())
        for rank in range(4):
            assert all(part.isfinite().all() for part in simulation.residual(rank).values())
