"""The kernels as Python functions: the only importer of the extension. Finds the stream, threads and scratch that a call needs.

Arrays go in as they are: torch tensors, NumPy and CuPy arrays, on CPU or GPU, on the stream that is current in their library.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import gradcomp._native as _native
except ImportError as error:  # pragma: no cover - depends on how the package was put there
    raise ImportError(
        f"gradcomp's compiled part cannot be loaded ({error}); build it with scripts/setup or `pip install .`"
    ) from error

Array = Any
"""Anything with __dlpack__."""

MOST_PIECES: int = _native.most_pieces
MOST_RANKS: int = _native.most_ranks
MOMENTS: int = _native.moments
"""Numbers a layer's statistics consist of: mean, squared deviations, smallest, largest, how many are not zero."""
LINE: int = _native.line
"""Entries of a sparse update that share a mark, and of a value that share a peak."""
TILE: int = _native.tile
"""A sketch's columns are a multiple of this."""
UNKNOWN_PEAK = 0x7F800000
"""The peak of a line that may hold anything: infinity's key."""

BUILT_WITH_CUDA: bool = _native.built_with_cuda
_scratch_buffers: dict[tuple[str, str, int, int], Array] = {}


def _library(array: Array) -> str:
    return type(array).__module__.partition(".")[0]


def _on_cuda(array: Array) -> bool:
    return int(array.__dlpack_device__()[0]) != 1


def _stream(array: Array) -> int:
    """The stream that is current in the array's own library; 0 on a CPU."""
    if isinstance(array, Tensor):
        return int(torch.cuda.current_stream(array.device).cuda_stream) if array.is_cuda else 0
    if _library(array) == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


def _queue(array: Array) -> dict[str, int]:
    return {"stream": _stream(array), "threads": torch.get_num_threads()}


def _scratch(use: str, words: int, like: Array, dtype: str = "int32") -> Array:
    """A buffer of 32-bit words on the array's device, kept for the next call of the same use, thread and stream."""
    library = _library(like)
    device = str(like.device) if hasattr(like, "device") else "cpu"
    key = (use + dtype, f"{library} {device}", threading.get_ident(), _stream(like))
    buffer = _scratch_buffers.get(key)
    if buffer is None or len(buffer) < words:
        module = torch if library == "torch" or isinstance(like, Tensor) else sys.modules[library]
        where = {"device": like.device} if module is torch else {}
        buffer = _scratch_buffers[key] = module.empty(words, dtype=getattr(module, dtype), **where)
    return buffer[:words]


def scratch(use: str, n: int, like: Tensor, dtype: str) -> Tensor:
    """An array of 32-bit entries for use within one call of a compressor's code, until it next yields."""
    found: Tensor = _scratch(use, n, like, dtype)
    return found


class _Sheet:
    """An update that only add_sparse and add_packed write to; marks say in which lines, so that the rest is never read."""

    def __init__(self, n: int, device: torch.device):
        self.whole = torch.zeros(n, device=device)
        self.whole_marks = torch.zeros(-(-n // LINE), dtype=torch.uint8, device=device)
        self.flat, self.marks = self.whole, self.whole_marks
        self.clean = True

    def cut(self, n: int) -> Tensor:
        if not self.clean:  # something failed before it was wiped
            self.whole.zero_()
            self.whole_marks.zero_()
        self.clean = False
        self.flat, self.marks = self.whole[:n], self.whole_marks[: -(-n // LINE)]
        return self.flat


_sheets: dict[tuple[torch.device, int, int], _Sheet] = {}


def _key(flat: Tensor) -> tuple[torch.device, int, int]:
    return flat.device, threading.get_ident(), _stream(flat)


def _sheet_of(flat: Array) -> _Sheet | None:
    """The sheet that this array is, if it is one."""
    found = _sheets.get(_key(flat)) if isinstance(flat, Tensor) else None
    return found if found is not None and found.flat is flat else None


def _marks(flat: Array) -> Tensor | None:
    sheet = _sheet_of(flat)
    return None if sheet is None else sheet.marks


def sparse_zeros(n: int, device: torch.device) -> Tensor:
    """Zeros for an update that is written to by add_sparse and add_packed alone, and read by spread. Most of it costs nothing.

    Valid until this thread asks for the next one on this device.
    """
    key = _key(torch.empty(0, device=device))
    sheet = _sheets.get(key)
    if sheet is None or len(sheet.whole) < n:
        sheet = _sheets[key] = _Sheet(n, device)
    return sheet.cut(n)


def wipe(flat: Tensor) -> None:
    """Makes what sparse_zeros gave ready to be given again; spread does so too. Other arrays are left alone."""
    sheet = _sheet_of(flat)
    if sheet is not None:
        _native.wipe(sheet.flat, sheet.marks, **_queue(flat))
        sheet.clean = True


class _Chunk(NamedTuple):
    """As many gradients as fit one launch: which layers they are, and their place in the flat bucket."""

    grads: Sequence[Array]
    layers: slice
    place: slice


def _chunks(grads: Sequence[Array]) -> list[_Chunk]:
    if len(grads) <= MOST_PIECES:
        return [_Chunk(grads, slice(None), slice(None))]
    chunks = []
    at = 0
    for first in range(0, len(grads), MOST_PIECES):
        part = grads[first : first + MOST_PIECES]
        stop = at + sum(map(_count, part))
        chunks.append(_Chunk(part, slice(first, first + len(part)), slice(at, stop)))
        at = stop
    return chunks


def _count(array: Array) -> int:
    return array.numel() if isinstance(array, Tensor) else array.size


def flatten(grads: Sequence[Array], flat: Array) -> None:
    """flat <- grads, one after the other, cast to float32."""
    for part, _, place in _chunks(grads):
        _native.flatten(part, flat[place], **_queue(flat))


def _measuring(grads: Sequence[Array], like: Array) -> Array:
    """What accumulate's moments and sum_squares need for so many layers."""
    return _scratch("measuring", _native.accumulate_scratch(_on_cuda(like), sum(map(_count, grads)), len(grads)), like)


def sum_squares(grads: Sequence[Array], squares: Array) -> None:
    """squares[i] <- the sum of the squares of grads[i], in float64."""
    for part, layers, _ in _chunks(grads):
        _native.sum_squares(part, squares[layers], _measuring(part, squares), **_queue(squares))


def accumulate(
    grads: Sequence[Array],
    value: Array,
    velocity: Array | None,
    flag: Array,
    momentum: float = 0.0,
    nesterov: bool = False,
    *,
    scales: Array | None = None,
    moments: Array | None = None,
    raw: bool = False,
    peaks: Array | None = None,
) -> None:
    """velocity <- momentum * velocity + scales * grads; value <- value + velocity; flag <- whether an entry was not finite.

    moments, float64[layers, MOMENTS]: statistics of each layer's new value (raw: of its gradient) from the same pass.
    peaks: what peaks() gave; each line's largest magnitude, by which a take on a CPU leaves most of the value unread.
    """
    chunks = _chunks(grads)
    if len(chunks) > 1 and peaks is not None:  # chunks do not end where lines do
        peaks[:] = UNKNOWN_PEAK
        peaks = None
    flags = flag if len(chunks) == 1 else _scratch("flags", len(chunks), value)
    for i, (part, layers, place) in enumerate(chunks):
        _native.accumulate(
            part,
            None if scales is None else scales[layers],
            value[place],
            None if velocity is None else velocity[place],
            flags[i : i + 1],
            None if moments is None else moments[layers],
            peaks,
            None if moments is None else _measuring(part, value),
            momentum,
            nesterov,
            raw,
            **_queue(value),
        )
    if len(chunks) > 1:
        flag[:] = flags.max()


def peaks(n: int, device: torch.device) -> Tensor | None:
    """For accumulate to fill and takes to read, of an array of n entries; None on a GPU, where a take reads everything."""
    if device.type != "cpu" or not _native.built_with_cpu:
        return None
    return torch.full((-(-n // LINE),), UNKNOWN_PEAK, dtype=torch.int32)


def spread(flat: Array, grads: Sequence[Array], scale: float = 1.0) -> None:
    """grads <- scale * flat, each in its own memory and type."""
    chunks = _chunks(grads)
    marks = _marks(flat) if len(chunks) == 1 else None  # chunks do not end where lines do
    for part, _, place in chunks:
        _native.spread(flat[place], marks, part, scale, **_queue(flat))
    wipe(flat)


def offer_all(value: Array, taken: Array, flag: Array | None = None) -> Array:
    """taken <- value, which stays until settle_all. Where the flag is set, taken[0] becomes NaN. Returns taken."""
    _native.offer_all(value, flag, taken, **_queue(value))
    return taken


def settle_all(value: Array, update: Array, keep: float = 0.0) -> None:
    """value <- keep * value, unless the update is not finite (update[0] says so)."""
    _native.settle_all(value, update, keep, **_queue(value))


def take_topk(
    value: Array,
    k: int,
    values: Array,
    indices: Array,
    header: Array,
    velocity: Array | None = None,
    flag: Array | None = None,
    peaks: Array | None = None,
) -> None:
    """Moves the k entries of largest magnitude out of value, in index order, ties to the lower index; header <- (k, flag)."""
    words = _native.take_topk_scratch(_on_cuda(value), _count(value), k)
    scratch = _scratch("topk", words, value)
    _native.take_topk(value, velocity, flag, peaks, k, values, indices, header, scratch, **_queue(value))


def add_sparse(target: Array, values: Array, indices: Array, header: Array, scale: float = 1.0) -> None:
    """target[indices] += scale * values; where the header is flagged or the payload malformed, target[0] becomes NaN."""
    _native.add_sparse(target, _marks(target), values, indices, header, scale, **_queue(target))


def settle_sparse(value: Array, values: Array, indices: Array, header: Array, update: Array, keep: float = 0.0) -> None:
    """What was taken leaves keep times itself behind; all of it goes back if the update is not finite (update[0] says so)."""
    _native.settle_sparse(value, values, indices, header, update, keep, **_queue(value))


def set_thresholds(
    moments: Array,
    ends: Array,
    lam: Array,
    centers: Array,
    thresholds: Array,
    *,
    from_zero: bool = False,
    about_mean: bool = False,
    skip_zeros: bool = True,
    live: bool = True,
    pooled: bool = False,
) -> None:
    """thresholds <- lam * sigma of each layer, centers <- what its entries are measured from; ops.inc explains the options."""
    options = (from_zero, about_mean, skip_zeros, live, pooled)
    _native.set_thresholds(moments, ends, lam, *options, centers, thresholds, **_queue(lam))


def steer(lam: Array, header: Array, target: int) -> None:
    """Moves lam a little, so that the number of entries that pass (header) comes nearer to the target."""
    _native.steer(lam, header, target, **_queue(lam))


def take_above(
    value: Array,
    ends: Array,
    centers: Array,
    thresholds: Array,
    values: Array,
    indices: Array,
    header: Array,
    velocity: Array | None = None,
    flag: Array | None = None,
    peaks: Array | None = None,
) -> None:
    """Moves the entries with |value - center| above their layer's threshold out of value, in index order.

    As many as there is room for in values: the largest, if more pass. header <- (how many pass, flag).
    """
    words = _native.take_above_scratch(_on_cuda(value), _count(value), _count(values))
    layers = (ends, centers, thresholds)
    scratch = _scratch("above", words, value)
    _native.take_above(value, velocity, flag, peaks, *layers, values, indices, header, scratch, **_queue(value))


def pack_sparse(values: Array, indices: Array, header: Array, value: Array | None, blocks: Array, entries: Array) -> None:
    """Sparse entries in 32 bits each (gradcomp/wire.md); what the rounding leaves over goes back into value, if given."""
    _native.pack_sparse(values, indices, header, value, blocks, entries, **_queue(values))


def unpack_sparse(values: Array, indices: Array, header: Array, blocks: Array, entries: Array) -> None:
    """values, indices <- what packed entries say; a malformed payload sets the flag in header, which is to be a copy."""
    _native.unpack_sparse(blocks, entries, header, values, indices, **_queue(values))


def add_packed(
    target: Array, blocks: Sequence[Array], entries: Sequence[Array], headers: Sequence[Array], scale: float = 1.0
) -> None:
    """add_sparse for entries in 32 bits, of several ranks, one after the other."""
    for few in _few(len(headers)):
        _native.add_packed(target, _marks(target), blocks[few], entries[few], headers[few], scale, **_queue(target))


def _few(ranks: int) -> list[slice]:
    """As many ranks as fit one launch."""
    return [slice(first, first + MOST_RANKS) for first in range(0, ranks, MOST_RANKS)]


def settle_packed(value: Array, blocks: Array, entries: Array, header: Array, update: Array, keep: float = 0.0) -> None:
    """settle_sparse for entries in 32 bits."""
    _native.settle_packed(value, blocks, entries, header, update, keep, **_queue(value))


def sketch(value: Array, rows: int, seed: int, table: Array) -> None:
    """table <- a count sketch of value, rows x columns in one flat array; the columns are a multiple of 16."""
    _native.sketch(value, rows, seed, table, **_queue(value))


def heaviest(table: Array, rows: int, seed: int, n: int, indices: Array, estimates: Array) -> None:
    """indices, estimates <- the entries of largest estimated magnitude of n, in index order, ties to the lower index."""
    scratch = _scratch("heaviest", _native.heaviest_scratch(_on_cuda(table), n, _count(indices)), table)
    _native.heaviest(table, rows, seed, n, indices, estimates, scratch, **_queue(table))


FORMS = ("orq", "partly", "mean", "lloyd", "peak", "norm", "range", "quantile", "sign")
"""What a group's levels can follow from; csrc/levels.h has them in the same order."""


SHORTEST_GROUP = 32
PER_WORD = {2: 64, 3: 40, 5: 27, 9: 20}
"""How many numbers of so many levels a word of 64 bits holds."""


def groups(n: int, group: int) -> int:
    """How many groups n entries make: what is left over is one of its own, or if it is short, the end of the last one."""
    return 1 if n < group else n // group + (n % group >= SHORTEST_GROUP)


def words(n: int, group: int, count: int) -> int:
    """Words that the numbers of n entries' levels take: each group begins with a new one."""
    last = groups(n, group) - 1
    return last * -(-group // PER_WORD[count]) + -(-(n - last * group) // PER_WORD[count])


def find_levels(
    value: Array, form: str, group: int, count: int, levels: Array, cuts: Array, bounds: Array | None = None
) -> None:
    """levels <- so many for each group of entries; cuts <- where two levels that are not drawn meet."""
    _native.find_levels(value, bounds, FORMS.index(form), group, count, levels, cuts, **_queue(value))


def take_levels(value: Array, levels: Array, group: int, count: int, key: int, words: Array, cuts: Array | None = None) -> None:
    """Rounds value to its groups' levels, by draws or at cuts; value <- what that leaves over, words <- the levels' numbers."""
    _native.take_levels(value, levels, cuts, group, count, key, words, **_queue(value))


def add_levels(
    target: Array,
    levels: Sequence[Array],
    words: Sequence[Array],
    headers: Sequence[Array],
    group: int,
    count: int,
    scale: float = 1.0,
) -> None:
    """target += scale * the levels that words name, of several ranks, one after the other; where a header is flagged,
    target[0] becomes NaN."""
    for few in _few(len(headers)):
        _native.add_levels(target, levels[few], words[few], headers[few], group, count, scale, **_queue(target))


def settle_levels(value: Array, levels: Array, words: Array, group: int, count: int, update: Array, keep: float = 0.0) -> None:
    """What was taken leaves keep times itself behind; all of it goes back if the update is not finite (update[0] says so)."""
    _native.settle_levels(value, levels, words, group, count, update, keep, **_queue(value))
