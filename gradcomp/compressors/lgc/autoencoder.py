"""LGC's autoencoder: a code of a sequence of entries, a quarter as many numbers.

The encoder has four convolutions of stride 2, as published. Each decoder has the four published transposed ones, but neither
biases nor nonlinearities: the mean of decoded codes is the decoded mean of the codes. All decoders share one encoder. Sequences
are padded with zeros to a length that the decoder returns exactly. All weights lie in one flat array that belongs to no model,
so the user's optimizers do not see them. They are drawn without the user's random generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradcomp.saved import read_int, tensor

# Channels of a code.
CODE_CHANNELS = 4
# The encoder's layers: channels in, channels out, kernel size.
ENCODER = ((1, 64, 3), (64, 128, 3), (128, 256, 3), (256, 64, 3), (64, CODE_CHANNELS, 1))
# The decoder's layers: channels in, channels out. The kernel size is 3.
DECODER = ((CODE_CHANNELS, 32), (32, 64), (64, 128), (128, 32))
# Positions of a sequence for each position of its code.
STRIDE = 16
# Positions of a sequence that one position of the code affects.
TAPS = 2 * STRIDE - 1
# The slope of the leaky ReLU below 0.
LEAKY_SLOPE = 0.01

# Adam's decay rates and learning rate.
BETAS, RATE = (0.9, 0.999), 1e-3
# The weight of the codes' distance in the loss of many decoders. The decoding error has the other half, as published.
SIMILARITY = 0.5


def code_length(entries: int) -> int:
    """Return the positions of the code of a sequence: q for 16 q + 15 entries."""
    return max(1, -(-(entries - (STRIDE - 1)) // STRIDE))


def padded_length(entries: int) -> int:
    """Return the length that a sequence is padded to."""
    return STRIDE * code_length(entries) + STRIDE - 1


class Autoencoder:
    """One encoder and `decoders` decoders. innovations: the decoders get one number for each entry beside the code."""

    def __init__(self, decoders: int, innovations: bool, seed: int, device: torch.device):
        self.decoders, self.innovations, self.seed = decoders, innovations, seed
        shapes: list[tuple[int, ...]] = []
        for channels_in, channels_out, width in ENCODER:
            shapes += [(channels_out, channels_in, width), (channels_out,)]
        for channels_in, channels_out in DECODER:
            shapes.append((decoders * channels_in, channels_out, 3))
        shapes.append((decoders, DECODER[-1][1] + innovations, 1))
        self.shapes = shapes
        self.weights = torch.empty(sum(torch.Size(shape).numel() for shape in shapes), device=device)
        self.draw_weights()

    def draw_weights(self) -> None:
        """Draw new weights and forget all that was learned. The same seed gives the same weights."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn, bound = [], 1.0
        for shape in self.shapes:
            if len(shape) > 1:  # the bound of torch's convolutions, for the weights and the biases that follow them
                bound = (shape[1] * shape[2]) ** -0.5
            drawn.append((2 * torch.rand(shape, generator=generator) - 1).flatten() * bound)
        self.weights.copy_(torch.cat(drawn))
        self.moments = torch.zeros(2, len(self.weights), device=self.weights.device)
        self.steps = 0
        self.taps = self._taps()

    def encode(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Encode sequences: [rows, n] entries to [rows, 4, code_length(n)] numbers."""
        entries = rows.shape[1]
        channels = functional.pad(rows, (0, padded_length(entries) - entries))[:, None]
        arrays = self._split(weights)
        with self._full_precision():
            for layer, (_, _, width) in enumerate(ENCODER):
                weight, bias = arrays[2 * layer], arrays[2 * layer + 1]
                channels = functional.conv1d(channels, weight, bias, stride=2 if width > 1 else 1)
                channels = functional.leaky_relu(channels, LEAKY_SLOPE)
        return channels

    def decode(self, codes: Tensor, entries: int, innovations: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Decode every code with every decoder: [rows, 4, positions] numbers to [rows, decoders, entries]."""
        *transposed, last = self._split(weights)[2 * len(ENCODER) :]
        channels = codes.repeat(1, self.decoders, 1)
        with self._full_precision():
            for weight in transposed:
                channels = functional.conv_transpose1d(channels, weight, stride=2, groups=self.decoders)
            if innovations is not None:
                rows, _, length = channels.shape
                padded = functional.pad(innovations, (0, length - entries))[:, :, None]
                channels = torch.cat([channels.view(rows, self.decoders, -1, length), padded], 2).view(rows, -1, length)
            decoded: Tensor = functional.conv1d(channels, last, groups=self.decoders)
        return decoded[:, :, :entries]

    def _full_precision(self) -> Any:
        """Switch autocast off."""
        return torch.autocast(self.weights.device.type, enabled=False)

    def decode_reproducibly(
        self, codes: Tensor, entries: int, decoders: Sequence[int], innovations: Tensor | None = None
    ) -> Tensor:
        """Decode each code with one decoder, to [rows, entries], to the same bits on any machine.

        A linear decoder is one convolution of stride 16. Its sums are made here in a fixed order. decoders: one for each row.
        """
        decoded = _convolve(codes, torch.stack([self.taps[decoder] for decoder in decoders]), entries)
        if innovations is not None:
            weights = torch.stack([self.innovation_weights[decoder] for decoder in decoders])
            decoded += select_decoder(innovations, decoders).double() * weights[:, None]
        return decoded.float()

    def decode_with_mean(
        self, codes: Tensor, entries: int, decoders: Sequence[int], innovations: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Decode each code with one decoder, as decode_reproducibly does; and with all decoders, to their mean.

        The mean of linear decoders is one decoder.
        """
        mean = _convolve(codes, ordered_mean(self.taps.double())[None], entries)
        for decoder, innovation in enumerate([] if innovations is None else innovations.unbind(1)):
            mean += innovation.double() * (self.innovation_weights[decoder].double() / self.decoders)
        return self.decode_reproducibly(codes, entries, decoders, innovations), mean.float()

    def loss_of_mean(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the squared distance of the decoded mean code from the mean of all ranks' sequences [ranks, rows, n]."""
        ranks, count, entries = rows.shape
        codes = self.encode(rows.flatten(0, 1), weights).unflatten(0, (ranks, count)).mean(0)
        return functional.mse_loss(self.decode(codes, entries, weights=weights)[:, 0], rows.mean(0))

    def loss_of_each(self, rows: Tensor, innovations: Tensor, weights: Tensor) -> Tensor:
        """Return the loss of decoding every rank's sequence from the leader's code.

        It adds the squared distances of the decoded sequences from the true ones, and of the ranks' codes from one another.
        rows: [rows, ranks, n], the leader's sequence first.
        """
        count, ranks, entries = rows.shape
        codes = self.encode(rows.flatten(0, 1), weights).unflatten(0, (count, ranks))
        error = (self.decode(codes[:, 0], entries, innovations, weights) - rows).square().mean((0, 2)).sum()
        distance = 2 * (ranks * codes.square().sum(1) - codes.sum(1).square()).sum() / codes[:, 0].numel()
        loss: Tensor = (1 - SIMILARITY) * error + SIMILARITY * distance
        return loss

    def learn(self, loss_of: Any) -> Tensor:
        """Take one step of Adam on a loss, a function of the weights. Return the loss."""
        with torch.enable_grad():
            weights = self.weights.detach().requires_grad_()
            loss: Tensor = loss_of(weights)
            (grad,) = torch.autograd.grad(loss, weights)
        self.steps += 1
        for moment, beta, power in zip(self.moments, BETAS, (grad, grad * grad), strict=True):
            moment.mul_(beta).add_(power, alpha=1 - beta)
        mean, square = (moment / (1 - beta**self.steps) for moment, beta in zip(self.moments, BETAS, strict=True))
        self.weights -= RATE * mean / (square.sqrt() + 1e-8)
        return loss.detach()

    def shared_values(self) -> Tensor:
        """Return all values that codes depend on, for the ranks to average before they use codes."""
        return torch.cat([self.weights, self._taps().flatten()])

    def adopt(self, shared: Tensor) -> None:
        """Set the values that all ranks have agreed on."""
        self.weights.copy_(shared[: len(self.weights)])
        self.taps = shared[len(self.weights) :].clone().view_as(self.taps)

    @property
    def innovation_weights(self) -> Tensor:
        """Return the weight of the innovation in each decoder."""
        return self.weights[-self.decoders * (DECODER[-1][1] + 1) :].view(self.decoders, -1)[:, -1]

    def _taps(self) -> Tensor:
        """Return the decoders' impulse responses, [decoders, channels, 32]; the last tap is 0."""
        impulses = torch.eye(CODE_CHANNELS, device=self.weights.device)[:, :, None]
        innovations = self.weights.new_zeros(CODE_CHANNELS, self.decoders, TAPS) if self.innovations else None
        return functional.pad(self.decode(impulses, TAPS, innovations).transpose(0, 1), (0, 1))

    def _split(self, weights: Tensor | None) -> list[Tensor]:
        """Return the weights and biases as views of the flat array."""
        flat = self.weights if weights is None else weights
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return [part.view(shape) for part, shape in zip(flat.split(sizes), self.shapes, strict=True)]

    def save(self) -> dict[str, Any]:
        """Copy the state for a checkpoint."""
        state = {"weights": self.weights.clone(), "moments": self.moments.clone(), "taps": self.taps.clone()}
        return {**state, "turns": self.steps}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of save()."""
        arrays = {name: tensor(saved, name, getattr(self, name).shape) for name in ("weights", "moments", "taps")}
        self.steps = read_int(saved, "turns")
        for name, array in arrays.items():
            getattr(self, name).copy_(array)
        self.moments[1].clamp_(min=0)  # a mean of squares


def _convolve(codes: Tensor, taps: Tensor, entries: int) -> Tensor:
    """Convolve [rows, 4, positions] codes with [rows or 1, 4, 32] taps at stride 16, with sums in a fixed order."""
    numbers, weights = codes.double()[..., None], taps.double()[:, :, None]
    sums = numbers[:, 0] * weights[:, 0]
    for channel in range(1, CODE_CHANNELS):
        sums += numbers[:, channel] * weights[:, channel]
    left, right = sums.split(STRIDE, 2)
    return (functional.pad(left, (0, 0, 0, 1)) + functional.pad(right, (0, 0, 1, 0))).flatten(1)[:, :entries]


def select_decoder(decoded: Tensor, decoders: Sequence[int]) -> Tensor:
    """Select one decoder of each row of [rows, decoders, ...]."""
    return torch.stack([row[decoder] for row, decoder in zip(decoded, decoders, strict=True)])


def ordered_mean(arrays: Sequence[Tensor] | Tensor) -> Tensor:
    """Average arrays with sums in a fixed order."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total / len(arrays)
