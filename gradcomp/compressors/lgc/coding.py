"""The exchange of entries at common places: as they are, as codes of all ranks, or as the leaders' codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcomp.compressors.lgc.autoencoder import Autoencoder, ordered_mean, select_decoder
from gradcomp.compressors.lgc.code_error import CodeCheck
from gradcomp.compressors.lgc.common_places import CommonPlaces
from gradcomp.core.compressor import Acc
from gradcomp.core.requests import Requests, World, gather, reduce
from gradcomp.messages import payload as payloads
from gradcomp.messages.codec import Codec
from gradcomp.messages.payload import wrap
from gradcomp.messages.sparse import EXACT
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST

# Entries are clipped to this many root mean squares before they are coded.
CLIP = 1000.0
# Numbers of a code are clipped to this; half precision holds at most 65,504.
LARGEST_CODE = 6e4
# The least entries of a row in a learning window, if the row has so many.
SHORTEST_WINDOW = 32


class Innovations(NamedTuple):
    """Entries that each rank sends as they are, beside the leaders' codes.

    inside: the values at common places, [ranks, rows, k], 0 where a rank sent none. outside: each rank's places, and its values
    there, 0 at common places.
    """

    inside: Tensor
    outside: Sequence[tuple[Tensor, Tensor]]


class SharedMean(NamedTuple):
    """The ranks' mean at common places as all ranks know it, and this rank's error, which stays in its residual."""

    mean: Tensor
    error: Tensor


class CommonEntries(NamedTuple):
    """This rank's entries at common places, [rows, k]."""

    values: Tensor
    places: CommonPlaces
    world: World
    innovations: Innovations | None = None

    @property
    def normalised(self) -> Tensor:
        """Return the entries divided by their row's scale."""
        return self.values / self.places.scales

    @property
    def decoder_innovations(self) -> Tensor | None:
        """Return the innovations as the decoders get them: scaled, clipped, and in leader order."""
        if self.innovations is None:
            return None
        return self.in_leader_order(self.innovations.inside / self.places.scales).clamp(-CLIP, CLIP)

    def in_leader_order(self, all_ranks: Tensor) -> Tensor:
        """Reorder [ranks, rows, k] to [rows, ranks, k], with each row's leader first and the ranks after it following."""
        ranks, rows, _ = all_ranks.shape
        offsets = torch.arange(ranks, device=all_ranks.device)
        order = (self.places.leaders[0] + offsets[:rows, None] + offsets) % ranks  # the leaders of rows are consecutive ranks
        return all_ranks.transpose(0, 1).gather(1, order[:, :, None].expand(-1, -1, all_ranks.shape[2]))

    @property
    def decoder_of_row(self) -> list[int]:
        """Return the number of this rank's decoder in each row. The leader's decoder has the number 0."""
        return [(self.world.rank - leader) % self.world.size for leader in self.places.leaders]

    def select_own(self, decoded: Tensor) -> Tensor:
        """Select this rank's entries from the decoded ones, [rows, decoders, k]."""
        return select_decoder(decoded, [decoder % decoded.shape[1] for decoder in self.decoder_of_row])

    def window(self, rows: slice, columns: slice) -> CommonEntries:
        """Cut out some rows and some of their columns."""
        places, scales, leaders, _ = self.places
        innovations = None if self.innovations is None else Innovations(self.innovations.inside[:, rows, columns], [])
        cut = CommonPlaces(places[rows, columns], scales[rows], leaders[rows])
        return CommonEntries(self.values[rows, columns], cut, self.world, innovations)

    def settle(self, residual: Tensor, mask: kernels.Mask | None, update: Tensor, shared: SharedMean, check: CodeCheck) -> None:
        """Write the mean into the update and the error into the residual, if the codes are accepted.

        The update is not finite and the residual keeps all entries if a gradient is not finite.
        """
        taken = check.accepted & ~check.failed
        mean = torch.where(check.failed, torch.nan, torch.where(check.accepted, shared.mean, 0.0))
        self.places.write(update, mean)
        self.places.write(residual, torch.where(taken, shared.error, self.values))
        if mask is not None:
            mask.note(self.places.places.flatten(), taken.expand(self.values.shape).flatten())
        for rank, (places, values) in enumerate([] if self.innovations is None else self.innovations.outside):
            sent = values.masked_fill(check.failed, 0.0)
            update.index_add_(0, places, sent / self.world.size)
            if rank == self.world.rank:
                residual.index_add_(0, places, -sent)
                if mask is not None:
                    mask.note(places, sent != 0)


def gather_innovations(acc: Acc, common: CommonPlaces, count: int, codec: Codec, zeros: Tensor) -> Requests[Innovations]:
    """Gather each rank's `count` largest entries, uncoded. zeros: scratch of acc's size, zero again afterwards."""
    n = len(acc.residual)
    codec = min(codec, EXACT, key=lambda codec: payloads.size(codec.form(n, count)))
    taken = codec.take(Acc(acc.residual, acc.memory), count)
    kernels.add_sparse(acc.residual, *taken.unpacked)  # they stay in the residual until the step is known to succeed
    received = yield from gather(codec.pack(taken, None))
    inside, outside = [], []
    for payload in received:
        values, indices, _ = codec.read(payload)
        places = indices.long().clamp(0, n - 1)
        zeros.index_copy_(0, places, values)
        inside.append(common.read(zeros))
        common.write(zeros, torch.zeros_like(inside[-1]))
        outside.append((places, zeros[places]))
        zeros.index_fill_(0, places, 0.0)
    return Innovations(torch.stack(inside), outside)


def gather_entries(entries: CommonEntries) -> Requests[Tensor]:
    """Gather every rank's entries as they are, [ranks, rows, k]."""
    received = yield from gather(wrap(entries.values.flatten()))
    return torch.stack([payload["bytes"].view(entries.values.shape) for payload in received])


def exact_mean(all_ranks: Tensor, share: float) -> SharedMean:
    """Average the gathered entries. No error is left. share: a factor with which their sums cannot overflow."""
    return SharedMean(ordered_mean(all_ranks * share) / share, torch.zeros_like(all_ranks[0]))


def exchange_codes(entries: CommonEntries, coder: Autoencoder, half: bool) -> Requests[SharedMean]:
    """Average all ranks' codes and decode the mean. A rank's error is the one of its own code."""
    codes = encode(coder, entries.normalised)
    if half:
        codes = codes.half()
        received = yield from gather(wrap(codes.flatten()))
        mean_code = ordered_mean(torch.stack([payload["bytes"].double() for payload in received]))
    else:
        mean_code = yield from reduce(codes.flatten().clone(), 1 / entries.world.size)
    length, scales, decoders = entries.values.shape[1], entries.places.scales, [0] * len(codes)
    own = coder.decode_reproducibly(codes, length, decoders) * scales
    mean = coder.decode_reproducibly(mean_code.view(codes.shape), length, decoders) * scales
    return SharedMean(_bounded(mean), _bounded(entries.values - own))


def decode_leader_codes(entries: CommonEntries, coder: Autoencoder) -> SharedMean:
    """Decode every rank's entries from the leaders' codes, which came with the places. Each rank has its own decoder."""
    codes, scales = entries.places.codes, entries.places.scales
    assert codes is not None
    own, mean = coder.decode_with_mean(codes, entries.values.shape[1], entries.decoder_of_row, entries.decoder_innovations)
    return SharedMean(_bounded(mean * scales), _bounded(entries.values - own * scales))


def _bounded(entries: Tensor) -> Tensor:
    """Bound decoded entries, which a huge scale can make infinite."""
    return entries.clamp(-LARGEST, LARGEST)


def encode(coder: Autoencoder, rows: Tensor) -> Tensor:
    """Encode normalised entries, clipped to what half precision can hold."""
    return coder.encode(rows.clamp(-CLIP, CLIP)).clamp(-LARGEST_CODE, LARGEST_CODE)


def learn(entries: CommonEntries, all_ranks: Tensor, coder: Autoencoder, window: int, step: int) -> tuple[Tensor, Tensor]:
    """Take one learning step on a window of all ranks' entries.

    Return this rank's normalised entries in the window, and the errors that codes would have made there.
    window: entries of all ranks to learn from.
    """
    ranks, count, k = all_ranks.shape
    rows = min(count, max(1, window // (ranks * SHORTEST_WINDOW)))
    columns = min(k, max(SHORTEST_WINDOW, window // (ranks * rows)))
    row_slice, column_slice = _window(step, count, rows), _window(step, k, columns)
    part = entries.window(row_slice, column_slice)
    normalised = (all_ranks[:, row_slice, column_slice] / part.places.scales).clamp(-CLIP, CLIP)
    own, innovations = normalised[entries.world.rank], part.decoder_innovations
    if innovations is None:
        decoded = coder.decode(encode(coder, own), columns)
        coder.learn(lambda weights: coder.loss_of_mean(normalised, weights))
    else:
        ordered = part.in_leader_order(normalised)
        decoded = coder.decode(encode(coder, ordered[:, 0]), columns, innovations)
        coder.learn(lambda weights: coder.loss_of_each(ordered, innovations, weights))
    return own, own - part.select_own(decoded)


def _window(step: int, length: int, size: int) -> slice:
    """Choose `size` neighbours out of `length`, at another place in each step."""
    begin = step * 0x9E3779B1 % (length - size + 1)
    return slice(begin, begin + size)
