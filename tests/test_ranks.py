"""The starter of ranks: a rank that goes wrong fails the test, does not last, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ranks


def obey(*orders: str) -> Any:
    """Do what this rank was told: end well, fail, or hang."""
    rank = int(os.environ["HOROVOD_RANK"])
    print(f"rank {rank} is to {orders[rank]}")
    if orders[rank] == "fail":
        raise RuntimeError("on purpose")
    if orders[rank] == "hang":
        subprocess.Popen(["sleep", "61.5"])
        time.sleep(61.5)
    return {"rank": rank}


def sleepers() -> list[str]:
    """List the processes that a hanging rank started."""
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.strip() == "sleep 61.5"]


def test_a_rank_that_hangs_fails_the_test_and_shows_where_every_rank_stood() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        ranks.launch(obey, 2, "end well", "hang", seconds=3)
    text = str(failure.value)
    assert "[1] hang" in text
    assert "rank 0 is to end well" in text
    assert "rank 1 is to hang" in text
    assert 'test_ranks.py", line' in text  # where it stood
    assert time.monotonic() - start < 30
    assert sleepers() == []


def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(AssertionError) as failure:
        ranks.launch(obey, 2, "hang", "fail", seconds=50)
    assert "[1] failed" in str(failure.value)
    assert "RuntimeError: on purpose" in str(failure.value)
    assert sleepers() == []


def test_ctrl_c_on_the_test_process_ends_the_ranks() -> None:
    pytest.importorskip("horovod.torch", reason="Ctrl-C was NOT tested: Horovod is not installed")
    program = "import ranks, test_ranks; ranks.launch(test_ranks.obey, 2, 'hang', 'hang')"
    folders = [str(Path(__file__).parent), *filter(None, sys.path)]
    running = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {program}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 50
        while len(sleepers()) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        assert len(sleepers()) == 2
        os.killpg(running.pid, signal.SIGINT)
        running.wait(timeout=20)
        assert sleepers() == []
    finally:
        running.kill()
        running.wait()
