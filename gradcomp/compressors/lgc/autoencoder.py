"""LGC's autoencoder: what a sequence of entries is worth, in a quarter as many numbers.

Convolutions of stride 2, four of them down and four up again, as published, with one way down and one way up for each decoder.
Sequences are filled up with zeros to a length at which the way up ends where the way down began. All weights lie in one flat
array that belongs to no model: no optimizer of the user's sees them, and no draw of the user's is spent on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CODE = 4
"""Channels of a code."""
DOWN = ((1, 64, 3), (64, 128, 3), (128, 256, 3), (256, 64, 3), (64, CODE, 1))
UP = ((CODE, 32), (32, 64), (64, 128), (128, 32))
"""Channels from and to; on the way down also how many places are seen at once, of which it is three on the way up."""
SHRINKS = 16
"""So many places of a sequence are one of its code's."""
TAPS = 2 * SHRINKS - 1
"""Places of a sequence that one of the code's has a say in."""
SLOPE = 0.01

BETAS, RATE = (0.9, 0.999), 1e-3
SIMILARITY = 0.5
"""Of the loss of many decoders, the weight of codes that resemble one another; as published, that of the entries too."""


def code_places(entries: int) -> int:
    """Places of the code of so many entries: 16 q + 15 entries have q."""
    return max(1, -(-(entries - (SHRINKS - 1)) // SHRINKS))


def filled(entries: int) -> int:
    """The length that a sequence is filled up to."""
    return SHRINKS * code_places(entries) + SHRINKS - 1


class Autoencoder:
    """One encoder and `decoders` decoders, which with beside= are told one number more for each entry.

    linear: nothing is cut off on the way up, so that the mean of what codes decode to is what their mean decodes to.
    """

    def __init__(self, decoders: int, beside: bool, linear: bool, seed: int, device: torch.device):
        self.decoders, self.beside, self.linear, self.seed = decoders, beside, linear, seed
        shapes: list[tuple[int, ...]] = []
        for channels, to, width in DOWN:
            shapes += [(to, channels, width), (to,)]
        for channels, to in UP:
            shapes += [(decoders * channels, to, 3)] + ([] if linear else [(decoders * to,)])
        shapes += [(decoders, UP[-1][1] + beside, 1)] + ([] if linear else [(decoders,)])
        self.shapes = shapes
        self.weights = torch.empty(sum(torch.Size(shape).numel() for shape in shapes), device=device)
        self.draw()

    def draw(self) -> None:
        """Begins anew, as far from what was learned as at first."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn, bound = [], 1.0
        for shape in self.shapes:
            if len(shape) > 1:  # as torch draws a convolution's weights, and the biases behind them
                bound = (shape[1] * shape[2]) ** -0.5
            drawn.append((2 * torch.rand(shape, generator=generator) - 1).flatten() * bound)
        self.weights.copy_(torch.cat(drawn))
        self.moments = torch.zeros(2, len(self.weights), device=self.weights.device)
        self.turns = 0
        self.taps = self._taps()

    def encode(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Codes of sequences: of [rows, n] entries [rows, 4, code_places(n)] numbers."""
        entries = rows.shape[1]
        channels = functional.pad(rows, (0, filled(entries) - entries))[:, None]
        own = self._split(weights)
        with self._exact():
            for at, (_, _, width) in enumerate(DOWN):
                channels = functional.conv1d(channels, own[2 * at], own[2 * at + 1], stride=2 if width > 1 else 1)
                channels = functional.leaky_relu(channels, SLOPE)
        return channels

    def decode(self, codes: Tensor, entries: int, beside: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """What every decoder makes of every code: of [rows, 4, places] numbers [rows, decoders, entries]."""
        with self._exact():
            return self._decode(codes, entries, beside, weights)

    def _exact(self) -> Any:
        """In the precision of the weights, also where the user has others computed with less."""
        return torch.autocast(self.weights.device.type, enabled=False)

    def _decode(self, codes: Tensor, entries: int, beside: Tensor | None, weights: Tensor | None) -> Tensor:
        own = self._split(weights)[2 * len(DOWN) :]
        if codes.dtype != own[0].dtype:
            own = [weight.to(codes.dtype) for weight in own]
        channels = codes.repeat(1, self.decoders, 1)
        each = 1 if self.linear else 2
        for at in range(len(UP)):
            bias = None if self.linear else own[each * at + 1]
            channels = functional.conv_transpose1d(channels, own[each * at], bias, stride=2, groups=self.decoders)
            channels = channels if self.linear else functional.leaky_relu(channels, SLOPE)
        if beside is not None:
            rows, _, length = channels.shape
            told = functional.pad(beside.to(codes.dtype), (0, length - entries))
            channels = torch.cat([channels.view(rows, self.decoders, -1, length), told[:, :, None]], 2).view(rows, -1, length)
        said: Tensor = functional.conv1d(channels, own[each * len(UP)], None if self.linear else own[-1], groups=self.decoders)
        return said[:, :, :entries]

    def decode_alike(self, codes: Tensor, entries: int, which: Sequence[int], beside: Tensor | None = None) -> Tensor:
        """What of every code the decoder makes that is named for it, [rows, entries], to the same bits on whatever machine.

        A way up that is linear is one convolution of stride 16, whose sums are made here in one certain order. One that is not
        is computed in double precision, of which nearly always the same single precision is left.
        """
        if not self.linear:
            return own_of(self.decode(codes.double(), entries, beside), which).float()
        out = _laid_out(codes, torch.stack([self.taps[decoder] for decoder in which]), entries)
        if beside is not None:
            out += own_of(beside, which).double() * torch.stack([self.told[decoder] for decoder in which])[:, None]
        return out.float()

    def decode_led(self, codes: Tensor, entries: int, which: Sequence[int], beside: Tensor | None) -> tuple[Tensor, Tensor]:
        """What decode_alike gives, and the mean of what all decoders make of every code. That of linear ones is one decoder."""
        if not self.linear:
            said = self.decode(codes.double(), entries, beside)
            return own_of(said, which).float(), mean_of(said.unbind(1)).float()
        mean = _laid_out(codes, mean_of(self.taps.double())[None], entries)
        for decoder, told in enumerate([] if beside is None else beside.unbind(1)):
            mean += told.double() * (self.told[decoder].double() / self.decoders)
        return self.decode_alike(codes, entries, which, beside), mean.float()

    def loss_of_mean(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Of every rank's sequences [ranks, rows, n], how far from their mean is what the mean of their codes decodes to."""
        ranks, count, entries = rows.shape
        codes = self.encode(rows.flatten(0, 1), weights).unflatten(0, (ranks, count)).mean(0)
        return functional.mse_loss(self.decode(codes, entries, weights=weights)[:, 0], rows.mean(0))

    def loss_of_each(self, rows: Tensor, beside: Tensor, weights: Tensor) -> Tensor:
        """Of sequences [rows, ranks, n], the first of them the leader's, how far from each is what its decoder makes of the
        leader's code; and codes from one another."""
        count, ranks, entries = rows.shape
        codes = self.encode(rows.flatten(0, 1), weights).unflatten(0, (count, ranks))
        off = (self.decode(codes[:, 0], entries, beside, weights) - rows).square().mean((0, 2)).sum()
        apart = 2 * (ranks * codes.square().sum(1) - codes.sum(1).square()).sum() / codes[:, 0].numel()
        loss: Tensor = (1 - SIMILARITY) * off + SIMILARITY * apart
        return loss

    def learn(self, loss_of: Any) -> Tensor:
        """One step of Adam down a loss, which is a function of the weights. Returns the loss."""
        with torch.enable_grad():
            weights = self.weights.detach().requires_grad_()
            loss: Tensor = loss_of(weights)
            (grad,) = torch.autograd.grad(loss, weights)
        self.turns += 1
        for moment, beta, part in zip(self.moments, BETAS, (grad, grad * grad), strict=True):
            moment.mul_(beta).add_(part, alpha=1 - beta)
        mean, square = (moment / (1 - beta**self.turns) for moment, beta in zip(self.moments, BETAS, strict=True))
        self.weights -= RATE * mean / (square.sqrt() + 1e-8)
        return loss.detach()

    def frozen(self) -> Tensor:
        """All that codes depend on, for the ranks to agree upon."""
        return torch.cat([self.weights, self._taps().flatten()])

    def digest(self) -> str:
        """A name for what frozen() gives."""
        whole = torch.cat([self.weights, self.taps.flatten()]).cpu().view(torch.uint8)
        return hashlib.blake2b(bytes(whole.tolist()), digest_size=4).hexdigest()

    def freeze(self, agreed: Tensor) -> None:
        """Goes on with what the ranks have agreed upon."""
        self.weights.copy_(agreed[: len(self.weights)])
        self.taps = agreed[len(self.weights) :].clone().view_as(self.taps)

    @property
    def told(self) -> Tensor:
        """Of linear decoders, what the number beside an entry counts for."""
        return self.weights[-self.decoders * (UP[-1][1] + 1) :].view(self.decoders, -1)[:, -1]

    def _taps(self) -> Tensor:
        """What one number of a code adds to the places it has a say in, of each decoder and channel; filled up by a zero."""
        if not self.linear:
            return self.weights[:0]
        impulses = torch.eye(CODE, device=self.weights.device)[:, :, None]
        beside = self.weights.new_zeros(CODE, self.decoders, TAPS) if self.beside else None
        return functional.pad(self.decode(impulses, TAPS, beside).transpose(0, 1), (0, 1))

    def _split(self, weights: Tensor | None) -> list[Tensor]:
        flat = self.weights if weights is None else weights
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(flat.split(sizes), self.shapes, strict=True)]

    def save(self) -> dict[str, Any]:
        """Everything, in copies."""
        return {
            "weights": self.weights.clone(),
            "moments": self.moments.clone(),
            "taps": self.taps.clone(),
            "turns": self.turns,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Puts back what save() gave."""
        for name in ("weights", "moments", "taps"):
            getattr(self, name).copy_(saved[name])
        self.turns = saved["turns"]


def _laid_out(codes: Tensor, taps: Tensor, entries: int) -> Tensor:
    """Every number of [rows, 4, places] times its channel's taps, [rows or 1, 4, 32], added up where they overlap."""
    numbers, weights = codes.double()[..., None], taps.double()[:, :, None]
    sums = numbers[:, 0] * weights[:, 0]
    for channel in range(1, CODE):
        sums += numbers[:, channel] * weights[:, channel]
    left, right = sums.split(SHRINKS, 2)
    return (functional.pad(left, (0, 0, 0, 1)) + functional.pad(right, (0, 0, 1, 0))).flatten(1)[:, :entries]


def own_of(each: Tensor, which: Sequence[int]) -> Tensor:
    """Row by row of [rows, decoders, ...], what belongs to the decoder that is named for it."""
    return torch.stack([row[decoder] for row, decoder in zip(each, which, strict=True)])


def mean_of(each: Sequence[Tensor] | Tensor) -> Tensor:
    """Added up one by one."""
    total = each[0]
    for further in each[1:]:
        total = total + further
    return total / len(each)
