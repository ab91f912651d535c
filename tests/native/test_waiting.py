"""The tests that forbid a wait for the GPU leave later tests alone, whatever torch says of its mode."""

import warnings

import pytest
import torch
import waiting


def test_torchs_warning_of_the_mode_is_no_error_and_the_mode_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with waiting.forbidden():
        assert modes == ["error"]
        with pytest.raises(UserWarning, match="another"):  # other warnings are errors as before
            warnings.warn("another", stacklevel=1)
    with pytest.raises(RuntimeError, match="on purpose"), waiting.forbidden():
        raise RuntimeError("on purpose")
    assert modes == ["error", "default"] * 2
