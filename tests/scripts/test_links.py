"""Links of known speed are measured as they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from rank_clock import CLOCK

from gradcomp.core.requests import Gather, Reduce, Request, Send, World, bytes_of
from gradcomp.networks import Answer
from gradcomp.networks.memory import Round
from gradcomp.prediction.link import Measured
from gradcomp.prediction.mirror import message_of
from laboratory.train import links


@pytest.fixture(autouse=True)
def model_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages take the time that a test gives them, and nothing else does."""
    monkeypatch.setattr(links, "time", CLOCK)


CPU = torch.device("cpu")
FIXED = {"reduce": 2e-3, "gather": 3e-3, "send": 1e-3, "near": 5e-4, "far": 4e-3}
EACH = {"reduce": 4e-8, "gather": 1e-7, "send": 2e-8, "near": 1e-8, "far": 6e-8}


class Known:
    """A network whose operations take a known time."""

    def __init__(self, world: World):
        self.world = world

    def kind(self, request: Request) -> str:
        match request:
            case Reduce():
                return "reduce"
            case Gather():
                return "gather"
            case Send(payloads):
                away = {self.world.on_other_host(rank) for rank in payloads}
                mixed = len(away) > 1 or len(set(self.world.hosts or ())) == self.world.size
                return "send" if mixed else ("near", "far")[away.pop()]

    def start(self, request: Request, name: str) -> Answer:
        kind = self.kind(request)

        def answer() -> Any:
            CLOCK.sleep(FIXED[kind] + EACH[kind] * bytes_of(request))
            return request.tensor if isinstance(request, Reduce) else []

        return answer


@pytest.mark.parametrize("hosts", [(0, 1, 2, 3), (0, 0, 1, 1)])
def test_a_line_for_each_kind(hosts: tuple[int, ...]) -> None:
    network: Any = Known(World(0, 4, hosts))
    found = links.measure(network, CPU, 10**5, 3)
    kinds = {"reduce", "gather", "send"} | ({"near", "far"} if len(set(hosts)) < 4 else set())
    assert found.lines.keys() == kinds
    for kind, (fixed, each) in found.lines.items():
        assert fixed == pytest.approx(FIXED[kind]) and each == pytest.approx(EACH[kind]), kind


def test_a_message_of_few_entries_and_a_pause_do_not_count() -> None:
    """Gloo's reduction of less than an entry for each rank takes fewer steps. Where ranks share cores, some messages wait."""
    world, sent = World(0, 64, tuple(range(64))), Counter[str]()

    class Uneven(Known):
        def start(self, request: Request, name: str) -> Answer:
            answer, sent[name] = super().start(request, name), sent[name] + 1
            few = isinstance(request, Reduce) and request.tensor.numel() < 2 * world.size

            def slow() -> Any:
                CLOCK.sleep(0.5 if sent[name] % 3 == 0 else -1 if few else 0)
                return [] if few else answer()

            return slow

    network: Any = Uneven(world)
    for kind, (fixed, each) in links.measure(network, CPU, 10**5, 3).lines.items():
        assert fixed == pytest.approx(FIXED[kind]) and each == pytest.approx(EACH[kind]), kind


def test_a_send_that_stays_on_a_host_takes_its_own_line() -> None:
    world = World(0, 4, (0, 0, 1, 1))
    times = Measured({kind: (fixed, EACH[kind]) for kind, fixed in FIXED.items()})
    for ranks, kind in (((1,), "near"), ((2, 3), "far"), ((1, 2, 3), "send")):
        request = links._send([*ranks], 1000, CPU)
        assert times.seconds(message_of(request), world) == pytest.approx(FIXED[kind] + EACH[kind] * bytes_of(request))


def test_ranks_of_unequal_hosts_send_payloads_of_one_form() -> None:
    hosts = (0, 0, 0, 1)
    made = [links._requests(World(rank, 4, hosts), CPU) for rank in range(4)]
    assert {*made[0]} == {"reduce", "gather", "send"}
    requests: list[Any] = [each["send"](1000) for each in made]
    assert len({request.form for request in requests}) == 1
    rounds = Round("send", 4)
    for rank, request in enumerate(requests):
        rounds.post(rank, request)
    for rank in range(4):
        rounds.reply(rank)
