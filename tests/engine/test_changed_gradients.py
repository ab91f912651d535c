"""Samples of gradients and updates: every layer has its turn, equal ones pass, and a GPU's answer comes a step later."""

from __future__ import annotations

import warnings

import pytest
import torch
from devices import HAS_GPU

from gradcomp.engine.changed_gradients import GRADIENTS, GradientSample
from gradcomp.engine.slots import ParameterSlot
from gradcomp.engine.update_sample import UpdateSample
from gradcomp.engine.user_clip import TRIAL


def slots(count: int, device: str = "cpu") -> list[ParameterSlot]:
    made = []
    for i in range(count):
        parameter = torch.nn.Parameter(torch.zeros(3, 50, device=device))
        parameter.grad = torch.randn(3, 50, device=device)
        made.append(ParameterSlot(f"layer{i}", parameter))
    return made


def step(kept: GradientSample, layers: list[ParameterSlot], changed: int | None = None) -> None:
    for slot in layers:
        kept.keep(slot)
    if changed is not None:
        grad = layers[changed].parameter.grad
        assert grad is not None
        grad.mul_(0.5)
    kept.check()


@pytest.mark.parametrize("count", [1, 3, 10, 11])
def test_every_layer_has_its_turn(count: int) -> None:
    for changed in range(count):
        kept, layers = GradientSample(count), slots(count)
        with pytest.raises(RuntimeError, match=f"the gradient of 'layer{changed}' was changed between backward"):
            for _ in range(-(-count // GRADIENTS)):
                step(kept, layers, changed)


def test_a_change_of_all_gradients_is_found_in_its_own_step() -> None:
    kept, layers = GradientSample(100), slots(100)
    for _ in range(5):
        step(kept, layers)
    for slot in layers:
        kept.keep(slot)
    for slot in layers:
        slot.parameter.grad *= 0.999  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="was changed"):
        kept.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "not finite", "expanded", "transposed", "scalar", "empty"])
def test_gradients_that_stay_are_never_complained_of(kind: str, dtype: torch.dtype) -> None:
    grads = {
        "random": torch.randn(7, 11, dtype=dtype),
        "not finite": torch.full((7, 11), float("nan"), dtype=dtype),
        "expanded": torch.ones((), dtype=dtype).expand(7, 11),
        "transposed": torch.randn(11, 7, dtype=dtype).t(),
        "scalar": torch.randn((), dtype=dtype),
        "empty": torch.randn(0, 3, dtype=dtype),
    }
    parameter = torch.nn.Parameter(torch.zeros_like(grads[kind]))
    parameter.grad = grads[kind]
    kept = GradientSample(1)
    for _ in range(3):
        step(kept, [ParameterSlot("w", parameter)])


def test_other_entries_are_kept_in_the_next_step() -> None:
    """A change of one row, in every step, is found in the end."""
    parameter = torch.nn.Parameter(torch.zeros(100, 8))
    kept, slot = GradientSample(1), ParameterSlot("w", parameter)
    with pytest.raises(RuntimeError, match="was changed"):
        for _ in range(100):
            parameter.grad = torch.randn(100, 8)
            kept.keep(slot)
            parameter.grad[41] = 0
            kept.check()


def test_a_type_that_nobody_compresses_is_left_to_the_refusal_that_follows() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex128))
    parameter.grad = torch.ones(3, dtype=torch.complex128)
    step(GradientSample(1), [ParameterSlot("w", parameter)])


def test_a_gradient_that_was_replaced_or_removed_is_found() -> None:
    for new in (torch.zeros(3, 50), None):
        kept, layers = GradientSample(1), slots(1)
        kept.keep(layers[0])
        layers[0].parameter.grad = new
        with pytest.raises(RuntimeError, match="was changed"):
            kept.check()


def test_a_failed_step_leaves_nothing() -> None:
    kept, layers = GradientSample(1), slots(1)
    kept.keep(layers[0])
    layers[0].parameter.grad *= 2  # type: ignore[operator]
    kept.discard()
    step(kept, layers)


@pytest.mark.skipif(not HAS_GPU, reason="there is no GPU: kept entries on one are NOT checked")
def test_on_a_gpu_a_change_is_found_a_step_later_and_nobody_waits() -> None:
    kept, layers = GradientSample(2), slots(2, "cuda")
    step(kept, layers)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(kept, layers, changed=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="the gradient of 'layer0' was changed"):
        step(kept, layers)


SIZES = {"largest": 5000, "a": 30, "b": 20, "c": 10, "d": 5, "e": 3}


def updates(nonzero: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(size) if name == nonzero else torch.zeros(size) for name, size in SIZES.items()}


@pytest.mark.parametrize("nonzero", SIZES)
@pytest.mark.parametrize("later", [0, 2 * TRIAL])
def test_a_clip_is_found_in_some_steps(nonzero: str, later: int) -> None:
    """From the first one on, and where the clip begins after the trial, once the layer has had its turn."""
    slots = {name: ParameterSlot(name, torch.nn.Parameter(torch.zeros(size))) for name, size in SIZES.items()}
    sample = UpdateSample([*slots.values()])
    for _ in range(later):
        sample.keep(updates(nonzero), None)
        for name, slot in slots.items():
            slot.parameter.grad = updates(nonzero)[name]
        assert sample.check("direction") is None
    for _ in range(8):
        delivered = updates(nonzero)
        for name, slot in slots.items():
            slot.parameter.grad = delivered[name]
        sample.keep(delivered, None)
        sample.check("direction")  # nothing has changed
        sample.keep(delivered, None)
        for slot in slots.values():
            assert slot.parameter.grad is not None
            slot.parameter.grad.mul_(0.3001234)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = sample.check("direction")
        if found is not None:
            assert float(found.factors) == pytest.approx(0.3001234) and found.new is not None
            assert sample.clips.every[0].bound == pytest.approx(0.3001234 * SIZES[nonzero] ** 0.5, rel=1e-5)
            return
        assert later
    pytest.fail("none of 8 steps has found it")


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-5), (torch.bfloat16, 3e-3)])
def test_an_l2_term_of_the_users_is_found_and_rounding_is_not(dtype: torch.dtype, rounding: float) -> None:
    """Beside Adam's directions, which are as long as 1, a weight times its decay is short."""
    slot = ParameterSlot("w", torch.nn.Parameter(torch.zeros(300, dtype=dtype)))
    sample, delivered = UpdateSample([slot]), torch.ones(300, dtype=dtype)
    slot.parameter.grad = delivered.clone()
    sample.keep({"w": delivered * (1 + rounding)}, None)
    sample.check("direction")
    sample.keep({"w": delivered}, None)
    slot.parameter.grad.add_(1e-3 if dtype == torch.float32 else 2e-2)
    with pytest.raises(RuntimeError, match="Adam's directions"):
        sample.check("direction")
