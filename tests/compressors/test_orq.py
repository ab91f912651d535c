"""orq: the levels of least error under random rounding; and the properties that all roundings to levels share."""

from __future__ import annotations

from collections.abc import Callable

import gradients
import pytest
import torch
from payload_arrays import bytes_by

import gradcomp
from gradcomp.compressors.orq import Orq
from gradcomp.engine.feedback import Feedback
from gradcomp.native import kernels


def payload(n: int, group: int, count: int, each: int) -> int:
    """A header of 8 bytes; for each group the levels that travel, rounded up to 8 bytes; words of 64 bits."""
    return 8 + 8 * -(-kernels.groups(n, group) * each // 2) + 8 * kernels.words(n, group, count)


def rounded_bytes(group: int, count: int, each: int, route: str = "allgather") -> Callable[[int, int, int], int]:
    """Promise the bytes of entries that are rounded to levels."""
    return bytes_by(route, group, lambda n: payload(n, group, count, each))


PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "orq:levels=9,group=64,feedback=true,route=allgather": rounded_bytes(64, 9, 9),
    "orq:levels=5,group=128,feedback=true,route=alltoall": rounded_bytes(128, 5, 5, "alltoall"),
    "orq:sigmas=1.5,feedback=true,group=64,route=alltoall": rounded_bytes(64, 3, 3, "alltoall"),
    "orq:sigmas=1.5,feedback=true,group=512": rounded_bytes(512, 3, 3),
}


@pytest.mark.parametrize("route", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    "spec", ["orq", "qsgd:levels=9", "linear:levels=5", "linear:levels=3,spacing=quantile", "terngrad:sigmas=0"]
)
def test_unbiased_means_right_in_the_mean(spec: str, route: str) -> None:
    """The gradients are the same in many steps. Ranks draw independently, so more ranks have a smaller error."""
    n, steps = 256, 150
    spec += f"{',' if ':' in spec else ':'}group=64,route={route}"
    made = gradcomp.make(spec)
    assert isinstance(made, Feedback) and not made.feedback
    torch.manual_seed(1)
    grad = torch.distributions.Laplace(0.0, 1.0).sample((n,))
    errors = {}
    for world in (1, 4):
        simulation = gradcomp.Simulation(spec, {"w": (n,)}, world)
        updates = torch.stack([simulation.step([{"w": grad}] * world)["w"] for _ in range(steps)]).double()
        spread = updates.std(0) / steps**0.5
        off, once = updates.mean(0) - grad, float(updates.abs().max()) / steps  # a level that is rarely drawn
        assert (off.abs() <= 5 * spread + 6 * once).all()
        for weights in (torch.ones(n), grad, grad.abs()):
            assert abs(float((off * weights).sum())) < 5 * float((spread * weights).norm()) + 1e-6
        errors[world] = float((updates - grad).square().mean())
    assert route == "alltoall" or errors[4] < 0.3 * errors[1]  # by parts the sum is rounded once more


def test_a_layer_that_is_far_wider_has_bounds_of_its_own() -> None:
    narrow, wide = torch.randn(1024), 100 * torch.randn(1024)
    simulation = gradcomp.Simulation("orq:sigmas=1.5,group=128,levels=9", {"narrow": (1024,), "wide": (1024,)}, 1)
    update = simulation.step([{"narrow": narrow, "wide": wide}])
    for name, grad in (("narrow", narrow), ("wide", wide)):
        assert update[name].abs().max() == pytest.approx(1.5 * float(grad.std()), rel=0.01)


@pytest.mark.parametrize("spec", ["orq:sigmas=1.5", "terngrad:sigmas=1.5", "bingrad", "bingrad:form=pb", "sign"])
@pytest.mark.parametrize("route", ["allgather", "alltoall"])
def test_the_residual_stays_bounded(spec: str, route: str) -> None:
    """The sums of parts are rounded, too, and one rank keeps their rounding error."""
    n, world = 2048, 4
    knobs = f"group=512,route={route},feedback=true"
    simulation = gradcomp.Simulation(f"{spec}{',' if ':' in spec else ':'}{knobs}", {"w": (n,)}, world)
    torch.manual_seed(0)
    left = []
    for _ in range(60):
        simulation.step([{"w": torch.randn(n)} for _ in range(world)])
        left.append(sum(float(simulation.residual(rank)["w"].square().mean()) for rank in range(world)) / world)
    assert sum(left[40:]) < 1.25 * sum(left[20:40])
    assert max(left) < 10


def test_auto_rounds_once_where_rounding_hardly_shrinks_the_error() -> None:
    """Unclipped and unbiased, or clipped so that little is left: by parts; TernGrad's wide bounds with feedback: not."""
    n, world = 2048 * 500, 4
    for spec, by_parts in (("orq", True), ("orq:sigmas=1.5", True), ("terngrad", False)):
        simulation = gradcomp.Simulation(spec, {"w": (n,)}, world)
        simulation.step([{"w": torch.randn(n)}] * world)
        whole = payload(n, 2048, 3, 1 if spec == "terngrad" else 3)
        assert (simulation.bytes_sent[0] != whole) == by_parts


def test_rounding_has_no_feedback_but_the_wrapper_that_keeps_the_momentum() -> None:
    assert gradcomp.make(Orq(sigmas=1.5)) == Feedback(Orq(sigmas=1.5), feedback=False)
    assert gradcomp.make("orq:sigmas=2,feedback=true") == Feedback(Orq(sigmas=2.0))


@pytest.mark.parametrize(
    "kind,sigmas,wanted",
    [
        ("normal", 0.0, (1.753, 0.342, 0.0778)),
        ("normal", 1.5, (0.379, 0.127, 0.067)),
        ("normal", 2.5, (1.009, 0.224, 0.056)),
        ("laplace", 0.0, (2.731, 0.501, 0.1125)),
        ("laplace", 1.5, (0.430, 0.196, 0.141)),
        ("laplace", 2.5, (0.877, 0.223, 0.077)),
    ],
)
def test_the_error_of_orq_is_the_known_one(kind: str, sigmas: float, wanted: tuple[float, ...]) -> None:
    """Over the squares of the entries, in groups of 2,048; the figures are those of sorted groups and sums in float64."""
    grad = gradients.draw(kind, 128 * 512, 1)
    for count, error in zip((3, 5, 9), wanted, strict=True):
        update = gradcomp.Simulation(f"orq:levels={count},sigmas={sigmas}", {"w": (len(grad),)}, 1).step([{"w": grad}])["w"]
        found = float((update - grad).square().sum() / grad.square().sum())
        assert found == pytest.approx(error, rel=0.05)  # samples of 40 and of 32 groups, and draws


@pytest.mark.parametrize("spec", ["orq:", "terngrad:", "qsgd:norm=max,", "linear:", "linear:spacing=quantile,"])
def test_a_clipped_entry_counts_as_the_bound(spec: str) -> None:
    """Their mean counts as the bound, too."""
    torch.manual_seed(0)
    grad = torch.randn(8192)
    grad[::8] = 8.0
    bound = 1.5 * float(grad.std(correction=0))
    update = gradcomp.Simulation(f"{spec}sigmas=1.5", {"w": (8192,)}, 1).step([{"w": grad}])["w"][::8]
    assert float(update.mean()) == pytest.approx(bound, abs=1e-4 + 5 * float(update.std()) / 32)
