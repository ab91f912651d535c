"""Arguments that no bucket has: kernels refuse numbers and addresses, and write nowhere else whatever arrays hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcomp.native import extension, kernels

HUGE = 2**63 - 1


def test_an_array_between_two_addresses_of_its_type_is_refused(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("no library makes such an array on a GPU")
    memory = np.zeros(65, np.uint8)
    between = memory[1:].view(np.float32)
    sentence = r"residual begins at an address that is no multiple of 4: pass a copy"
    for array in (between, torch.frombuffer(memory, dtype=torch.float32, offset=1)):
        with pytest.raises(ValueError, match=f"offer_all: {sentence}"):
            kernels.offer_all(array, np.zeros(16, np.float32))
    with pytest.raises(ValueError, match=r"flatten: grads\[0\] begins at an address that is no multiple of 2"):
        kernels.flatten([memory[1:5].view(np.float16)], np.zeros(2, np.float32))


@pytest.mark.parametrize("kernel", ["collect", "take_topk", "take_above", "heaviest"])
def test_a_size_of_scratch_never_overflows(kernel: str) -> None:
    for n in (0, 100, HUGE):
        for other in (0, HUGE, -HUGE):
            assert getattr(extension.native, f"{kernel}_scratch")(False, n, other) >= 0


@pytest.mark.parametrize("ends", [[100, 10, 300], [-300, 300], [250, -(2**31), 2**31 - 1], [300, 0, 0, -1]])
def test_no_ends_of_layers_take_an_entry_twice_or_from_elsewhere(ends: list[int], device: torch.device) -> None:
    n = 300
    before = torch.randn(n, device=device)
    residual, header = before.clone(), torch.empty(2, dtype=torch.int32, device=device)
    values, indices = torch.empty(n, device=device), torch.full((n,), -1, dtype=torch.int32, device=device)
    layers = torch.tensor(ends, dtype=torch.int32, device=device)
    kernels.take_above(residual, layers, torch.full((len(ends),), 0.5, device=device), values, indices, header)
    taken = indices[: int(header[0])].long()
    assert (taken.diff() > 0).all() and taken.min() >= 0 and taken.max() < n
    assert torch.equal(values[: len(taken)], before[taken]) and torch.equal(residual.index_fill(0, taken, 0), residual)
    assert residual.count_nonzero() == n - len(taken)


BEYOND = (3e38 + torch.arange(50) * 4e35).tolist()


@pytest.mark.parametrize(
    "entries,wanted",
    [
        (BEYOND, extension.LARGEST / 2),
        ([-entry for entry in BEYOND], -extension.LARGEST / 2),
        *(([entry] * 40, entry) for entry in (1e-45, -1.46673e-40, 3e-39)),
        ([2.2e38, 2.1e38, 3.2e38, 2.15e38, -3.2e38], None),
    ],
    ids=["above", "below", "subnormal 1", "subnormal 2", "subnormal 3", "on both sides"],
)
def test_levels_of_extreme_groups_are_in_order_and_within_half_of_the_largest_float(
    entries: list[float], wanted: float | None, device: torch.device
) -> None:
    """Two levels then never differ by more than a float holds. Those of a group that lies beyond are its nearest."""
    flat = torch.tensor(entries, device=device)
    for rule in ("optimal", "range", "quantile"):
        for count in (2, 3, 5, 9):
            levels = torch.zeros(count, device=device)
            kernels.find_levels(flat, rule, 64, count, levels, torch.zeros(1, device=device))
            assert (levels.diff() >= 0).all() and levels.abs().max() <= extension.LARGEST / 2
            assert wanted is None or (levels == torch.tensor(wanted, device=device)).all()


def test_the_length_of_a_layer_is_counted_in_64_bits(device: torch.device) -> None:
    ends = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device=device)
    moments = torch.tensor([0.0, 4.0 * (2**32 - 1), -9.0, 9.0, 2**32 - 1], dtype=torch.float64, device=device).repeat(2)
    thresholds = torch.empty(2, device=device)
    kernels.set_thresholds(moments, ends, torch.ones(1, device=device), thresholds)
    assert thresholds[1] == 2
