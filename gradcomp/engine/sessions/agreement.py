"""The agreement of the ranks: a record of the terms that must be equal, and the check that names differences."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The first bytes of a record.
MAGIC = b"gradcomp"
# Bytes of a term's entry in a record: the digest of its text, and the beginning of the text.
_DIGEST = 16
_TEXT = 112
_ENTRY = _DIGEST + _TEXT


class Facts(NamedTuple):
    """A rank's facts, which may differ between ranks.

    steps: the steps that it has done. ranks: the number of ranks that shared what waits in its residual; 0 = nothing waits yet.
    rank: its number among them. loaded: 1 if a state was loaded since the last meeting. met: 1 if it has met others before.
    name: a random name for the meeting.
    """

    steps: int = 0
    ranks: int = 0
    rank: int = 0
    loaded: int = 0
    met: int = 0
    name: int = 0


_FACTS = struct.Struct(f"<{len(Facts._fields)}q")
_HEAD = len(MAGIC) + _FACTS.size


def record(terms: Mapping[str, str], facts: Facts = Facts()) -> Tensor:  # noqa: B008 - it never changes
    """Make a rank's record, of fixed size: its facts, and for each term a digest of its text and the text's beginning."""
    entries = b"".join(
        hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest() + text.encode()[:_TEXT].ljust(_TEXT)
        for text in terms.values()
    )
    return torch.frombuffer(bytearray(MAGIC + _FACTS.pack(*facts) + entries), dtype=torch.uint8)


def check(terms: Mapping[str, str], records: Sequence[Tensor]) -> list[Facts]:
    """Raise an error that names every term in which a rank differs from rank 0. Return the facts of all ranks.

    All ranks hold the same records, so that all raise the same error.
    """
    every = [bytes(record.tolist()) for record in records]
    for rank, text in enumerate(every):
        if not text.startswith(MAGIC):
            raise ValueError(
                f"rank {rank} sent other bytes than its terms to the meeting of all ranks: call attach(), change() and "
                "load_state_dict() on all ranks at the same step, with the same version of gradcomp"
            )
    differences = []
    for i, term in enumerate(terms):
        begin = _HEAD + i * _ENTRY
        entries = [text[begin : begin + _ENTRY] for text in every]
        other = next((rank for rank, entry in enumerate(entries) if entry != entries[0]), None)
        if other is not None:
            differences.append(f"{term}: rank 0 has {_readable(entries[0])}, rank {other} has {_readable(entries[other])}")
    if differences:
        raise ValueError(
            "the ranks do not agree and cannot exchange gradients; make these equal on all ranks: " + "; ".join(differences)
        )
    return [Facts(*_FACTS.unpack(text[len(MAGIC) : _HEAD])) for text in every]


def _readable(entry: bytes) -> str:
    digest, text = entry[:_DIGEST], entry[_DIGEST:].decode(errors="replace").strip()
    return f"{text!r}" + (f" (digest {digest.hex()[:8]})" if len(text) > _TEXT - 8 else "")
