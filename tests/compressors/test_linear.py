"""linear: levels spread evenly, by value or by rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from compressors.test_orq import rounded_bytes

import gradcomp

PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "linear:levels=9,group=64,feedback=true,route=allgather": rounded_bytes(64, 9, 2),
    "linear:levels=9,spacing=quantile,group=64,feedback=true": rounded_bytes(64, 9, 9),
}


def test_levels_by_value_and_by_rank() -> None:
    grad = torch.cat([torch.linspace(0, 1, 45), torch.linspace(2, 9, 8)])
    for spacing, wanted in (("minmax", [0, 2.25, 4.5, 6.75, 9]), ("quantile", grad[[0, 13, 26, 39, 52]].tolist())):
        simulation = gradcomp.Simulation(f"linear:spacing={spacing},group=64", {"w": (53,)}, 1)
        seen = torch.cat([simulation.step([{"w": grad}])["w"] for _ in range(40)]).unique()
        torch.testing.assert_close(seen, torch.tensor(wanted, dtype=torch.float32))
