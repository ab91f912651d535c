"""A step laid out in time, against steps laid out by hand; and the times of messages, against their formulas."""

from __future__ import annotations

import pytest

from gradcomp.core.requests import World
from gradcomp.prediction import timeline
from gradcomp.prediction.link import Link, bandwidth_of, seconds_of
from gradcomp.prediction.measure import Bucket
from gradcomp.prediction.recording_network import Message, Part
from gradcomp.prediction.timeline import Work

FOUR = World(0, 4, (0, 1, 2, 3))
PAIRS = World(0, 4, (0, 0, 1, 1))
# Forward 1 s, backward 4 s, and the optimizer half a second; the last layer's gradient is there after a quarter of backward.
WORK = Work(1.0, 4.0, {"last": 0.25, "first": 1.0}, 0.5)


class Fixed(Link):
    """A link whose messages take as many seconds as they have bytes."""

    def seconds(self, message: Message, world: World) -> float:
        return float(message.bytes)


def gathered(size: int) -> Message:
    return Message("gather", size)


def step_of(*buckets: Bucket) -> timeline.Step:
    return timeline.step(WORK, buckets, Fixed(1.0), FOUR)


def test_without_an_exchange_a_step_is_what_it_computes() -> None:
    assert step_of() == timeline.Step(5.5, 0.0, 0.0)


def test_a_message_hides_behind_backward() -> None:
    last = Bucket(("last",), (Part(0.0, gathered(3)), Part(0.0, None)))
    assert step_of(last).seconds == 5.5  # it begins at 2 and ends at 5, with backward
    longer = Bucket(("last",), (Part(0.0, gathered(5)), Part(0.0, None)))
    assert step_of(longer) == timeline.Step(7.5, 0.0, 2.0)


def test_what_encodes_delays_backward_and_what_decodes_comes_last() -> None:
    last = Bucket(("last",), (Part(1.0, gathered(1)), Part(0.25, None)))
    assert step_of(last) == timeline.Step(1 + 4 + 1 + 0.25 + 0.5, 1.25, 0.0)


def test_messages_follow_one_another_and_rounds_go_bucket_by_bucket() -> None:
    """At 2 the first begins, at 8 the second; each bucket's second message waits for the network, too."""
    last = Bucket(("last",), (Part(0.0, gathered(6)), Part(0.0, gathered(2)), Part(0.0, None)))
    first = Bucket(("first",), (Part(0.0, gathered(1)), Part(0.0, gathered(4)), Part(0.0, None)))
    assert step_of(last, first) == timeline.Step(8 + 1 + 2 + 4 + 0.5, 0.0, 10.0)
    assert step_of(first, last).seconds == 15.5  # whatever the order in which buckets are given


def test_a_ring_sends_a_part_twice_to_all_others_and_a_gather_everything() -> None:
    link = Link(bandwidth=1e6, latency=1e-3)
    assert link.seconds(Message("reduce", 4_000_000), FOUR) == pytest.approx(6 * (1e-3 + 1.0))
    assert link.seconds(Message("gather", 1_000_000), FOUR) == pytest.approx(3 * (1e-3 + 1.0))
    assert link.seconds(Message("gather", 1_000_000), World(0, 1)) == 0


def test_a_send_shares_the_link_of_its_host() -> None:
    """Two ranks of a host each send two others 1 MB through it; what stays on the host does not."""
    link = Link(bandwidth=1e6, latency=0.0, inside=1e7, latency_inside=0.0)
    message = Message("send", 3_000_000, {1: 10**6, 2: 10**6, 3: 10**6}, (1, 2, 3), 10**6)
    assert link.seconds(message, PAIRS) == pytest.approx(2 * 2.0 + 0.1)
    assert link.seconds(message, FOUR) == pytest.approx(3.0)


def test_messages_inside_one_host_do_not_use_the_link() -> None:
    link = Link(bandwidth=1.0, latency=1.0, inside=1e6, latency_inside=0.0)
    assert link.seconds(Message("gather", 1_000_000), World(0, 2, (0, 0))) == pytest.approx(1.0)


@pytest.mark.parametrize("text,wanted", [("10Gbit/s", 1.25e9), ("100 Mbps", 1.25e7), ("1e9bit", 1.25e8), ("2gBit", 2.5e8)])
def test_rates(text: str, wanted: float) -> None:
    assert bandwidth_of(text, "link") == wanted


@pytest.mark.parametrize("text,wanted", [("50us", 5e-5), ("1.5ms", 1.5e-3), ("2 s", 2.0)])
def test_times(text: str, wanted: float) -> None:
    assert seconds_of(text, "latency") == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["fast", "10", "-1Gbit/s", "0Mbit/s", "10GB/s", "1GBps", "1GBPS"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate; write for example 10Gbit/s"):
        bandwidth_of(text, "link")
    with pytest.raises(ValueError, match="is not a time; write for example 50us"):
        seconds_of(text, "latency")


@pytest.mark.parametrize("number", ["1.2.3", ".", "1..2"])
def test_what_is_no_number_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match="is not a rate"):
        bandwidth_of(f"{number}Gbit/s", "link")
    with pytest.raises(ValueError, match="is not a time"):
        seconds_of(f"{number}ms", "latency")
