"""Messages name an array that cannot go in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import COMPACT
from gradcomp.native import extension, kernels

HUGE = 2**63 - 1


class Arrays:
    """Arrays on a device: of floats, of whole numbers, and of bytes."""

    def __init__(self, device: torch.device):
        self.device = device

    def f(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)

    def i(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.int32, device=self.device)

    def b(self, n: int) -> Tensor:
        return torch.zeros(n, dtype=torch.uint8, device=self.device)


def collect(grads: Any, flat: Any, flag: int = 1, **options: Any) -> Callable[[Arrays], Any]:
    return lambda a: kernels.collect(grads(a), flat(a), a.i(flag), **{name: of(a) for name, of in options.items()})


def take_topk(k: Any, n: int = 4, **options: Any) -> Callable[[Arrays], Any]:
    return lambda a: kernels.take_topk(
        a.f(n), k, a.f(9)[:3], a.i(9)[:3], a.i(2), **{name: of(a) for name, of in options.items()}
    )


def offer(residual: int = 4, pieces: tuple[int, ...] = (4,), ages: int = 4, shares: int = 512, **options: Any) -> Any:
    return lambda a: kernels.offer_progress(
        [a.f(n) for n in pieces],
        a.f(4),
        a.f(residual),
        a.b(ages),
        a.f(shares),
        a.i(1),
        **{n: of(a) for n, of in options.items()},
    )


def heaviest(
    table: int = 144, n: int = 100, k: int = 1, estimates: int | None = None, **options: int
) -> Callable[[Arrays], Any]:
    return lambda a: kernels.heaviest(a.f(table), 3, 0, n, a.i(k), a.f(k if estimates is None else estimates), **options)


def add_packed(blocks: int = 1, headers: int = 1, words: tuple[int, ...] = (5,), capacity: int = 10) -> Callable[[Arrays], Any]:
    return lambda a: kernels.add_packed(a.f(1000), [a.i(1)] * blocks, [a.i(n) for n in words], [a.i(2)] * headers, capacity)


def packed_payload(begin: int, more: int) -> Callable[[Arrays], Any]:
    size = payloads.size(COMPACT.form(1000, 10))
    return lambda a: kernels.take_topk_and_pack(a.f(1000), 10, a.b(4096)[begin : begin + size + more])


FOUR, FLOATS = (lambda a: [a.f(4)]), (lambda a: a.f(4))
REFUSED: list[tuple[Callable[[Arrays], Any], str]] = [
    (collect(lambda a: [a.f(4).double()], FLOATS), r"grads\[0\] is float64, but must be float32, float16 or bfloat16"),
    (collect(lambda a: [a.f(2), a.i(2)], FLOATS), r"grads\[1\] is int32"),
    (collect(FOUR, lambda a: a.f(4).double()), "collect: flat is float64, but must be float32"),
    (collect(FOUR, lambda a: a.f(4, 2)[:, 0]), "flat is not contiguous"),
    (collect(lambda a: [a.f(2, 2).t()], FLOATS), r"grads\[0\] is not contiguous"),
    (collect(FOUR, lambda a: a.f(5)), "grads have 4 entries in all, but flat has 5"),
    (collect(FOUR, FLOATS, 0), "flag has 0 entries, but needs at least 1"),
    (collect(FOUR, lambda a: [1.0, 2.0]), "collect: flat must be an array of torch, NumPy or CuPy, not .*list"),
    *((take_topk(k), rf"k={k} must be in \[1, 4\], the number of entries of residual") for k in (0, -1, 5)),
    *(
        (
            lambda a, k=k: extension.native.take_topk(a.f(10), None, None, k, a.f(1), a.i(1), a.i(2), a.i(10**5), threads=1),
            r"take_topk: k=.* must be a whole number",
        )
        for k in (None, 1.5, 2**63, [1])
    ),
    (take_topk(3, 1000, ages=lambda a: a.b(0)), "take_topk: ages has 0 entries"),
    (offer(residual=3), "offer_progress: residual has 3 entries, but start has 4"),
    (offer(pieces=(3,)), "offer_progress: weights have 3 entries in all, but start has 4"),
    (offer(ages=3), "offer_progress: ages has 3 entries, but start has 4"),
    (offer(shares=511), "offer_progress: shares has 511 entries, but needs at least 512"),
    (offer(pieces=(2, 2), decays=lambda a: a.f(1)), "offer_progress: decays has 1 entries, but needs at least 2"),
    (lambda a: kernels.deliver_progress(a.f(4), [a.f(4)], a.f(3), a.f(4)), "rest has 3 entries, but update has 4"),
    *(
        (lambda a, n=n: kernels.find_levels(a.f(100), "mean", n, 2, a.f(2), a.f(1)), rf"find_levels: group={n} must be in \[32")
        for n in (31, 2**31, HUGE)
    ),
    (packed_payload(0, 8), r"take_topk_and_pack: payload has \d+ bytes, but needs \d+"),
    (packed_payload(4, 0), "take_topk_and_pack: payload begins at an address that is no multiple of 8: pass a copy"),
    (add_packed(2, 2, (5, 9)), r"add_packed: entries\[1\] has 9 entries, but entries\[0\] has 5"),
    (add_packed(2), "add_packed: blocks come from 2 ranks, but headers from 1"),
    (add_packed(capacity=20), "add_packed: entries has 5 words, but needs 9 for 20 of 1000 entries"),
    (add_packed(capacity=1001), r"add_packed: capacity=1001 must be in \[1, 1000\]"),
    *((add_packed(65, n, (5,) * 65), f"add_packed: entries come from 65 ranks, but headers from {n}") for n in (0, 64)),
    (lambda a: kernels.take_blocks(a.f(100), 9, a.b(400)), r"take_blocks: bits=9 must be in \[2, 8\]"),
    (lambda a: kernels.take_blocks(a.f(100), 5, a.b(400)), "take_blocks: payload has 400 bytes, but needs 96"),
    (lambda a: kernels.add_blocks(a.f(100), [a.b(400)[4:100]], 5), "begins at an address that is no multiple of 8"),
    *(
        (lambda a, n=n: kernels.sketch(a.f(100), n, 0, a.f(192)), f"sketch: rows={n} must be 3, 5, 7 or 9")
        for n in (-3, 1, 4, 11)
    ),
    (lambda a: kernels.sketch(a.f(100), 3, 0, a.f(120)), "sketch: table has 120 entries, but needs a multiple of 48"),
    (heaviest(table=0), "heaviest: table has 0 entries"),
    (heaviest(k=101), r"heaviest: indices has 101 entries, but must have 1 to 100"),
    (heaviest(k=0), "heaviest: indices has 0 entries"),
    (heaviest(k=3, estimates=2), "heaviest: estimates has 2 entries, but indices has 3"),
    # Of 2,000 entries, the second of two parts has 976, and the third of three none.
    *((heaviest(n=2000, part=part, parts=parts), "heaviest: part=") for part, parts in ((2, 2), (-1, 2), (0, 0))),
    (heaviest(n=2000, k=977, part=1, parts=2), "heaviest: indices has"),
    (heaviest(n=2000, part=2, parts=3), "heaviest: indices has"),
]


@pytest.mark.parametrize("call, sentence", REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_a_refusal_names_the_wrong_argument(device: torch.device, call: Callable[[Arrays], Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=sentence):
        call(Arrays(device))


def test_too_many_arrays_for_one_launch_are_refused_below_and_cut_above() -> None:
    grads = [torch.ones(1)] * (extension.MOST_PIECES + 1)
    flat = torch.zeros(len(grads))
    with pytest.raises(ValueError, match=f"flatten: grads must be at most {extension.MOST_PIECES} arrays"):
        extension.native.flatten(grads, flat)
    kernels.flatten(grads, flat)
    assert (flat == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    n, k = 1_500_000, 1500
    g = torch.randn(n)
    results = []
    for count in (1, threads):
        residual, flag, ages = torch.empty(n), torch.zeros(1, dtype=torch.int32), torch.ones(n, dtype=torch.uint8)
        payload = torch.empty(k), torch.empty(k, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        scratch = torch.empty(extension.native.take_topk_scratch(False, n, k), dtype=torch.int32)
        moments = torch.empty(1, extension.MOMENTS, dtype=torch.float64)
        words = torch.empty(extension.native.collect_scratch(False, n, 1), dtype=torch.int32)
        extension.native.collect([g], residual, flag, moments, words, threads=count)
        extension.native.take_topk(residual, ages, flag, k, *payload, scratch, threads=count)
        layers = torch.tensor([n], dtype=torch.int32), torch.tensor([3.0])
        above = torch.empty(k), torch.empty(k, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        scratch = torch.empty(extension.native.take_above_scratch(False, n, k), dtype=torch.int32)
        extension.native.take_above(residual, ages, flag, *layers, *above, scratch, threads=count)
        results.append((residual, ages, moments, *payload, *above))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class OnGpu:
    """An array in main memory that claims to lie on a GPU."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, stream: int) -> object:
        assert stream == -1, "the producer is asked not to make any stream wait"
        capsule = torch.utils.dlpack.to_dlpack(self.tensor)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2  # behind the data pointer: the device's type
        return capsule


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU can an array on one be made up")
def test_a_gpu_array_without_a_gpu_gets_a_sentence() -> None:
    residual, taken = OnGpu(torch.zeros(4)), OnGpu(torch.zeros(4))
    sentence = (
        "CUDA: "
        if extension.BUILT_WITH_CUDA
        else "offer_all: this gradcomp was built without CUDA: rebuild it with GRADCOMP_CUDA=ON, which needs nvcc"
    )
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        extension.native.offer_all(residual, None, taken, 1.0)
    sentence = "offer_all: taken is on the CPU, but residual is on cuda:0: move all arrays to one device"
    with pytest.raises(ValueError, match=sentence):
        extension.native.offer_all(residual, None, torch.zeros(4), 1.0)


class Items:
    """A sequence that makes its items when it is asked for them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Tensor:
        if i > 1:
            raise IndexError
        return torch.zeros(500)


@pytest.mark.parametrize("grads", [Items(), torch.zeros(2, 500), None, 7])
def test_only_lists_of_arrays_are_lists_of_arrays(grads: object) -> None:
    with pytest.raises(ValueError, match="flatten: grads must be a list of arrays, not"):
        extension.native.flatten(grads, torch.zeros(1000), stream=0, threads=1)
