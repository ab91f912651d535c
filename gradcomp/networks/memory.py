"""The network of simulated ranks in one process: ranks post requests on a board, which replies once all have posted."""

from __future__ import annotations

from functools import partial

import torch

from gradcomp.core.requests import Gather, Payload, Reduce, Reply, Request, Send, World
from gradcomp.networks import Answer
from gradcomp.networks.alltoall import check_senders


class Round:
    """One request of every rank, all of the same name, and the replies to them."""

    def __init__(self, name: str, world: int):
        self.name, self.missing = name, world
        self.requests: list[Request | None] = [None] * world
        self.replies: list[Reply] | None = None

    def post(self, rank: int, request: Request) -> None:
        if self.requests[rank] is not None:
            raise RuntimeError(f"{self.name}: rank {rank} posted two requests; a rank posts one")
        self.requests[rank] = request
        self.missing -= 1

    def reply(self, rank: int) -> Reply:
        if self.replies is None:
            self.replies = self._make_replies()
            self.requests.clear()
        return self.replies[rank]

    def _make_replies(self) -> list[Reply]:
        requests, world = self.requests, len(self.requests)
        first = requests[0]
        if any(type(request) is not type(first) for request in requests):
            kinds = ", ".join(type(request).__name__ for request in requests)
            raise RuntimeError(
                f"{self.name}: the ranks posted different requests ({kinds}); all ranks must yield the same sequence"
            )
        match first:
            case Gather():
                payloads: list[Payload] = [r.payload for r in requests if isinstance(r, Gather)]
                if len({payload.form for payload in payloads}) > 1:
                    raise RuntimeError(f"{self.name}: the ranks' payloads have different forms; all ranks must use the same")
                return [payloads] * world
            case Reduce(tensor, scale):
                for request in requests[1:]:
                    assert isinstance(request, Reduce)
                    tensor += request.tensor  # a yielded tensor may be overwritten
                return [tensor.mul_(scale)] * world
            case Send():
                sends = [r for r in requests if isinstance(r, Send)]
                replies: list[Reply] = []
                for receiver, request in enumerate(sends):
                    received = {rank: each.payloads[receiver] for rank, each in enumerate(sends) if receiver in each.payloads}
                    check_senders(request, received, self.name)
                    replies.append(received)
                return replies
        raise TypeError(f"{self.name}: {first!r} is no request; yield a Gather, a Reduce or a Send")


class Board:
    """The rounds that still miss the request of some rank. Only the functions that read its replies keep a complete round."""

    def __init__(self, world: int):
        self.world = world
        self._open: dict[str, Round] = {}

    def clear(self) -> None:
        """Discard the incomplete rounds after a failure."""
        self._open.clear()

    def post(self, name: str, rank: int, request: Request) -> Round:
        current = self._open.setdefault(name, Round(name, self.world))
        current.post(rank, request)
        if current.missing == 0:
            del self._open[name]
        return current


class MemoryNetwork:
    """One rank's access to the board. Its ranks are always there, and their hosts are known before they meet."""

    ready = True
    device = torch.device("cpu")

    def __init__(self, board: Board, rank: int, ranks_per_host: int):
        self._board = self.generation = board
        self.hosts: tuple[int, ...] | None = None
        self.meeting, self.host = "", f"host {rank // ranks_per_host}"
        self.world = World(rank, board.world, tuple(rank // ranks_per_host for rank in range(board.world)))

    def prepare(self) -> None:
        """Do nothing: the meeting needs no preparation."""

    def failure(self, text: str) -> Exception:
        """Make the error of an exchange that cannot go on."""
        return RuntimeError(text)

    def start(self, request: Request, name: str) -> Answer:
        return partial(self._board.post(name, self.world.rank, request).reply, self.world.rank)
