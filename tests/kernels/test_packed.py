"""Packed entries: the rounding error stays in the residual, to the last bit, and no bytes do harm."""

from __future__ import annotations

import math

import gradients
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from payload_arrays import Arrays, to_take
from torch import Tensor

from gradcomp.core.requests import Payload
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import CODECS, COMPACT, EXACT
from gradcomp.native import extension, kernels
from gradcomp.native.kernels.sparse import add_entries
from gradcomp.native.memory import Update

CPU = torch.device("cpu")


def pack(residual: Tensor, k: int) -> tuple[Payload, Arrays]:
    """Take the k largest out of the residual and pack them. Return the payload, and the entries as they were taken."""
    payload = payloads.empty(COMPACT.form(residual.numel(), k), residual.device)
    taken = to_take(k, residual.device) | {"header": payload["header"]}
    kernels.take_topk(residual, k, **taken)
    COMPACT.write(payload, taken["values"], taken["indices"], residual)
    return payload, taken


@pytest.mark.parametrize("kind", [*gradients.KINDS, "mixed"])
@pytest.mark.parametrize(
    "n,k", [(1, 1), (1000, 1000), (65_536, 100), (65_537, 3000), (131_072, 131), (100_000, 2), (200_000, 1), (66_000, 50_000)]
)
def test_packing_is_its_definition_and_exact(device: torch.device, kind: str, n: int, k: int) -> None:
    if kind == "mixed":  # all the magnitudes there are, in one block
        before = gradients.draw("normal", n, k).to(device) * torch.logspace(-44, 37, n, device=device)
    else:
        before = gradients.draw(kind, n, seed=n + k).to(device)
    residual = before.clone()
    payload, taken = pack(residual, k)
    words, entries, said = reference.packed(taken["values"].cpu(), taken["indices"].cpu(), n)
    assert torch.equal(payload["blocks"].cpu().long() & 0xFFFFFFFF, words)
    assert torch.equal(payload["entries"].cpu().long() & 0xFFFFFFFF, entries)
    target = torch.zeros(n, device=device)
    COMPACT.add(Update(target), [payload])
    assert torch.equal(target[taken["indices"].long()].cpu(), said)
    assert torch.equal(residual + target, before)
    assert torch.equal((residual == 0) | (residual == before) | (target != 0), torch.ones_like(residual, dtype=torch.bool))
    found = COMPACT.read(payload)
    assert torch.equal(found.values.cpu(), said) and torch.equal(found.indices, taken["indices"])
    assert torch.equal(found.header, payload["header"])
    again = payloads.empty(payload.form, device)
    again["header"].copy_(payload["header"])
    COMPACT.write(again, taken["values"], taken["indices"], None)
    assert torch.equal(again["blocks"], payload["blocks"]) and torch.equal(again["entries"], payload["entries"])
    big = taken["values"].abs() >= 2**-13 * taken["values"].abs().max()
    close = (said.to(device) - taken["values"]).abs() <= taken["values"].abs() / 3
    assert close[big & (taken["values"].abs() > 1e-37)].all()


def test_a_place_takes_the_bits_that_it_needs() -> None:
    """A place alone has log2(n / k) bits of news on average, and 1.44 for the order that is left out."""
    n = 1 << 20
    for k, at_most in ((10_486, 14.7), (1049, 18.1), (105, 22)):
        form = COMPACT.form(n, k)
        assert 6 + math.log2(n / k) + 1.44 < 8 * payloads.size(form[2:]) / k < at_most + 1
        assert 8 * (payloads.size(form) - payloads.size(form[:2])) / k < at_most


def test_fewer_entries_than_the_capacity(device: torch.device) -> None:
    before = gradients.draw("heavy", 140_000, 3).to(device)
    residual = before.clone()
    payload = payloads.empty(COMPACT.form(140_000, 500), device)
    payload.bytes.fill_(255)
    values, indices = torch.zeros(500, device=device), torch.zeros(500, dtype=torch.int32, device=device)
    kernels.take_topk(residual, 137, values[:137], indices[:137], payload["header"])
    COMPACT.write(payload, values, indices, residual)
    target = torch.zeros_like(before)
    COMPACT.add(Update(target), [payload])
    assert torch.equal(target + residual, before) and target.count_nonzero() == 137


def test_an_unsound_word_that_one_thread_reads_is_noticed_by_all(device: torch.device) -> None:
    """Each thread of a block reads some of the words up to the block's own: here only the second one sees a wrong exponent."""
    n = 140_000
    payload, _ = pack(torch.randn(n, device=device), 900)
    payload["blocks"][1] |= 255 << 24
    assert COMPACT.read(payload).header[1].item() == 1
    payload, _ = pack(torch.randn(n, device=device), 900)
    payload["blocks"][1] |= 255 << 24
    residual, update = torch.zeros(n, device=device), torch.full((1,), math.nan, device=device).expand(n).contiguous()
    COMPACT.settle(residual, payload, Update(update))
    assert residual[:65_536].any() and not residual[65_536:].any()


@pytest.mark.parametrize("ranks", [2, 5, extension.MOST_RANKS + 3])
def test_many_ranks_payloads_are_added_one_after_the_other(device: torch.device, ranks: int) -> None:
    """The sums agree to the last bit, also if one of the payloads is flagged or malformed."""
    n, scale = 70_000, 1 / 3
    distinct = [pack(gradients.draw("heavy", n, seed).to(device), 300)[0] for seed in range(min(ranks, 7))]
    sent = [distinct[rank % len(distinct)] for rank in range(ranks)]
    together, apart = torch.zeros(n, device=device), torch.zeros(n, device=device)
    COMPACT.add(Update(together), sent, scale)
    for payload in sent:
        COMPACT.add(Update(apart), [payload], scale)
    assert together.any() and torch.equal(together, apart)
    for spoiled in ("header", "blocks"):
        worse, _ = pack(gradients.draw("heavy", n, 1).to(device), 300)
        worse[spoiled][1] = 1 if spoiled == "header" else -1
        target = torch.zeros(n, device=device)
        COMPACT.add(Update(target), [sent[0], worse, *sent[2:]], scale)
        assert target[0].isnan() and target[1:].isfinite().all()


def sound(form: str, payload: Payload, n: int) -> bool:
    try:
        CODECS[form].check_one(payload, n, "rank 1")
    except ValueError as error:
        assert str(error).startswith("the payload of rank 1 is malformed: ")
        return False
    return True


@given(
    n=st.sampled_from([1, 2, 1000, 65_536, 65_537, 140_000]),
    k=st.integers(1, 40),
    form=st.sampled_from(["compact", "exact"]),
    seed=gradients.seeds,
    changes=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), max_size=12),
)
def test_kernels_and_codecs_agree_on_bytes_that_changed(
    device: torch.device, n: int, k: int, form: str, seed: int, changes: list[tuple[int, int]]
) -> None:
    """Kernels answer a malformed payload with NaN, and the codec's check answers it with a message."""
    k = min(k, n)
    residual = gradients.draw("normal", n, seed).to(device)
    if form == "compact":
        payload, _ = pack(residual, k)
    else:
        payload = payloads.empty(EXACT.form(n, k), residual.device)
        kernels.take_topk(residual, k, **payload.arrays)
    for place, byte in changes:
        payload.bytes[place % payload.bytes.numel()] = byte
    target = torch.ones(n, device=device)
    CODECS[form].add(Update(target), [payload])
    flagged = int(payload["header"][1]) != 0
    on_cpu = Payload(payload.form, payload.bytes.cpu(), {name: array.cpu() for name, array in payload.arrays.items()})
    if flagged or not sound(form, on_cpu, n):
        assert target[0].isnan()
    if form == "compact":
        values, places = torch.empty(k, device=device), torch.empty(k, dtype=torch.int32, device=device)
        header = payload["header"].clone()
        kernels.unpack_sparse(values, places, header, n, payload["blocks"], payload["entries"])
        assert flagged or sound(form, on_cpu, n) == bool(header[1] == 0)


@pytest.mark.parametrize("place", [70_000, 80_000, 131_072, 2**31 - 1, -1, -(2**31)])
def test_places_outside_the_bucket_are_not_packed(device: torch.device, place: int) -> None:
    """A bucket's last block is partial. Nothing beyond it is written to, and the payload is malformed for all that read it."""
    n = 70_000
    places = [3, 69_999, place] if place > 0 else [place, 3, 69_999]
    residual = torch.zeros(n + 64, device=device)
    payload = payloads.empty(COMPACT.form(n, 3), device)
    payload["header"].copy_(torch.tensor([3, 0], dtype=torch.int32))
    values, indices = torch.full((3,), 0.7, device=device), torch.tensor(places, dtype=torch.int32, device=device)
    COMPACT.write(payload, values, indices, residual[32 : 32 + n])
    assert (residual[:32] == 0).all() and (residual[32 + n :] == 0).all()
    target = torch.zeros(n, device=device)
    COMPACT.add(Update(target), [payload])
    assert target[0].isnan()


@pytest.mark.parametrize(
    "change,sentence",
    [
        (lambda p: p["header"].__setitem__(0, -1), "its header holds the count -1 and the flag 0"),
        (lambda p: p["header"].__setitem__(1, 7), "its header holds the count 5 and the flag 7"),
        (lambda p: p["header"].__setitem__(0, 4), "its blocks count 5 entries, but it holds 4"),
        (lambda p: p["blocks"].__setitem__(1, 0x0012FFFF), "a block holds more than 65536 entries"),
        (lambda p: p["blocks"].__setitem__(0, (255 << 24 | 5) - (1 << 32)), "its exponent is above 253"),
        (lambda p: p["blocks"].copy_(torch.tensor([0, 5])), "its indices are not as many as its blocks count, or lie outside"),
        (lambda p: p["entries"].__setitem__(0, -1), "its indices are not as many as its blocks count, or lie outside"),
    ],
)
def test_malformed_payloads_get_a_sentence(change: object, sentence: str) -> None:
    residual = torch.zeros(70_000)
    residual[[1, 2, 3, 60_000, 65_000]] = 1.0
    payload, _ = pack(residual, 5)
    change(payload)  # type: ignore[operator]
    with pytest.raises(ValueError, match=sentence):
        COMPACT.check_one(payload, 70_000, "rank 1")


def test_a_payload_of_another_size_is_refused() -> None:
    form = COMPACT.form(1000, 10)
    with pytest.raises(ValueError, match=r"received 48 entries of torch\.uint8 where a payload of 40 bytes was expected"):
        payloads.read(form, torch.zeros(48, dtype=torch.uint8))


@pytest.mark.parametrize("indices", [[], [3, 1], [0, 3, 0]])
def test_added_entries_are_those_of_index_add_also_without_any(device: torch.device, indices: list[int]) -> None:
    """Indices of zeros may repeat."""
    at = torch.tensor(indices, dtype=torch.int64, device=device)
    values = at.float()
    target = torch.arange(9.0, device=device)
    wanted = target.clone().index_add_(0, at, values)
    add_entries(target, at, values)
    assert torch.equal(target, wanted)


def test_a_block_of_threads_packs_several_blocks_of_entries(device: torch.device) -> None:
    n, k = 4 * kernels.BLOCK + 5, 3000
    before, blocks = gradients.draw("normal", n, seed=3).to(device), -(-n // kernels.BLOCK)
    residual, at = before.clone(), 8 + -(-4 * blocks // 8) * 8
    own = torch.zeros(at + -(-4 * kernels.packed_words(n, k) // 8) * 8, dtype=torch.uint8, device=device)
    kernels.take_topk_and_pack(residual, k, own)
    sums = torch.zeros(n, device=device)
    kernels.add_and_settle_packed(sums, [own], k, 1.0, None, residual, own)
    assert sums.count_nonzero() == k and torch.equal(sums + residual, before)
