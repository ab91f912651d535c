"""Arrays of torch, NumPy and CuPy go in as they are; messages name an array that cannot go in."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from gradcomp.native import extension, kernels


def test_numpy_goes_in_as_it_is() -> None:
    residual = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    before = residual.copy()
    values, indices, header = np.empty(10, np.float32), np.empty(10, np.int32), np.empty(2, np.int32)
    kernels.take_topk(residual, 10, values, indices, header)
    wanted = np.sort(np.argsort(-abs(before), kind="stable")[:10])
    assert (indices == wanted).all() and (values == before[wanted]).all() and (residual[wanted] == 0).all()
    kernels.add_sparse(residual, values, indices, header)
    assert (residual == before).all()
    flag = np.zeros(1, np.int32)
    kernels.accumulate([before, residual[:0]], residual, flag)
    assert (residual == before + before).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CuPy arrays need a GPU, and there is none")
def test_cupy_on_a_stream_of_its_own_equals_torch() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    x = torch.randn(1_000_000)
    expected = x.abs().topk(1000).indices.sort().values
    with cupy.cuda.Stream(non_blocking=True) as stream:
        residual = cupy.asarray(x.numpy())
        values, indices = cupy.empty(1000, "float32"), cupy.empty(1000, "int32")
        kernels.take_topk(residual, 1000, values, indices, cupy.empty(2, "int32"))
        stream.synchronize()
    assert torch.equal(torch.from_numpy(indices.get()).long(), expected)


def refused(message: str, *args: object, **options: object) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        kernels.accumulate(*args, **options)  # type: ignore[arg-type]


def test_refusals_name_the_wrong_argument() -> None:
    f, flag = torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    refused(r"grads\[0\] is float64, but must be float32, float16 or bfloat16", [f.double()], f, flag)
    refused(r"grads\[1\] is int32", [f[:2], f[:2].int()], f, flag)
    refused("accumulate: residual is float64, but must be float32", [f], f.double(), flag)
    refused("residual is not contiguous", [f], torch.zeros(4, 2)[:, 0], flag)
    refused(r"grads\[0\] is not contiguous", [torch.zeros(2, 2).t()], f, flag)
    refused("grads have 4 entries in all, but residual has 5", [f], torch.zeros(5), flag)
    refused("peaks has 2 entries, but needs 1", [f], f, flag, peaks=torch.zeros(2, dtype=torch.int32))
    refused("flag has 0 entries, but needs at least 1", [f], f, flag[:0])
    refused("of_residual=-1 must be at least 0", [f], f, flag, residual_factor=-1.0)
    refused("accumulate: residual must be an array of torch, NumPy or CuPy, not .*list", [f], [1.0, 2.0], flag)


def test_k_out_of_range_is_refused() -> None:
    for k in (0, -1, 5):
        with pytest.raises(ValueError, match=rf"k={k} must be in \[1, 4\], the number of entries of residual"):
            kernels.take_topk(
                torch.zeros(4), k, torch.zeros(9), torch.zeros(9, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
            )


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
    g, start = torch.randn(n), torch.randn(n)
    results = []
    for count in (1, threads):
        residual, flag, ages = start.clone(), torch.zeros(1, dtype=torch.int32), torch.ones(n, dtype=torch.uint8)
        payload = torch.empty(k), torch.empty(k, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        scratch = torch.empty(extension.native.take_topk_scratch(False, n, k), dtype=torch.int32)
        moments = torch.empty(1, extension.MOMENTS, dtype=torch.float64)
        peaks = kernels.peaks(n, g.device)
        words = torch.empty(extension.native.accumulate_scratch(False, n, 1), dtype=torch.int32)
        extension.native.accumulate([g], None, residual, flag, moments, peaks, words, 0.9, threads=count)
        extension.native.take_topk(residual, ages, flag, peaks, k, *payload, scratch, threads=count)
        layers = torch.tensor([n], dtype=torch.int32), torch.tensor([3.0])
        above = torch.empty(k), torch.empty(k, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        scratch = torch.empty(extension.native.take_above_scratch(False, n, k), dtype=torch.int32)
        extension.native.take_above(residual, ages, flag, peaks, *layers, *above, scratch, threads=count)
        results.append((residual, ages, moments, peaks, *payload, *above))
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


@pytest.mark.parametrize("k", [None, 1.5, 2**63, [1]])
def test_a_number_that_is_none_is_named(k: object) -> None:
    arrays = torch.zeros(1), torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    scratch = torch.zeros(100_000, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"take_topk: k=.* must be a whole number"):
        extension.native.take_topk(torch.zeros(10), None, None, None, k, *arrays, scratch, stream=0, threads=1)


def test_empty_ages_are_of_the_wrong_size() -> None:
    entries = torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="take_topk: ages has 0 entries"):
        kernels.take_topk(torch.ones(1000), 3, *entries, ages=torch.zeros(0, dtype=torch.uint8))


def test_payloads_of_different_numbers_of_ranks_are_refused() -> None:
    block, entry, header = (torch.zeros(n, dtype=torch.int32) for n in (1, 3, 2))
    for count in (0, extension.MOST_RANKS):
        with pytest.raises(ValueError, match=f"add_packed: entries come from 65 ranks, but headers from {count}"):
            kernels.add_packed(torch.zeros(64), [block] * 65, [entry] * 65, [header] * count, 5)
    alone = torch.ones(64)
    kernels.add_packed(alone, [], [], [], 1)  # a rank alone adds no payload
    assert alone.eq(1).all()
