"""Chains do what their kernels do, called one after the other: the same bits in every array, and in a payload's bytes."""

from __future__ import annotations

import gradients
import pytest
import torch
from payload_arrays import flag_on
from reference import same
from torch import Tensor

from gradcomp.core.requests import Form, Payload
from gradcomp.messages import payload as payloads
from gradcomp.messages.rounding import LevelRounding, RoundingRule
from gradcomp.messages.sparse import COMPACT
from gradcomp.native import extension, kernels
from gradcomp.native.memory import Memory, Update

# The last one has blocks of two sizes, and more high parts than entries.
SIZES = [(1, 1), (1000, 10), (1000, 1000), (70_000, 300)]
STEP = 9


class Bucket:
    """The arrays that a take changes: a residual, a velocity, the steps in which entries were sent, and a lam."""

    def __init__(self, n: int, device: torch.device, masked: bool):
        self.residual = gradients.draw("heavy", n, n).to(device)
        self.velocity = gradients.draw("normal", n, 1).to(device)
        self.sent_in = (torch.arange(n, device=device) % 10).to(torch.uint8)
        self.lam = torch.tensor([1.5, 0.1], device=device)
        self.thresholds = torch.zeros(2, device=device)
        self.mask = kernels.Mask(self.velocity, self.sent_in, STEP) if masked else None
        self.peaks = kernels.peaks(n, device)
        if self.peaks is not None:
            kernels.accumulate([torch.zeros(n)], self.residual, None, flag_on(device), peaks=self.peaks)

    def arrays(self) -> list[Tensor]:
        return [self.residual, self.velocity, self.sent_in, self.lam, self.thresholds]


def garbage(form: Form, device: torch.device) -> Payload:
    """Make a payload, with the same bytes as all others in the padding between its arrays."""
    payload = payloads.empty(form, device)
    payload.bytes.fill_(7)
    return payload


def flag_of(value: int | None, device: torch.device) -> Tensor | None:
    return None if value is None else flag_on(device, value)


def check_alike(chained: list[Tensor], apart: list[Tensor]) -> None:
    for one, other in zip(chained, apart, strict=True):
        assert same(one, other) if one.is_floating_point() else torch.equal(one, other)


@pytest.mark.parametrize("flag", [None, 0, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n,k", SIZES)
def test_take_topk_and_pack(device: torch.device, n: int, k: int, masked: bool, flag: int | None) -> None:
    chained, apart = (Bucket(n, device, masked) for _ in range(2))
    sent, wanted = (garbage(COMPACT.form(n, k), device) for _ in range(2))
    flagged = flag_of(flag, device)
    kernels.take_topk_and_pack(chained.residual, k, sent.bytes, chained.mask, flagged, chained.peaks)
    values, indices = torch.empty(k, device=device), torch.empty(k, dtype=torch.int32, device=device)
    kernels.take_topk(apart.residual, k, values, indices, wanted["header"], apart.mask, flagged, apart.peaks)
    kernels.pack_sparse(values, indices, wanted["header"], n, wanted["blocks"], wanted["entries"], apart.residual)
    check_alike([sent.bytes, *chained.arrays()], [wanted.bytes, *apart.arrays()])


@pytest.mark.parametrize("target", [None, 1, 500])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("n,capacity", SIZES)
def test_take_above_and_pack(
    device: torch.device, n: int, capacity: int, pooled: bool, masked: bool, target: int | None
) -> None:
    chained, apart = (Bucket(n, device, masked) for _ in range(2))
    sent, wanted = (garbage(COMPACT.form(n, capacity), device) for _ in range(2))
    ends = torch.tensor([n // 3, n], dtype=torch.int32, device=device)
    moments, flag = torch.empty(2, extension.MOMENTS, dtype=torch.float64, device=device), flag_on(device)
    zeros = torch.zeros(n, device=device)
    kernels.accumulate([zeros[: n // 3], zeros[n // 3 :]], apart.residual.clone(), None, flag, moments=moments)
    bar = kernels.Bar(moments, ends, chained.lam, chained.thresholds, from_zero=True, pooled=pooled, target=target)
    kernels.take_above_and_pack(chained.residual, bar, capacity, sent.bytes, chained.mask, flag, chained.peaks)
    values, indices = torch.empty(capacity, device=device), torch.empty(capacity, dtype=torch.int32, device=device)
    kernels.set_thresholds(moments, ends, apart.lam, apart.thresholds, from_zero=True, pooled=pooled)
    arrays = ends, apart.thresholds, values, indices, wanted["header"]
    kernels.take_above(apart.residual, *arrays, apart.mask, flag, apart.peaks)
    if target is not None:
        kernels.steer(apart.lam, wanted["header"], target)
    kernels.pack_sparse(values, indices, wanted["header"], n, wanted["blocks"], wanted["entries"], apart.residual)
    check_alike([sent.bytes, *chained.arrays()], [wanted.bytes, *apart.arrays()])
    if n > 1:  # with one entry, the count is the target
        assert (target is None) == bool((chained.lam.cpu() == torch.tensor([1.5, 0.1])).all())


def packed(n: int, k: int, seed: int, device: torch.device, flag: int = 0) -> Payload:
    payload = garbage(COMPACT.form(n, k), device)
    kernels.take_topk_and_pack(gradients.draw("heavy", n, seed).to(device), k, payload.bytes, flag=flag_of(flag, device))
    return payload


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize(
    "n,k,ranks", [(1, 1, 5), *((1000, 10, ranks) for ranks in (1, 5, extension.MOST_RANKS)), (70_000, 300, 2)]
)
def test_add_and_settle_packed(device: torch.device, n: int, k: int, ranks: int, flagged: bool, keep: float) -> None:
    """A flagged payload spoils the update, so that this rank's entries come back."""
    sent = [packed(n, k, rank % 4, device, int(flagged and rank == ranks - 1)) for rank in range(ranks)]
    results = []
    for chained in (True, False):
        update, residual = Memory().lend(n, device), gradients.draw("normal", n, 5).to(device)
        if chained:
            every = [payload.bytes for payload in sent]
            kernels.add_and_settle_packed(update.flat, every, k, 1 / 3, update.marks, residual, sent[0].bytes, keep)
        else:
            COMPACT.add(update, sent, 1 / 3)
            COMPACT.settle(residual, sent[0], update, keep)
        assert update.marks is not None and update.marks.any()
        results.append([update.flat, update.marks, residual])
    check_alike(*results)


RULES = [RoundingRule("optimal", 3, 100), RoundingRule("optimal", 9, 32), RoundingRule("mean", 2, 64, stochastic=False)]


@pytest.mark.parametrize("flag", [None, 0, 1])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("n", [1, 31, 3333])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_find_and_take_levels(device: torch.device, rule: RoundingRule, n: int, bounded: bool, flag: int | None) -> None:
    groups = kernels.groups(n, rule.group)
    bounds = torch.tensor([-0.5, 0.75], device=device).repeat(groups) if bounded else None
    flagged, sizes, key = flag_of(flag, device), (rule.group, rule.count), 12345
    chained, apart = (gradients.draw("normal", n, n).to(device) for _ in range(2))
    sent, wanted = (garbage(LevelRounding(rule, n).form, device) for _ in range(2))
    kernels.find_and_take_levels(chained, rule.kind, *sizes, key, sent.bytes, rule.stochastic, bounds, flagged)
    cuts = torch.empty(groups, device=device)
    kernels.write_header(wanted["header"], flagged)
    kernels.find_levels(apart, rule.kind, *sizes, wanted["levels"], cuts, bounds)
    kernels.take_levels(apart, wanted["levels"], *sizes, key, wanted["words"], None if rule.stochastic else cuts)
    check_alike([sent.bytes, chained], [wanted.bytes, apart])
    assert sent["header"].tolist() == [0, flag or 0]


@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("ranks", [1, 5, extension.MOST_RANKS])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_add_and_settle_levels(device: torch.device, rule: RoundingRule, ranks: int, flagged: bool, keep: float) -> None:
    n, rounding, sizes = 999, LevelRounding(rule, 999), (rule.group, rule.count)
    drawn = [gradients.draw("normal", n, rank).to(device) for rank in range(ranks)]
    flags = [flag_of(int(flagged and rank == ranks - 1), device) for rank in range(ranks)]
    sent = [rounding.take(own, None, flag, rank) for rank, (own, flag) in enumerate(zip(drawn, flags, strict=True))]
    chained, apart = ([torch.zeros(n, device=device), drawn[0].clone()] for _ in range(2))
    kernels.add_and_settle_levels(chained[0], [each.bytes for each in sent], *sizes, 1 / 3, chained[1], sent[0].bytes, keep)
    rounding.add(apart[0], sent, 1 / 3)
    kernels.settle_levels(apart[1], sent[0]["levels"], sent[0]["words"], *sizes, apart[0], keep)
    check_alike(chained, apart)
    assert bool(chained[0][0].isnan()) == flagged


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("failed", [False, True])
def test_spread_and_wipe(device: torch.device, dtype: torch.dtype, failed: bool) -> None:
    results = []
    for chained in (True, False):
        update = Memory().lend(3000, device)
        COMPACT.add(update, [packed(3000, 20, 1, device, int(failed))])
        grads = [torch.full((n,), 7.0, dtype=dtype, device=device) for n in (1, 0, 2000, 999)]
        residual, verdict = gradients.draw("normal", 3000, 2).to(device), torch.zeros(1, dtype=torch.int32, device=device)
        options = {"loss_scale": torch.tensor([2.0], device=device), "residual": residual, "verdict": verdict}
        wiped = kernels.spread(update.flat, grads, 1 / 3, update.marks, **options, step=STEP, wipes=chained)
        assert wiped == chained
        if chained:
            assert not update.flat.any() and update.marks is not None and not update.marks.any()
        results.append([*grads, residual, verdict])
    check_alike(*results)
    assert int(results[0][-1]) == (2 * STEP + 1 if failed else 0)


@pytest.mark.parametrize("flag", [None, 0, 1])
def test_a_header(device: torch.device, flag: int | None) -> None:
    header = torch.full((2,), 7, dtype=torch.int32, device=device)
    kernels.write_header(header, flag_of(flag, device), 123)
    assert header.tolist() == [123, flag or 0]
    with pytest.raises(ValueError, match=r"write_header: count=-1 must be in \[0, 2\^31\)"):
        kernels.write_header(header, None, -1)


def test_a_payload_of_another_size_or_between_two_words_is_refused(device: torch.device) -> None:
    n, k, rule = 1000, 10, RULES[0]
    residual, size = torch.ones(n, device=device), payloads.size(COMPACT.form(n, k))
    memory = torch.zeros(4096, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=f"take_topk_and_pack: payload has {size + 8} bytes, but needs {size}"):
        kernels.take_topk_and_pack(residual, k, memory[: size + 8])
    sentence = "begins at an address that is no multiple of 8: pass a copy"
    with pytest.raises(ValueError, match=f"take_topk_and_pack: payload {sentence}"):
        kernels.take_topk_and_pack(residual, k, memory[4 : size + 4])
    sent = [memory[:size], memory[size + 4 : 2 * size + 4]]
    with pytest.raises(ValueError, match=f"add_and_settle_packed: payloads {sentence}"):
        kernels.add_and_settle_packed(Update(residual).flat, sent, k, 1.0, None, residual.clone(), memory[:size])
    size = payloads.size(LevelRounding(rule, n).form)
    with pytest.raises(ValueError, match=f"find_and_take_levels: payload has 8 bytes, but needs {size}"):
        kernels.find_and_take_levels(residual, rule.kind, rule.group, rule.count, 0, memory[:8])
    assert residual.sum() == n and not memory.any()
