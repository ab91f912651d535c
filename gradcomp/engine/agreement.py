"""The agreement of the ranks: a record of the terms that must be equal, and the check that names differences."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Bytes of a term's entry in a record: the digest of its text, and the beginning of the text.
_DIGEST = 16
_TEXT = 112
_ENTRY = _DIGEST + _TEXT


def record(terms: Mapping[str, str]) -> Tensor:
    """Make a rank's record, of fixed size: for each term a digest of its text, and the beginning of the text for messages."""
    entries = b"".join(
        hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest() + text.encode()[:_TEXT].ljust(_TEXT)
        for text in terms.values()
    )
    return torch.frombuffer(bytearray(entries), dtype=torch.uint8)


def check(terms: Mapping[str, str], records: Sequence[Tensor]) -> None:
    """Raise an error that names every term in which a rank differs from rank 0.

    All ranks hold the same records, so that all raise the same error.
    """
    differences = []
    for i, term in enumerate(terms):
        entries = [bytes(record[i * _ENTRY : (i + 1) * _ENTRY].tolist()) for record in records]
        other = next((rank for rank, entry in enumerate(entries) if entry != entries[0]), None)
        if other is not None:
            differences.append(f"{term}: rank 0 has {_readable(entries[0])}, rank {other} has {_readable(entries[other])}")
    if differences:
        raise ValueError(
            "the ranks do not agree and cannot exchange gradients; make these equal on all ranks: " + "; ".join(differences)
        )


def _readable(entry: bytes) -> str:
    digest, text = entry[:_DIGEST], entry[_DIGEST:].decode(errors="replace").strip()
    return f"{text!r}" + (f" (digest {digest.hex()[:8]})" if len(text) > _TEXT - 8 else "")
