"""Blocks of entries that share a budget of bits: the definition, both twins, exactness, and payloads that are malformed."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradcomp.core.requests import Payload
from gradcomp.messages import payload as payloads
from gradcomp.messages.rounding import BlockRounding
from gradcomp.native import extension, kernels

NATIVE = extension.native
GROUP, GROUPS = 32, 128
INFINITE, LARGEST, LEAST, CONSTANT, EMPTY = 0x7F8, 0x7EF, 128, 254, 255
SIZES = (1, 31, 33, 1000, 4096, 4100, 9000)


def take(x: Tensor, bits: int, flag: Tensor | None = None) -> tuple[Payload, Tensor]:
    rest = x.clone()
    return BlockRounding(bits, x.numel()).take(rest, None, flag, key=0), rest


def read(payload: Payload, n: int, bits: int, scale: float = 1.0) -> Tensor:
    said = torch.zeros(n, device=payload.bytes.device)
    BlockRounding(bits, n).add(said, [payload], scale)
    return said


def bits_of(x: Tensor) -> list[int]:
    return [int(each) & 0xFFFFFFFF for each in x.view(torch.int32)]


def scale_of(magnitude: int) -> int:
    """Find the least float with three bits of mantissa that is not below, by its upper bits."""
    return INFINITE if magnitude >= 0x7F800000 else min(-(-magnitude // 2**20), LARGEST)


def width(height: int, depth: int) -> int:
    return EMPTY - depth if depth >= CONSTANT else max(2, min(8, (height - depth) // 16))


def define_block(x: Tensor, bits: int) -> tuple[list[int], Tensor]:
    """Compute a block's words and what they say, group by group and in double, by the definition in csrc/wire.md."""
    parts = list(x.split(GROUP))
    scales = [scale_of(max(each & 0x7FFFFFFF for each in bits_of(part))) for part in parts]
    same = [len(set(bits_of(part))) == 1 and scale != INFINITE for part, scale in zip(parts, scales, strict=True)]
    top = max((scale for scale, equal in zip(scales, same, strict=True) if not equal), default=0)
    words, said = len(parts) * bits, torch.zeros_like(x)
    head, filled = 1 + -(-len(parts) // 4), []
    if top == INFINITE:
        return [top, *[2**32 - 1] * (head - 1), *[0] * words], said
    depths = []
    for part, scale, equal in zip(parts, scales, same, strict=True):
        if equal:
            depths.append(CONSTANT if float(part[0]) else EMPTY)
        else:
            depths.append(top - scale if scale >= LEAST and top - scale <= 253 else EMPTY)
    height = max(at for at in range(8 * 16 + 254) if sum(width(at, depth) for depth in depths) <= words)
    for i, (part, depth) in enumerate(zip(parts, depths, strict=True)):
        own, begin = width(height, depth), i * GROUP
        if depth == CONSTANT:
            filled.append(bits_of(part[:1])[0])
            said[begin : begin + len(part)] = part
        elif depth != EMPTY:
            last = 2 ** (own - 1) - 1
            scale = torch.tensor([(top - depth) * 2**20], dtype=torch.int32).view(torch.float32)
            step, per_step = scale / last, torch.full((1,), float(last)) / scale  # "last / scale" would round twice
            number = (part * per_step).clamp(-last, last).double()
            code = (number + last).round().long()  # to even where both neighbours are as near
            said[begin : begin + len(part)] = (code - last).float() * step
            code = torch.nn.functional.pad(code, (0, GROUP - len(part)), value=last)
            filled += [sum(int(each >> bit & 1) << entry for entry, each in enumerate(code)) for bit in range(own)]
    depths += [EMPTY] * (-len(depths) % 4)
    told = [sum(depths[i + j] << 8 * j for j in range(4)) for i in range(0, len(depths), 4)]
    return [top | height << 16, *told, *filled, *[0] * (words - len(filled))], said


def define(x: Tensor, bits: int) -> tuple[list[int], Tensor]:
    made = [define_block(part, bits) for part in x.split(GROUP * GROUPS)]
    return [word for words, _ in made for word in words], torch.cat([said for _, said in made])


def octaves(n: int, seed: int) -> Tensor:
    """Draw groups of very different magnitudes: constant ones, empty ones, and some far below the others."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-n // GROUP)
    x = torch.randn(groups, GROUP, generator=generator)
    x *= torch.exp2(torch.randint(-45, 9, (groups, 1), generator=generator).float())
    kind = torch.randint(0, 6, (groups,), generator=generator)
    x[kind == 0] = x[kind == 0][:, :1].clone()
    x[kind == 1] = 0
    return x.flatten()[:n].clone()


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
@pytest.mark.parametrize("n", SIZES)
def test_the_words_are_their_definition_on_both_twins(device: torch.device, n: int, bits: int) -> None:
    kinds = [*gradients.KINDS, "octaves"][n % 2 :: 2] if extension.native is not NATIVE else [*gradients.KINDS, "octaves"]
    for kind in kinds:
        x = octaves(n, n + bits) if kind == "octaves" else gradients.draw(kind, n, seed=n + bits)
        words, said = define(x, bits)
        payload, rest = take(x.to(device), bits)
        assert payload["header"].tolist() == [0, 0]
        assert bits_of(payload["words"].cpu()) == words, kind
        assert payload.bytes[8 + 4 * len(words) :].count_nonzero() == 0
        assert reference.same(read(payload, n, bits).cpu(), said)
        assert reference.same(rest.cpu(), x - said)


@given(seed=gradients.seeds, kind=gradients.kinds, n=st.integers(1, 9000), bits=st.integers(2, 8))
def test_an_entry_errs_by_half_a_step_of_its_group_at_most(seed: int, kind: str, n: int, bits: int) -> None:
    x = gradients.draw(kind, n, seed)
    payload, rest = take(x, bits)
    assert payload.bytes.numel() == payloads.size(BlockRounding(bits, n).form) == 8 + 8 * -(-kernels.block_words(n, bits) // 2)
    for part, left in zip(x.split(GROUP), rest.split(GROUP), strict=True):
        assert left.abs().max() <= 0.5626 * part.abs().max() + 2.0**-110  # at two bits, of a scale up to an eighth too large


def test_the_groups_of_a_block_share_its_bits() -> None:
    """Of a block's groups, one with a 16 times larger scale gets two bits more; the block has as many bits as even ones."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).view(GROUPS, GROUP)
    x /= x.abs().amax(1, keepdim=True)
    even, _ = take(x.flatten(), 5)
    x[: GROUPS // 2] *= 16
    payload, rest = take(x.flatten(), 5)
    assert payload.bytes.numel() == even.bytes.numel()
    errors = rest.view(GROUPS, GROUP).square().mean(1).sqrt() / x.abs().amax(1)
    assert errors[GROUPS // 2 :].mean() / errors[: GROUPS // 2].mean() == pytest.approx(4, rel=0.15)
    assert errors[: GROUPS // 2].mean() == pytest.approx(1 / 31 / 12**0.5, rel=0.1)


@pytest.mark.parametrize("n", [32, 1000, 5000])
def test_equal_entries_travel_exactly(device: torch.device, n: int) -> None:
    x = (0.1 + torch.arange(-(-n // GROUP)) / 7).repeat_interleave(GROUP)[:n].to(device)
    payload, rest = take(x, 2)
    assert rest.count_nonzero() == 0 and reference.same(read(payload, n, 2), x)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_several_payloads_are_added_in_order_and_scaled(ranks: int, device: torch.device) -> None:
    n, bits = 5000, 4
    sent = [take(octaves(n, seed).to(device), bits)[0] for seed in range(ranks)]
    together = torch.ones(n, device=device)
    apart, wanted = together.clone(), together.clone()
    BlockRounding(bits, n).add(together, sent, 0.3)
    for each in sent:
        BlockRounding(bits, n).add(apart, [each], 0.3)
        wanted += 0.3 * read(each, n, bits)
    assert reference.same(together, apart)
    torch.testing.assert_close(together, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("at", range(6))
def test_a_malformed_payload_among_others_spoils_the_first_entry_alone(at: int, device: torch.device) -> None:
    n, bits = 9000, 5
    sent = [take(octaves(n, seed).to(device), bits)[0] for seed in range(6)]
    together, sound = torch.zeros(n, device=device), torch.zeros(n, device=device)
    BlockRounding(bits, n).add(sound, [each for i, each in enumerate(sent) if i != at], 1.0)
    sent[at]["words"][:: kernels.block_words(4096, bits)] = 0x7F8  # no block of it is sound
    BlockRounding(bits, n).add(together, sent, 1.0)
    assert together[0].isnan() and reference.same(together[1:], sound[1:])


def test_entries_return_where_the_update_is_not_finite(device: torch.device) -> None:
    n = 5000
    x = octaves(n, 3).to(device)
    payload, rest = take(x, 5)
    kept = rest.clone()
    BlockRounding(5, n).settle(kept, payload, torch.zeros(n, device=device))
    assert reference.same(kept, rest)
    bad = torch.zeros(n, device=device)
    bad[0] = torch.inf
    BlockRounding(5, n).settle(kept, payload, bad)
    assert reference.same(kept, rest + read(payload, n, 5))


def test_a_flag_or_an_entry_that_is_not_finite_reaches_the_target(device: torch.device) -> None:
    n = 9000
    x = octaves(n, 4).to(device)
    flagged, _ = take(x, 5, torch.ones(1, dtype=torch.int32, device=device))
    assert read(flagged, n, 5)[0].isnan() and read(flagged, n, 5)[1:].isfinite().all()
    for bad in (torch.inf, -torch.inf, torch.nan):
        for at in (0, 8200):
            wrong = x.clone()
            wrong[at] = bad
            payload, rest = take(wrong, 5)
            assert reference.same(rest[at // 4096 * 4096 :][:4096], wrong[at // 4096 * 4096 :][:4096])
            said = read(payload, n, 5)
            assert said[0].isnan() and said[1:].isfinite().all() and said.count_nonzero() > 1000


def pieces_of(n: int, device: torch.device) -> list[Tensor]:
    """Make pieces of all types: of a few blocks, of parts of one, and of some entries."""
    types, sizes = (torch.bfloat16, torch.float32, torch.float16), (10_000, 1, 4097, 31, 7_000, 8_192, 3)
    lengths = [*sizes, n - sum(sizes)]
    return [torch.full((each,), 7.0, dtype=types[i % 3], device=device) for i, each in enumerate(lengths)]


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_pieces_of_any_type_get_what_would_be_added_to_zeros(bits: int, device: torch.device) -> None:
    n = 50_001
    x = octaves(n, bits).to(device)
    x[9000:9600], x[5000:5064] = 0.1, -1e-30
    payload, _ = take(x, bits)
    to = pieces_of(n, device)
    BlockRounding(bits, n).read(payload, to)
    wanted = read(payload, n, bits).split([each.numel() for each in to])
    assert all(reference.same(got, want.to(got.dtype)) for got, want in zip(to, wanted, strict=True))


def test_a_block_that_is_not_finite_is_so_in_the_pieces_that_hold_it(device: torch.device) -> None:
    n = 50_001
    wrong = octaves(n, 4).to(device)
    wrong[5000] = torch.inf
    payload, _ = take(wrong, 5)
    to = pieces_of(n, device)
    BlockRounding(5, n).read(payload, to)
    found = torch.cat([each.float() for each in to])
    assert found.isnan().nonzero().flatten().tolist() == [4096]
    assert found[4097:8192].count_nonzero() == 0 and found[8192:].count_nonzero() > 10_000
    flagged, _ = take(octaves(n, 4).to(device), 5, torch.ones(1, dtype=torch.int32, device=device))
    BlockRounding(5, n).read(flagged, to)
    assert torch.cat([each.float() for each in to]).isnan().nonzero().flatten().tolist() == [*range(0, n, 4096)]


def test_more_pieces_than_a_launch_takes(device: torch.device) -> None:
    n = 300 * 40
    payload, _ = take(octaves(n, 4).to(device), 5)
    to = [torch.empty(40, dtype=torch.bfloat16, device=device) for _ in range(300)]
    BlockRounding(5, n).read(payload, to)
    assert reference.same(torch.cat(to), read(payload, n, 5).bfloat16())


def test_the_largest_scale_is_one_of_which_twice_as_much_is_finite(device: torch.device) -> None:
    x = 3.4e38 * torch.linspace(-1, 1, 64)
    payload, rest = take(x.to(device), 5)
    words, said = define(x, 5)
    assert words[0] & 0xFFFF == LARGEST and bits_of(payload["words"].cpu()) == words
    assert reference.same(rest.cpu(), x - said) and (2 * said).isfinite().all()


@pytest.mark.parametrize("wrong", ["head", "depths", "least", "height", "any"])
def test_no_bytes_do_harm(device: torch.device, wrong: str) -> None:
    """Malformed blocks spoil the first entry and touch nothing else; whatever is well formed is added."""
    n, bits = 9000, 3
    payload, _ = take(octaves(n, 5).to(device), bits)
    block = kernels.block_words(4096, bits)
    words = payload["words"]
    if wrong == "head":
        words[block] = 0x7F8
    elif wrong == "depths":
        words[block + 1 : block + 33] = int.from_bytes(bytes([253] * 4), "little", signed=True)
        words[block] = 0x0050
    elif wrong == "least":  # a group's scale would be below the least, and above 0
        words[block + 1 : block + 33] = 0
        words[block] = LEAST - 1
    elif wrong == "height":
        words[block + 1 : block + 33] = 0
        words[block] = 0x400 | 381 << 16
    else:
        words[block : 2 * block] = torch.randint(-(2**31), 2**31, (block,), generator=torch.Generator().manual_seed(0)).int()
    said = read(payload, n, bits)
    assert said[0].isnan() and said[4096:8192].count_nonzero() == 0
    assert said[1:4096].count_nonzero() > 1000 and said[8192:].count_nonzero() > 100
