"""The autoencoder: the published shapes, decoding to the same bits on all machines, and learning as by torch's Adam."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradcomp.compressors.lgc.autoencoder import CODE_CHANNELS, SIMILARITY, TAPS, Autoencoder, code_length, padded_length

CPU = torch.device("cpu")
LENGTHS = [1, 15, 31, 32, 47, 48, 100, 1000]


def make(decoders: int = 1, innovations: bool = False, seed: int = 0) -> Autoencoder:
    return Autoencoder(decoders, innovations, seed, CPU)


def numbers(coder: Autoencoder, first: int, last: int | None = None) -> int:
    return sum(torch.Size(shape).numel() for shape in coder.shapes[first:last])


def test_it_is_as_large_as_published_but_for_the_biases_of_decoders() -> None:
    coder = make(innovations=True)
    assert numbers(coder, 0, 10) == 172_996
    assert numbers(coder, 10, 14) == 43_648 - 256
    assert numbers(coder, 14) == 34 - 1
    assert len(make(4, innovations=True).weights) == 172_996 + 4 * (43_648 - 256 + 34 - 1)


@pytest.mark.parametrize("entries", LENGTHS)
def test_lengths_match(entries: int) -> None:
    coder = make(3)
    codes = coder.encode(torch.randn(2, entries))
    assert codes.shape == (2, CODE_CHANNELS, code_length(entries))
    assert coder.decode(codes, entries).shape == (2, 3, entries)
    assert coder.decode(codes, padded_length(entries)).shape == (
        2,
        3,
        padded_length(entries),
    )  # the decoder's output is that long
    assert padded_length(entries) >= entries and padded_length(entries) % 16 == 15


def test_a_code_is_a_quarter_of_many_entries() -> None:
    assert CODE_CHANNELS * code_length(25_557) == 6_388  # 4.0 times less


def test_drawn_weights_are_as_torch_would_draw_them() -> None:
    coder, torchs = make(), torch.nn.Conv1d(128, 256, 3)
    own = coder._split(None)
    assert own[4].shape == torchs.weight.shape
    assert torchs.bias is not None
    for drawn, theirs in ((own[4], torchs.weight.detach()), (own[5], torchs.bias.detach())):
        assert 0.95 < float(drawn.abs().max() / theirs.abs().max()) < 1.05
        assert float(drawn.std()) == pytest.approx(float(theirs.abs().max()) / 3**0.5, rel=0.1)  # evenly


@pytest.mark.parametrize("entries", LENGTHS)
@pytest.mark.parametrize("decoders,innovations", [(1, False), (4, True)])
def test_reproducible_decoding_equals_decoding(entries: int, decoders: int, innovations: bool) -> None:
    coder = make(decoders, innovations)
    codes = torch.randn(3, CODE_CHANNELS, code_length(entries))
    told = torch.randn(3, decoders, entries) if innovations else None
    every = coder.decode(codes, entries, told)
    which = [decoders - 1, 0, decoders // 2]
    said = coder.decode_reproducibly(codes, entries, which, told)
    own, mean = coder.decode_with_mean(codes, entries, which, told)
    assert torch.equal(own, said)
    assert said.dtype == torch.float32
    wanted = torch.stack([every[row, decoder] for row, decoder in enumerate(which)])
    torch.testing.assert_close(said, wanted, rtol=1e-4, atol=1e-6)  # sums in another order
    torch.testing.assert_close(mean, every.mean(1), rtol=1e-4, atol=1e-6)


def test_a_linear_decoder_decodes_means_to_means() -> None:
    coder = make()
    codes = torch.randn(8, CODE_CHANNELS, 20).half()
    mean_code = codes.double().mean(0, keepdim=True)
    mean = coder.decode_reproducibly(mean_code, 330, [0])
    torch.testing.assert_close(
        coder.decode_reproducibly(codes, 330, [0] * 8).mean(0, keepdim=True),
        mean,
        rtol=0,
        atol=1e-7 * float(mean.abs().max()) + 1e-8,
    )


def test_each_decoder_is_its_own() -> None:
    """A rank's decoding does not depend on the innovation of another."""
    coder = make(3, innovations=True)
    codes, told = torch.randn(1, CODE_CHANNELS, 4), torch.zeros(1, 3, 70)
    before = coder.decode(codes, 70, told)
    told[0, 1, 5] = 1.0
    changed = (coder.decode(codes, 70, told) - before).nonzero().tolist()
    assert changed == [[0, 1, 5]]
    assert not torch.allclose(before[0, 0], before[0, 1])


def test_losses_are_as_defined() -> None:
    rows = torch.randn(4, 3, 50)  # ranks, rows, entries
    coder = make()
    codes = torch.stack([coder.encode(own) for own in rows])
    wanted = functional.mse_loss(coder.decode(codes.mean(0), 50)[:, 0], rows.mean(0))
    torch.testing.assert_close(coder.loss_of_mean(rows, coder.weights), wanted)

    coder, rows, told = make(4, innovations=True), rows.transpose(0, 1), torch.randn(3, 4, 50)
    codes = torch.stack([coder.encode(row) for row in rows])
    said = coder.decode(codes[:, 0], 50, told)
    entries = sum(functional.mse_loss(said[:, rank], rows[:, rank]) for rank in range(4))
    apart = sum(functional.mse_loss(codes[:, a], codes[:, b]) for a in range(4) for b in range(4) if a != b)
    torch.testing.assert_close(coder.loss_of_each(rows, told, coder.weights), (1 - SIMILARITY) * entries + SIMILARITY * apart)


def test_it_learns_as_torchs_adam_does() -> None:
    coder, rows = make(), torch.randn(2, 1, 64)
    weights = coder.weights.clone().requires_grad_()
    adam = torch.optim.Adam([weights], lr=1e-3)
    for _ in range(5):
        ours = coder.learn(lambda own: coder.loss_of_mean(rows, own))
        theirs = coder.loss_of_mean(rows, weights)
        adam.zero_grad()
        theirs.backward()
        adam.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=0)
    torch.testing.assert_close(coder.weights, weights.detach(), rtol=1e-3, atol=1e-5)


def test_it_learns_a_pattern_that_can_be_learned() -> None:
    """Smooth sequences need few numbers. The first weights are random and decode them badly."""
    coder = make()
    generator = torch.Generator().manual_seed(0)

    def rows() -> Tensor:
        slopes = torch.rand(4, 2, 1, generator=generator) + 0.5
        return slopes * torch.linspace(-1.5, 1.5, 128)

    def missed() -> float:
        seen = rows()
        return float(coder.loss_of_mean(seen, coder.weights) / seen.mean(0).square().mean())

    assert missed() > 0.8
    for _ in range(150):
        coder.learn(lambda own: coder.loss_of_mean(rows(), own))
    assert missed() < 0.01


def test_a_saved_state_continues_to_the_bit() -> None:
    first, rows = make(), torch.randn(2, 1, 64)
    first.learn(lambda own: first.loss_of_mean(rows, own))
    first.adopt(first.shared_values())
    second = make(seed=9)
    second.load(first.save())
    for coder in (first, second):
        coder.learn(lambda own, coder=coder: coder.loss_of_mean(rows, own))  # type: ignore[misc]
    assert torch.equal(first.weights, second.weights) and torch.equal(first.taps, second.taps)


def test_the_agreed_weights_are_used() -> None:
    coder, other = make(seed=0), make(seed=1)
    assert not torch.equal(coder.weights, other.weights)
    coder.adopt(other.shared_values())
    assert torch.equal(coder.weights, other.weights) and torch.equal(coder.taps, other.taps)
    codes = torch.randn(1, CODE_CHANNELS, 3)
    assert torch.equal(coder.decode_reproducibly(codes, TAPS, [0]), other.decode_reproducibly(codes, TAPS, [0]))
    assert torch.equal(coder.encode(torch.ones(1, 60)), other.encode(torch.ones(1, 60)))
