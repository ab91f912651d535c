"""auto as a test wants it: the ways that it tries, and the one that it then takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradcomp.choosing import chooser, tries
from gradcomp.choosing.ways import Way

MIXED = "mixed"


@contextmanager
def chosen(*wanted: str) -> Iterator[None]:
    """Have auto try these ways, once each, and go on with the last. "mixed" is one that it mixes of others."""

    def is_wanted(way: Way, name: str) -> bool:
        return name == (MIXED if ";" in way.spec else str(way))

    patched = {
        (chooser, "shortlist"): lambda every, forecast, present: [
            way for way in every if any(is_wanted(way, name) for name in wanted)
        ],
        (chooser, "best_of"): lambda every, seconds, present: (
            next(way for way in every if is_wanted(way, wanted[-1])),
            "a test wants it",
        ),
        (chooser, "LOOKS"): 10**6,
        (chooser, "TIMING"): 10**6,
        (tries, "ROUNDS"): 1,
        (tries, "ENOUGH"): 10**6,
        (tries, "MOST"): 10**6,
        (chooser, "LEAST"): 0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in patched.items():
            patch.setattr(module, name, value)
        yield
