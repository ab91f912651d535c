"""The handshake: a fixed-size record of what must be the same on all ranks, and the comparison that names what is not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_DIGEST = 16
_TEXT = 112
_ENTRY = _DIGEST + _TEXT


def record(terms: Mapping[str, str]) -> Tensor:
    """One entry for each term: a digest of all of its text, and the beginning of it for people to read."""
    entries = b"".join(
        hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest() + text.encode()[:_TEXT].ljust(_TEXT)
        for text in terms.values()
    )
    return torch.frombuffer(bytearray(entries), dtype=torch.uint8)


def check(terms: Mapping[str, str], records: Sequence[Tensor]) -> None:
    """Raises, naming every term on which a rank differs from rank 0. All ranks hold the same records, so all raise alike."""
    differences = []
    for i, term in enumerate(terms):
        entries = [bytes(r[i * _ENTRY : (i + 1) * _ENTRY].tolist()) for r in records]
        odd = next((rank for rank, entry in enumerate(entries) if entry != entries[0]), None)
        if odd is not None:
            differences.append(f"{term}: rank 0 has {_readable(entries[0])}, rank {odd} has {_readable(entries[odd])}")
    if differences:
        raise ValueError("the ranks do not agree on what they exchange; " + "; ".join(differences))


def _readable(entry: bytes) -> str:
    digest, text = entry[:_DIGEST], entry[_DIGEST:].decode(errors="replace").strip()
    return f"{text!r}" + (f" (digest {digest.hex()[:8]})" if len(text) > _TEXT - 8 else "")
