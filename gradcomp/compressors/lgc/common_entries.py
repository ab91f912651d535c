"""The entries that all ranks send at the same indices: how leaders choose the indices, and how the entries become a mean.

Each rank leads a part of the entries, another one in each step, so that all ranks send equally many bytes. A leader's largest
entries give the indices of its part. They are sorted into bands by their values. Entries then vary smoothly along a row, so few
numbers are enough to code it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.compressors.lgc.autoencoder import Autoencoder, ordered_mean, select_decoder
from gradcomp.compressors.lgc.phases import CodeCheck
from gradcomp.core.compressor import Acc
from gradcomp.core.requests import Field, Form, Payload, Requests, World, gather, reduce, send
from gradcomp.exchanges.split import Partition
from gradcomp.messages import ascending
from gradcomp.messages import payload as payloads
from gradcomp.messages.sparse import EXACT, Codec, count_of
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST, LINE
from gradcomp.native.kernels.sparse import add_entries
from gradcomp.native.memory import Memory

# Entries are clipped to this many root mean squares before they are coded.
CLIP = 1000.0
# Numbers of a code are clipped to this; half precision holds at most 65,504.
LARGEST_CODE = 6e4
# With at most this many ranks, gathering codes in half precision sends fewer bytes than summing codes in single precision.
MOST_RANKS_FOR_HALF = 4
# The least entries of a row in a learning window, if the row has so many.
SHORTEST_WINDOW = 32


class CommonIndices(NamedTuple):
    """Indices [rows, k] that all ranks know, in the same order.

    scales: the root mean square of the leader's entries in each row, [rows, 1]. leaders: the rank that leads each row.
    codes: the leaders' codes, [rows, channels, positions], if codes travel with the indices.
    """

    indices: Tensor
    scales: Tensor
    leaders: list[int]
    codes: Tensor | None = None

    def read(self, flat: Tensor) -> Tensor:
        """Return the entries at these indices, [rows, k]."""
        return flat.index_select(0, self.indices.flatten()).view(self.indices.shape)

    def write(self, flat: Tensor, rows: Tensor) -> None:
        """Set the entries at these indices."""
        flat.index_copy_(0, self.indices.flatten(), rows.flatten())


class IndexSelection:
    """The selection of one step's common indices: the leader of each row, and the length k of a row.

    n: entries to select from. ratio: the share selected. bands: at most this many.
    """

    def __init__(self, n: int, world: World, step: int, ratio: float, bands: int) -> None:
        self.world = world
        rows = world.size if n >= LINE * world.size else 1
        self.parts = Partition(n, rows)
        self.k = min(count_of(ratio, -(-n // rows)), n // (rows * LINE) * LINE if rows > 1 else n)
        self.bands = min(bands, self.k)
        self.leaders = [(step + row) % world.size for row in range(rows)]

    @property
    def key_limit(self) -> int:
        """Return the limit of an index's key, band * part size + index in the part."""
        return self.bands * self.parts.size

    def form(self, code: Field | None = None) -> Form:
        """Describe a row's payload. code: the field of the leader's code, if it travels."""
        packed = Field("indices", torch.uint8, ascending.length(self.key_limit, self.k))
        return (Field("scale", torch.float32, 1), packed, *(() if code is None else (code,)))

    def choose(self, residual: Tensor, memory: Memory) -> dict[str, Tensor]:
        """Choose the indices and the scale of the row that this rank leads. Return nothing on a rank that does not lead."""
        if self.world.rank not in self.leaders:
            return {}
        part = self.parts.copy(self.leaders.index(self.world.rank), residual, memory)
        values, found = part.new_empty(self.k), torch.empty(self.k, dtype=torch.int32, device=part.device)
        kernels.take_topk(part, self.k, values, found, torch.empty(2, dtype=torch.int32, device=part.device), memory=memory)
        bands = torch.empty_like(found, dtype=torch.int64)
        bands[values.argsort(stable=True)] = torch.arange(self.k, device=part.device) * self.bands // self.k
        keys = (bands * self.parts.size + found).sort().values
        scale = values.double().square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        return {"scale": scale.float().view(1), "indices": ascending.pack(keys, self.key_limit)}

    def locate(self, chosen: Tensor, row: int) -> Tensor:
        """Map the packed indices of a row to indices among the n entries."""
        keys = ascending.unpack(chosen, self.key_limit, self.k)
        return self.parts.indices(row, keys % self.parts.size).clamp(0, self.parts.n - 1)

    def share(self, chosen: dict[str, Tensor], form: Form, device: torch.device) -> Requests[list[Payload]]:
        """Send each row's payload from its leader to all ranks. chosen: this rank's row; empty on a rank that does not lead."""
        payload = payloads.empty(form, device)
        for name, array in chosen.items():
            payload[name].copy_(array.flatten())
        if len(self.leaders) > 1:
            replies = yield from gather(payload)
            return [replies[leader] for leader in self.leaders]
        (leader,) = self.leaders
        sent = dict.fromkeys(self.world.others, payload) if chosen else {}
        received = yield from send(sent, () if chosen else (leader,), form, device)
        return [payload if chosen else received[leader]]


class Innovations(NamedTuple):
    """Entries that each rank sends as they are, beside the leaders' codes.

    inside: the values at common indices, [ranks, rows, k], 0 where a rank sent none. outside: each rank's indices, and its
    values there, 0 at common indices.
    """

    inside: Tensor
    outside: Sequence[tuple[Tensor, Tensor]]


class SharedMean(NamedTuple):
    """The ranks' mean at common indices as all ranks know it, and this rank's error, which stays in its residual."""

    mean: Tensor
    error: Tensor


class CommonEntries(NamedTuple):
    """This rank's entries at common indices, [rows, k]."""

    values: Tensor
    common: CommonIndices
    world: World
    innovations: Innovations | None = None

    @property
    def normalised(self) -> Tensor:
        """Return the entries divided by their row's scale."""
        return self.values / self.common.scales

    @property
    def decoder_innovations(self) -> Tensor | None:
        """Return the innovations as the decoders get them: scaled, clipped, and in leader order."""
        if self.innovations is None:
            return None
        return self.in_leader_order(self.innovations.inside / self.common.scales).clamp(-CLIP, CLIP)

    def in_leader_order(self, all_ranks: Tensor) -> Tensor:
        """Reorder [ranks, rows, k] to [rows, ranks, k], with each row's leader first and the ranks after it following."""
        ranks, rows, _ = all_ranks.shape
        offsets = torch.arange(ranks, device=all_ranks.device)
        order = (self.common.leaders[0] + offsets[:rows, None] + offsets) % ranks  # the leaders of rows are consecutive ranks
        return all_ranks.transpose(0, 1).gather(1, order[:, :, None].expand(-1, -1, all_ranks.shape[2]))

    @property
    def decoder_of_row(self) -> list[int]:
        """Return the number of this rank's decoder in each row. The leader's decoder has the number 0."""
        return [(self.world.rank - leader) % self.world.size for leader in self.common.leaders]

    def select_own(self, decoded: Tensor) -> Tensor:
        """Select this rank's entries from the decoded ones, [rows, decoders, k]."""
        return select_decoder(decoded, [decoder % decoded.shape[1] for decoder in self.decoder_of_row])

    def window(self, rows: slice, columns: slice) -> CommonEntries:
        """Cut out some rows and some of their columns."""
        indices, scales, leaders, _ = self.common
        innovations = None if self.innovations is None else Innovations(self.innovations.inside[:, rows, columns], [])
        cut = CommonIndices(indices[rows, columns], scales[rows], leaders[rows])
        return CommonEntries(self.values[rows, columns], cut, self.world, innovations)

    def settle(self, acc: Acc, update: Tensor, shared: SharedMean, check: CodeCheck) -> None:
        """Write the mean into the update and the error into acc's residual, if the codes are accepted.

        The update is not finite and the residual keeps all entries if a gradient is not finite.
        """
        taken = check.accepted & ~check.failed
        mean = torch.where(check.failed, torch.nan, torch.where(check.accepted, shared.mean, 0.0))
        self.common.write(update, mean)
        self.common.write(acc.residual, torch.where(taken, shared.error, self.values))
        if acc.ages is not None:
            kernels.note_sent(acc.ages, self.common.indices.flatten(), taken.expand(self.values.shape).flatten())
        for rank, (indices, values) in enumerate([] if self.innovations is None else self.innovations.outside):
            sent = values.masked_fill(check.failed, 0.0)
            add_entries(update, indices, sent / self.world.size)
            if rank == self.world.rank:
                add_entries(acc.residual, indices, -sent)
                if acc.ages is not None:
                    kernels.note_sent(acc.ages, indices, sent != 0)


def gather_innovations(acc: Acc, common: CommonIndices, count: int, codec: Codec, zeros: Tensor) -> Requests[Innovations]:
    """Gather each rank's `count` largest entries, uncoded. zeros: scratch of acc's size, zero again afterwards."""
    n = len(acc.residual)
    codec = min(codec, EXACT, key=lambda codec: payloads.size(codec.form(n, count)))
    taken = codec.take(Acc(acc.residual, acc.memory), count)
    kernels.add_sparse(acc.residual, *taken.unpacked)  # they stay in the residual until the step is known to succeed
    received = yield from gather(codec.pack(taken, None))
    inside, outside = [], []
    for payload in received:
        values, indices, _ = codec.read(payload)
        indices = indices.long().clamp(0, n - 1)
        zeros.index_copy_(0, indices, values)
        inside.append(common.read(zeros))
        common.write(zeros, torch.zeros_like(inside[-1]))
        outside.append((indices, zeros[indices]))
        zeros.index_fill_(0, indices, 0.0)
    return Innovations(torch.stack(inside), outside)


def exchange_codes(entries: CommonEntries, coder: Autoencoder) -> Requests[SharedMean]:
    """Average all ranks' codes and decode the mean. A rank's error is the one of its own code."""
    codes = encode(coder, entries.normalised)
    if entries.world.size <= MOST_RANKS_FOR_HALF:
        codes = codes.half()
        received = yield from gather(payloads.wrap(codes.flatten()))
        mean_code = ordered_mean(torch.stack([payload["bytes"].double() for payload in received]))
    else:
        mean_code = yield from reduce(codes.flatten().clone(), 1 / entries.world.size)
    length, scales, decoders = entries.values.shape[1], entries.common.scales, [0] * len(codes)
    own = coder.decode_reproducibly(codes, length, decoders) * scales
    mean = coder.decode_reproducibly(mean_code.view(codes.shape), length, decoders) * scales
    return SharedMean(_bounded(mean), _bounded(entries.values - own))


def decode_leader_codes(entries: CommonEntries, coder: Autoencoder) -> SharedMean:
    """Decode every rank's entries from the leaders' codes, which came with the indices. Each rank has its own decoder."""
    codes, scales = entries.common.codes, entries.common.scales
    assert codes is not None
    own, mean = coder.decode_with_mean(codes, entries.values.shape[1], entries.decoder_of_row, entries.decoder_innovations)
    return SharedMean(_bounded(mean * scales), _bounded(entries.values - own * scales))


def _bounded(entries: Tensor) -> Tensor:
    """Bound decoded entries, which a huge scale can make infinite."""
    return entries.clamp(-LARGEST, LARGEST)


def encode(coder: Autoencoder, rows: Tensor) -> Tensor:
    """Encode normalised entries, clipped to the range of half precision."""
    return coder.encode(rows.clamp(-CLIP, CLIP)).clamp(-LARGEST_CODE, LARGEST_CODE)


def learn(entries: CommonEntries, coder: Autoencoder, window: int, step: int) -> Requests[tuple[SharedMean, Tensor, Tensor]]:
    """Gather all ranks' entries as they are, and take one learning step on a window of them.

    Return their mean, this rank's normalised entries in the window, and the errors that codes would have made there.
    window: entries of all ranks to learn from.
    """
    received = yield from gather(payloads.wrap(entries.values.flatten()))
    all_ranks = torch.stack([payload["bytes"].view(entries.values.shape) for payload in received])  # [ranks, rows, k]
    share = entries.world.share
    mean = SharedMean(ordered_mean(all_ranks * share) / share, torch.zeros_like(entries.values))
    ranks, count, k = all_ranks.shape
    rows = min(count, max(1, window // (ranks * SHORTEST_WINDOW)))
    columns = min(k, max(SHORTEST_WINDOW, window // (ranks * rows)))
    row_slice, column_slice = _window(step, count, rows), _window(step, k, columns)
    part = entries.window(row_slice, column_slice)
    normalised = (all_ranks[:, row_slice, column_slice] / part.common.scales).clamp(-CLIP, CLIP)
    own, innovations = normalised[entries.world.rank], part.decoder_innovations
    if innovations is None:
        decoded = coder.decode(encode(coder, own), columns)
        coder.learn(lambda weights: coder.loss_of_mean(normalised, weights))
    else:
        ordered = part.in_leader_order(normalised)
        decoded = coder.decode(encode(coder, ordered[:, 0]), columns, innovations)
        coder.learn(lambda weights: coder.loss_of_each(ordered, innovations, weights))
    return mean, own, own - part.select_own(decoded)


def _window(step: int, length: int, size: int) -> slice:
    """Choose `size` neighbours out of `length`, at another position in each step."""
    begin = step * 0x9E3779B1 % (length - size + 1)
    return slice(begin, begin + size)
