"""A way that has a spec for each group of layers: it stays a candidate for as long as the session has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradcomp.choosing.chooser import Chooser
from gradcomp.choosing.forecast import Forecast
from gradcomp.choosing.ways import Way, ways
from gradcomp.core.compressor import Layer
from gradcomp.core.requests import World
from gradcomp.prediction import workload
from gradcomp.prediction.link import Measured

LAYERS = {name: Layer(3_000_000, torch.device("cpu")) for name in "abcd"}
PRESENT = Way("dense; a=orq:levels=5,momentum=0")
LINKS = Measured(dict.fromkeys(("reduce", "gather", "send"), (1e-4, 1e-8)))


@pytest.mark.parametrize("groups", [(0, 0, 0, 1), (0, 0, 0, 0), (3, 0, 0, 0)], ids=str)
def test_the_present_way_is_a_candidate_whatever_is_mixed_now(groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forecast, "seconds", lambda self, way, work, times: 1.0)
    monkeypatch.setattr(Forecast, "by_group", lambda self, ways, work, times: [min(i, len(ways) - 1) for i in groups])
    chooser: Any = object.__new__(Chooser)
    chooser._session = SimpleNamespace()
    chooser._switch = SimpleNamespace(way=PRESENT, means=list, of_first=list)
    chooser._exact, chooser._forecast = 1.0, Forecast(LAYERS, 8.0, World(0, 4, (0, 1, 2, 3)))
    chooser._work = workload.given(dict.fromkeys(LAYERS, (3_000_000,)), 0.01, 1.0, 0.0)
    every = ways("low", (torch.float32,), False, False)
    known, forecast = chooser._foresee(every, LINKS, chooser._switch.way)
    assert known.count(PRESENT) == 1 and PRESENT in forecast
    # Sorted by what they lose: just before the one of its own that loses most.
    assert known.index(PRESENT) < known.index(Way("orq:levels=5,momentum=0"))
    assert known.index(PRESENT) > known.index(Way("half"))
