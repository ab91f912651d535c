"""Fixtures of the tests of auto."""

from __future__ import annotations

import pytest
import rank_clock


@pytest.fixture
def model_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and computing take the time that a test gives them, and nothing else does."""
    rank_clock.install(monkeypatch)
