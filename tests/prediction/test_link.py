"""A step laid out in time, against steps laid out by hand; and the times of messages, against their formulas."""

from __future__ import annotations

import pytest

from gradcomp.core.requests import World
from gradcomp.prediction.link import Link, Sharded, Step, Work, bandwidth_of, seconds_of, step_of, step_over_shards
from gradcomp.prediction.recording_network import Bucket, Message, Part

FOUR = World(0, 4, (0, 1, 2, 3))
PAIRS = World(0, 4, (0, 0, 1, 1))
# Forward 1 s, backward 4 s, and the optimizer half a second; the last layer's gradient is there after a quarter of backward.
WORK = Work(1.0, 4.0, {"last": 0.25, "first": 1.0}, 0.5)


class Fixed(Link):
    """A link whose messages take as many seconds as they have bytes."""

    def seconds(self, message: Message, world: World) -> float:
        return float(message.bytes)


def laid_out(*buckets: Bucket) -> Step:
    return step_of(WORK, buckets, Fixed(1.0), FOUR)


def test_without_an_exchange_a_step_is_what_it_computes() -> None:
    assert laid_out() == Step(5.5, 0.0, 0.0)


def test_a_message_hides_behind_backward() -> None:
    last = Bucket(("last",), (Part(0.0, Message("gather", 3)), Part(0.0, None)))
    assert laid_out(last).seconds == 5.5  # it begins at 2 and ends at 5, with backward
    longer = Bucket(("last",), (Part(0.0, Message("gather", 5)), Part(0.0, None)))
    assert laid_out(longer) == Step(7.5, 0.0, 2.0)


def test_what_encodes_delays_backward_and_what_decodes_comes_last() -> None:
    last = Bucket(("last",), (Part(1.0, Message("gather", 1)), Part(0.25, None)))
    assert laid_out(last) == Step(1 + 4 + 1 + 0.25 + 0.5, 1.25, 0.0)


def test_messages_follow_one_another_and_rounds_go_bucket_by_bucket() -> None:
    """At 2 the first begins, at 8 the second; each bucket's second message waits for the network, too."""
    last = Bucket(("last",), (Part(0.0, Message("gather", 6)), Part(0.0, Message("gather", 2)), Part(0.0, None)))
    first = Bucket(("first",), (Part(0.0, Message("gather", 1)), Part(0.0, Message("gather", 4)), Part(0.0, None)))
    assert laid_out(last, first) == Step(8 + 1 + 2 + 4 + 0.5, 0.0, 10.0)
    assert laid_out(first, last).seconds == 15.5  # whatever the order in which buckets are given


def test_an_exchange_of_updates_follows_the_optimizers_step() -> None:
    last = Bucket(("last",), (Part(1.0, Message("gather", 3)), Part(0.25, None)), on_updates=True)
    first = Bucket(("first",), (Part(1.0, Message("gather", 1)), Part(0.25, None)), on_updates=True)
    # At 5.5 the first begins to encode, at 6.5 the second; the messages end at 9.5 and 10.5.
    assert laid_out(last, first) == Step(10.75, 2.5, 9.5 - 7.5 + 10.5 - 9.75)


def over_shards(gather: int, reduce: int, overlaps: bool, first_is_resharded: bool = True) -> Step:
    """Lay out a step of two modules, each half of the computing, whose messages are as long as their bytes."""
    parts = [(Part(0.0, Message("gather", size)), Part(0.0, None)) for size in (gather, reduce)]
    modules = [Sharded(0.5, *parts, first_is_resharded), Sharded(0.5, *parts)]
    return step_over_shards(WORK, modules, Fixed(1.0), FOUR, overlaps)


def test_on_a_cpu_a_rank_waits_for_each_message_of_fsdp2() -> None:
    assert over_shards(1, 2, False) == Step(5.5 + 4 * 1 + 2 * 2, 0.0, 4 * 1 + 2 * 2)
    assert over_shards(1, 2, False, False) == Step(5.5 + 3 * 1 + 2 * 2, 0.0, 3 * 1 + 2 * 2)


def test_weights_of_the_next_module_arrive_and_gradients_leave_while_one_computes() -> None:
    """Weights arrive at 1 and 2; in backward again at 3.5, since only its own forward pass lets the second module go, and 4.5.

    Gradients leave from 5.5 to 7.5, while the first module computes, and to 9.5.
    """
    assert over_shards(1, 2, True) == Step(9.5 + 0.5, 0.0, 1 + 0.5 + 1 + 2)
    assert over_shards(1, 2, True, False).seconds == 10


def test_modules_share_the_network_in_order() -> None:
    """Weights arrive at 3, 6, 9.5 and 12.5. Only then, a second after they were ready, gradients leave, to 14.5 and 16.5."""
    assert over_shards(3, 2, True) == Step(16.5 + 0.5, 0.0, 3 + 2.5 + 3 + 1 + 2)
    assert over_shards(3, 2, True, False) == Step(15.5 + 0.5, 0.0, 3 + 2.5 + 3 + 2)


def test_what_rounds_weights_delays_the_computing() -> None:
    parts = Part(0.25, Message("gather", 1)), Part(0.5, None)
    for overlaps in (True, False):
        step = step_over_shards(WORK, [Sharded(1.0, parts, parts, False)], Fixed(1.0), FOUR, overlaps)
        assert step == Step(5.5 + 2 * (0.25 + 1 + 0.5), 1.5, 2.0)


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


def test_rates_and_times_are_read() -> None:
    rates = [bandwidth_of(text, "link") for text in ("10Gbit/s", "100 Mbps", "1e9bit", "2gBit")]
    assert rates == [1.25e9, 1.25e7, 1.25e8, 2.5e8]
    assert [seconds_of(text, "latency") for text in ("50us", "1.5ms", "2 s")] == pytest.approx([5e-5, 1.5e-3, 2.0])


@pytest.mark.parametrize(
    "text", ["fast", "10", "-1Gbit/s", "0Mbit/s", "10GB/s", "1GBps", "1GBPS", "1.2.3Gbit/s", ".ms", "1..2ms"]
)
def test_text_that_is_neither_a_rate_nor_a_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate; write for example 10Gbit/s"):
        bandwidth_of(text, "link")
    with pytest.raises(ValueError, match="is not a time; write for example 50us"):
        seconds_of(text, "latency")
