"""Ranks in one process: each posts its requests on a board, and finds the answers there once all have posted theirs."""

from __future__ import annotations

from functools import partial

from gradcomp.networks import Answer
from gradcomp.networks.mail import check_senders
from gradcomp.requests import Gather, Payload, Reduce, Reply, Request, Send, World


class Round:
    """One request of every rank, and once all are there the answers. It goes when the last rank has let go of it."""

    def __init__(self, name: str, world: int):
        self.name, self.missing = name, world
        self.requests: list[Request | None] = [None] * world
        self.replies: list[Reply] | None = None

    def post(self, rank: int, request: Request) -> None:
        if self.requests[rank] is not None:
            raise RuntimeError(f"exchange {self.name}: rank {rank} asks twice")
        self.requests[rank] = request
        self.missing -= 1

    def reply(self, rank: int) -> Reply:
        if self.replies is None:
            self.replies = self._answer()
            self.requests.clear()
        return self.replies[rank]

    def _answer(self) -> list[Reply]:
        requests, world = self.requests, len(self.requests)
        first = requests[0]
        if any(type(request) is not type(first) for request in requests):
            kinds = ", ".join(type(request).__name__ for request in requests)
            raise RuntimeError(f"exchange {self.name}: the ranks ask for different things ({kinds})")
        match first:
            case Gather():
                payloads: list[Payload] = [r.payload for r in requests if isinstance(r, Gather)]
                if len({payload.form for payload in payloads}) > 1:
                    raise RuntimeError(f"exchange {self.name}: the ranks' payloads have different forms")
                return [payloads] * world
            case Reduce(tensor, scale):
                for request in requests[1:]:
                    assert isinstance(request, Reduce)
                    tensor += request.tensor  # it was given away
                return [tensor.mul_(scale)] * world
            case Send():
                sends = [r for r in requests if isinstance(r, Send)]
                replies: list[Reply] = []
                for me, own in enumerate(sends):
                    came = {rank: each.payloads[me] for rank, each in enumerate(sends) if me in each.payloads}
                    check_senders(own, came, self.name)
                    replies.append(came)
                return replies
        raise TypeError(f"exchange {self.name}: {first!r} is no request")


class Board:
    """The rounds for which some rank has not posted yet."""

    def __init__(self, world: int):
        self.world = world
        self._open: dict[str, Round] = {}

    def clear(self) -> None:
        """Forget what some rank has not posted for, after a failure."""
        self._open.clear()

    def post(self, name: str, rank: int, request: Request) -> Round:
        own = self._open.setdefault(name, Round(name, self.world))
        own.post(rank, request)
        if own.missing == 0:
            del self._open[name]
        return own


class MemoryNetwork:
    """One rank's access to the board."""

    def __init__(self, board: Board, rank: int, ranks_per_host: int):
        self._board = board
        self.world = World(rank, board.world, tuple(rank // ranks_per_host for rank in range(board.world)))

    def start(self, request: Request, name: str) -> Answer:
        return partial(self._board.post(name, self.world.rank, request).reply, self.world.rank)
