"""Count sketches: a table is its definition to the last bit, and the heaviest entries are exactly those of its estimates."""

from __future__ import annotations

import gradients
import pytest
import reference
import torch
from torch import Tensor

from gradcomp import _native
from gradcomp.native import extension, kernels

SIZES = [1, 15, 16, 17, 63, 1000, 4097, 65_537]
ROWS = [3, 5, 7, 9]
# Entries of a block. Each part of a search has every parts-th block.
BLOCK = 1024


def sketch(flat: Tensor, rows: int, columns: int, seed: int, scale: float = 1.0) -> Tensor:
    table = torch.full((rows * columns,), 9.0, device=flat.device)
    kernels.sketch(flat, rows, seed, table, scale)
    return table


def heaviest(table: Tensor, rows: int, seed: int, n: int, k: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    indices = torch.full((k,), -1, dtype=torch.int32, device=table.device)
    estimates = torch.full((k,), 9.0, device=table.device)
    kernels.heaviest(table, rows, seed, n, indices, estimates, part=part, parts=parts)
    return indices.long(), estimates


def check_heaviest(table: Tensor, rows: int, seed: int, n: int, k: int, part: int = 0, parts: int = 1) -> None:
    estimates = reference.estimates(table, rows, seed, n)
    own = torch.arange(n, device=table.device)
    own = own[own // BLOCK % parts == part]
    wanted = own[reference.topk(estimates[own], k)]
    indices, found = heaviest(table, rows, seed, n, k, part, parts)
    assert torch.equal(indices, wanted)
    assert torch.equal(found, estimates[wanted])  # 0 and -0 are equally heavy, and either may be a median


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [16, 32, 48, 1008, 4096])
def test_a_sketch_is_its_definition(device: torch.device, rows: int, columns: int, request: pytest.FixtureRequest) -> None:
    emulated = "simt" in request.node.name
    for n in SIZES[:-1] if emulated and columns != 4096 else SIZES:  # the largest takes the emulator a second
        flat = torch.randn(n).to(device)
        assert reference.same(sketch(flat, rows, columns, n), reference.sketch(flat, rows, columns, n)), n


def test_every_row_puts_each_entry_into_one_cell(device: torch.device) -> None:
    """The table's magnitudes have the right sum: no entry is lost or counted twice. Eighths add up exactly."""
    flat = torch.randint(1, 9, (5000,)).to(device) / 8
    table = sketch(flat, 7, 8192, seed=3).view(7, -1)  # no two entries of one round meet
    assert (table.abs().sum(1) == flat.sum()).all()
    assert len({tuple(row.tolist()) for row in table}) == 7


@pytest.mark.parametrize("rows,n", [(3, 1000), (5, 50_000), (7, 50_000), (9, 50_000)])
def test_few_entries_are_recovered_exactly(device: torch.device, rows: int, n: int, request: pytest.FixtureRequest) -> None:
    """An entry meets one of five others in most of its rows once in 10^5 times with 3 rows, once in 10^8 with 5."""
    for seed in range(2 if "simt" in request.node.name else 10):  # the twins agree
        flat = torch.zeros(n, device=device)
        places = torch.randperm(n)[:5].sort().values.to(device)
        flat[places] = torch.randn(5).to(device)
        indices, found = heaviest(sketch(flat, rows, 4096, seed), rows, seed, n, 5)
        assert torch.equal(indices, places)
        assert reference.same(found, flat[places])


@pytest.mark.parametrize("kind", gradients.KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_heaviest_is_exact(device: torch.device, kind: str, rows: int) -> None:
    for n, columns, k in ((1, 16, 1), (100, 16, 100), (5000, 1008, 1), (40_001, 4096, 400), (20_000, 48, 20_000)):
        flat = gradients.draw(kind, n, seed=n + k, ranks=n).to(device)  # so that no sum is infinite
        check_heaviest(sketch(flat, rows, columns, seed=k), rows, k, n, k)


@pytest.mark.parametrize("n", [2 * BLOCK, 5000, 40_001])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_parts_of_a_search_are_the_search(device: torch.device, n: int, parts: int) -> None:
    flat = gradients.draw("laplace", n, seed=parts)
    table = sketch(flat.to(device), 5, 1008, seed=parts)
    found = []
    for part in range(parts):
        size = sum(1 for i in range(n) if i // BLOCK % parts == part)
        if size:
            check_heaviest(table, 5, parts, n, min(size, 50), part, parts)
            found.append(heaviest(table, 5, parts, n, size, part, parts)[0])
    assert torch.equal(torch.cat(found).sort().values, torch.arange(n, device=device))


def test_a_scale_keeps_every_cell_finite(device: torch.device) -> None:
    """Also where the cell with the most entries adds them all up with one sign."""
    flat = torch.full((5000,), 3e38, device=device)
    scale = 2.0**-8  # a cell of 48 columns has at most 105 entries
    table = sketch(flat, 5, 48, 1, scale)
    assert reference.same(table, reference.sketch(flat, 5, 48, 1, scale)) and table.isfinite().all()
    small = gradients.draw("normal", 5000, seed=2).to(device)
    assert reference.same(sketch(small, 5, 48, 1, scale), sketch(small, 5, 48, 1) * scale)


def test_heaviest_of_sums_that_are_infinite(device: torch.device) -> None:
    flat = gradients.draw("huge", 5000, seed=1).to(device)
    table = sketch(flat, 5, 48, seed=1)
    assert reference.same(table, reference.sketch(flat, 5, 48, 1)) and table.isinf().any()
    check_heaviest(table, 5, 1, 5000, 300)


@pytest.mark.parametrize("rows", ROWS)
def test_a_cell_that_is_no_number_has_a_place_in_the_median(device: torch.device, rows: int) -> None:
    """The place depends on the steps of the sort, which the twins share."""
    n, k, seed = 20_000, 300, 4
    table = sketch(gradients.draw("laplace", n, seed), rows, 1008, seed)
    table[torch.randperm(len(table))[:300]] = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]).repeat(75)
    indices, found = torch.empty(k, dtype=torch.int32), torch.empty(k)
    scratch = torch.empty(_native.heaviest_scratch(False, n, k), dtype=torch.int32)
    _native.heaviest(table, rows, seed, n, 0, 1, indices, found, scratch)
    on_device = heaviest(table.to(device), rows, seed, n, k)
    assert found.isnan().any() and torch.equal(on_device[0].cpu(), indices.long()) and reference.same(on_device[1].cpu(), found)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind,parts", [("normal", 1), ("laplace", 3), ("heavy", 1), ("zeros", 1), ("close", 1), ("apart", 1)])
def test_few_estimates_are_computed(
    device: torch.device, kind: str, parts: int, rows: int, request: pytest.FixtureRequest
) -> None:
    """A sample gives a threshold, which at least k entries reach, but not too many. Of equal ones there are too many."""
    if device.type == "cpu" and "simt" not in request.node.name:
        pytest.skip("the CPU twin has no list")
    for n, k in ((40_001, 7), (40_001, 700)) + (((1 << 21, 9_000),) if device.type == "cuda" else ()):
        if kind in (
            "close",
            "apart",
        ):  # each in a cell of its own, and equal in their leading bits, of which "apart" has no last ones
            flat = (1 + (0.125 if kind == "close" else 0.124) * torch.rand(n)) * torch.randn(n).sign()
            table = reference.sketch(flat, rows, (n // 16 + 1) * 16, seed=k).to(device)
        else:
            table = sketch(gradients.draw(kind, n, seed=k).to(device), rows, 4096, seed=k)
        size = max(k, -(-len(table) // 64))
        scratch = torch.empty(extension.native.heaviest_scratch(True, n, size), dtype=torch.int32, device=device)
        indices, estimates = scratch.new_empty(k), table.new_empty(k)
        extension.native.heaviest(table, rows, k, n, 0, parts, indices, estimates, scratch, **extension.queue(table))
        marked = int(scratch[0])  # the scratch begins with their number
        own = sum(1 for i in range(0, n, BLOCK) if i // BLOCK % parts == 0)
        # In "apart", the line to the threshold ends above the largest entries if few of many are wanted.
        misses = kind == "zeros" or (kind == "apart" and n > 1 << 20)
        assert (k <= marked <= min(max(4096, 4 * size), own * BLOCK // 4)) == (not misses)


def test_of_equals_the_first_are_taken(device: torch.device) -> None:
    for n, k in ((100, 7), (40_000, 40_000), (40_000, 1)):
        indices, found = heaviest(torch.zeros(3 * 48, device=device), 3, 5, n, k)
        assert indices.tolist() == list(range(k)) and not found.any()


def test_threads_do_not_matter() -> None:
    """This is about CPUs, where a thread has at least 2^18 entries."""
    flat = gradients.draw("ties", 800_000, seed=4)
    wanted = reference.sketch(flat, 5, 4096, 11)
    estimates = reference.estimates(wanted, 5, 11, flat.numel())
    largest = reference.topk(estimates, 999)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            table = sketch(flat, 5, 4096, seed=11)
            indices, found = heaviest(table, 5, 11, flat.numel(), 999)
            assert reference.same(table, wanted)
            assert torch.equal(indices, largest) and torch.equal(found, estimates[largest])
    finally:
        torch.set_num_threads(before)


def draw(kind: str, n: int, generator: torch.Generator) -> Tensor:
    """Draw gradients, some with a shape that could defeat a hash of tiles."""
    normal = torch.randn(n, generator=generator)
    match kind:
        case "hot columns":
            return normal * torch.where(torch.arange(n) % 512 % 61 == 0, 8, 1)
        case "laplace":
            return torch.empty(n).exponential_(generator=generator) * normal.sign()
        case "student":
            return normal / torch.empty(n).exponential_(generator=generator).sqrt()  # 2 degrees of freedom
        case "periods":
            blocks = torch.randn(n // 1024, generator=generator).exp().repeat_interleave(1024)
            return torch.randn(9, generator=generator)[torch.arange(n) % 9] * blocks * (1 + 0.1 * normal)
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["hot columns", "laplace", "student", "periods"])
def test_as_many_of_the_largest_are_found_as_with_a_hash_of_every_entry(kind: str) -> None:
    """The share of the k largest that is found agrees with that of a hash of entries. CPUs only, since the twins agree."""
    n, rows, columns, k, draws = 1 << 18, 5, 4096, 256, 8
    shares = torch.empty(draws, 2, dtype=torch.float64)
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        flat = draw(kind, n, generator)
        places = torch.randint(columns, (rows, n), generator=generator)
        signs = torch.randint(2, (rows, n), generator=generator) * 2.0 - 1
        cells = [torch.zeros(columns).index_add_(0, i, s * flat)[i] * s for i, s in zip(places, signs, strict=True)]
        classical = torch.stack(cells).median(0).values.abs().topk(k).indices
        ours, _ = heaviest(sketch(flat, rows, columns, seed), rows, seed, n, k)
        true = torch.zeros(n, dtype=torch.bool)
        true[flat.abs().topk(k).indices] = True
        shares[seed] = torch.tensor([true[ours].double().mean(), true[classical].double().mean()])
    found, wanted = shares.mean(0).tolist()
    chance = float((shares[:, 0] - shares[:, 1]).std()) / draws**0.5  # of the difference of the two means
    assert chance < 0.02
    assert found >= 0.98 * wanted - 2 * chance
