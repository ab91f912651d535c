"""The links of the emulated cluster: their rate, and its change. Needs root."""

import shlex

import pytest
from clusters import MARKS, cluster, lines, program

pytestmark = MARKS


def test_links_have_the_rate() -> None:
    rates = lines(cluster("--hosts 2 --rate 100mbit --launcher torch", program("transfer", "8000000")), 2)
    # Headers take 4 % and a full bucket (256 KB) gives 3 % back: never above 99. Below: slack for a busy machine.
    assert all(70 <= float(rate) <= 100 for [rate] in rates.values()), rates


def test_unshaped_links_are_faster() -> None:
    rates = lines(cluster("--hosts 2 --rate none --launcher torch", program("transfer", "50000000")), 2)
    assert all(float(rate) > 200 for [rate] in rates.values()), rates


@pytest.mark.parametrize(("before", "later"), [("100mbit", "none"), ("none", "100mbit"), ("1gbit", "100mbit")])
def test_links_change_their_rate_later(before: str, later: str) -> None:
    """One way is sent before the change, the other one after it."""
    send = shlex.join(program("transfer", "4000000"))
    done = cluster(f"--hosts 2 --rate {before} --later {later}:2.5 --launcher torch", ["sh", "-c", f"{send}; sleep 3; {send}"])
    said = lines(done, 2)
    assert f"links {'unshaped' if later == 'none' else later} from now on" in done.stderr
    for first, second in said.values():
        slow, fast = (float(second), float(first)) if later == "100mbit" else (float(first), float(second))
        assert 50 <= slow <= 105 and fast > 150, said
