"""Digests of weights change with every bit, and real ranks that have diverged all raise the same error."""

from __future__ import annotations

from typing import Any

import doors
import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradcomp import telemetry
from gradcomp.engine.digests import differences, digests

SPARSE = "topk:ratio=0.05"
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES)
@given(n=st.sampled_from([1, 2, 1000, 2**20, 2**20 + 3]), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=15)
def test_every_bit_counts(dtype: torch.dtype, n: int, seed: int, data: st.DataObject) -> None:
    weight = torch.empty(n, dtype=dtype)
    raw = weight.view(torch.uint8)
    raw.copy_(torch.randint(0, 2 if dtype == torch.bool else 256, raw.shape, generator=torch.Generator().manual_seed(seed)))
    before = digests({"w": weight})
    assert torch.equal(before, digests({"w": weight.clone()})) and len(before) == 2
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert not torch.equal(before, digests({"w": weight}))


def test_order_and_length_count() -> None:
    weight = torch.arange(1.0, 5.0)
    found = [weight, weight.flip(0), weight[[1, 0, 2, 3]], weight[:3], torch.zeros(3), torch.zeros(4), weight.view(2, 2).T]
    assert len({int(digests({"w": each})[1]) for each in found}) == len(found)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 64, 1000])
def test_changes_that_mirror_one_another_count(n: int) -> None:
    """Their words' sum is the same, and so is the sum of words times places."""
    eye, ends = torch.eye(n), torch.zeros(2 * n)
    ends[[0, -1]], middle = 1.0, torch.zeros(2 * n)
    middle[[n - 1, n]] = 1.0
    for one, other in ((eye, eye.flip(0)), (ends, middle)):
        assert not torch.equal(digests({"w": one}), digests({"w": other}))
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(n, generator=generator)
    for _ in range(300):  # the smallest changes of all entries, in random directions
        changed = (weight.view(torch.int32) + torch.randint(-1, 2, (n,), generator=generator, dtype=torch.int32)).view(
            torch.float32
        )
        same = torch.equal(changed, weight)
        assert same == torch.equal(digests({"w": weight}), digests({"w": changed}))


def test_a_view_has_the_digest_of_its_entries() -> None:
    weight = torch.randn(6, 4)
    assert torch.equal(digests({"w": weight[:, 1]}), digests({"w": weight[:, 1].contiguous()}))


def test_words_name_the_first_layer_and_the_ranks_in_the_minority() -> None:
    assert differences(["a", "b"], {rank: [1, 1, 2] for rank in range(4)}) == ""
    one = {0: [1, 1, 2], 1: [1, 1, 2], 2: [1, 1, 3], 3: [1, 1, 2]}
    assert differences(["a", "b"], one).startswith("rank 2 has other weights of 'b' than ranks 0, 1, 3 ")
    two = {0: [1, 1, 2], 1: [1, 7, 2], 2: [1, 7, 9], 3: [1, 1, 2]}
    assert differences(["a", "b"], two) == "ranks 1, 2 have other weights of 'a' than ranks 0, 3 (2 of 2 layers differ)"


def test_ranks_whose_weights_lag_behind_do_not_count() -> None:
    assert digests({}, False).tolist() == [0]
    assert differences(["a"], {0: [1, 5], 1: [0, 6], 2: [1, 5]}) == ""
    assert "rank 5 has other weights of 'a' than rank 1 " in differences(["a"], {1: [1, 5], 3: [0, 6], 5: [1, 7]})


def joined() -> Any:
    """Rank 1 has three batches, rank 0 eight; then all go on together."""
    ranks.join()
    run = doors.Training(doors.DDP, spec=SPARSE, bucket_mb=0.02)
    telemetry.watch(run.handle, check=5)
    with run.whole.join():
        run.train(3 if dist.get_rank() == 1 else 8)
    return run.train(4)


@pytest.mark.slow
def test_ranks_without_batches_are_left_out_of_the_check() -> None:
    first, second = ranks.launch(joined, 2)
    assert torch.equal(first, second)


def diverging(door: str) -> Any:
    """Rank 1 changes one bit of a weight after step 5; every third step is checked."""
    doors.join(door)
    run = doors.Training(door, spec=SPARSE, prefix="")
    telemetry.watch(run.handle, check=3)
    run.train(5)
    if doors.rank(door) == 1:
        with torch.no_grad():
            run.model.last.bias.view(torch.int32)[2] ^= 1
    return small_net.refused(lambda: run.train(5)), run.handle.stats()["steps"]


def frozen_beside(door: str) -> Any:
    """Rank 1 has another weight in a layer that is frozen, and that the optimizer does not have."""
    doors.join(door)
    model = small_net.net()
    model.first.requires_grad_(False)
    if doors.rank(door) == 1:
        model.first.weight.view(torch.int32)[0, 0] ^= 1
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = doors.wrapped(door, torch.optim.SGD(trained, 0.02), doors.named(model), SPARSE)
    telemetry.watch(optimizer, check=3)
    return small_net.refused(lambda: small_net.train(model, optimizer, doors.batches(), 5))


@pytest.mark.slow
@pytest.mark.parametrize("door", doors.DOORS)
def test_layers_that_are_frozen_and_outside_the_optimizer_are_checked(door: str) -> None:
    for said in ranks.launch(frozen_beside, 2, door):
        assert "of 'first.weight'" in said


@pytest.mark.slow
@pytest.mark.parametrize("door", doors.EVERY)
def test_all_ranks_raise(door: str) -> None:
    for said, steps in ranks.launch(diverging, 3, door):
        assert "before the optimizer's step 6, rank 1 has other weights of 'last.bias' than ranks 0, 2" in said
        assert steps == 6
