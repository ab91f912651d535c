"""What ranks under local steps tell each other beside their progress: a roll call, and rank 0's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.core.requests import Reduce
from gradcomp.networks import Answer, Connection, gather

_UNLIKE = (
    "{places}: all ranks take the same number of steps up to a synchronization, and flush() between the same two. Let a rank "
    "that has no batch, or leaves one out, call zero_grad() and step() as the others do, and start all ranks again"
)


class RollCall:
    """The numbers by which ranks tell each other what each of them begins. They travel as the first message of an exchange.

    Ranks that begin unlike exchanges would wait for each other's messages, or read one for another.
    flags: of the last roll call that has ended, those that were set on any rank. is_first: the next one is.
    """

    def __init__(self, network: Connection):
        self._network = network
        self._answer: Answer | None = None
        self.flags: list[bool] = []
        self.is_first = True

    def begin(self, own: Sequence[int], flags: Sequence[bool]) -> None:
        """Begin to exchange numbers below 2^24, and flags. They are as many on all ranks."""
        self.is_first = False
        of_ranks = torch.zeros(self._network.world.size, len(own))
        of_ranks[self._network.world.rank] = torch.tensor(own)
        self._width = len(own)
        told = torch.cat([of_ranks.view(-1), torch.tensor(flags, dtype=torch.float32)]).to(self._network.device)
        self._answer = self._network.start(Reduce(told), "the roll call of local steps")

    def end(self) -> list[list[int]]:
        """Return the numbers of all ranks, once; an empty list later."""
        answer, self._answer = self._answer, None
        if answer is None:
            return []
        told = answer()
        assert isinstance(told, Tensor)
        end = self._network.world.size * self._width
        self.flags = told[end:].ne(0).tolist()
        return [[int(each) for each in own] for own in told[:end].view(-1, self._width).tolist()]


def words_of_unlike(places: Sequence[Sequence[int]], every: int) -> str:
    """Say where ranks are that have begun unlike exchanges; "" if all began one. places: whether each flushes, and its step."""
    if len({tuple(each[:1]) if each[0] else tuple(each) for each in places}) == 1:
        return ""
    words = [
        f"rank {rank} {'calls flush()' if flushes else 'synchronizes'} after step {step} of {every}"
        for rank, (flushes, step) in enumerate(places)
    ]
    first = next(i for i, each in enumerate(places) if each != places[0])
    return _UNLIKE.format(places=f"{words[0]}, and {words[first]}")


@torch.no_grad()
def take_that_of_rank_0(own: Tensor, network: Connection, name: str) -> None:
    """Give all ranks rank 0's tensor, of any type. It has the same shape and type on all."""
    if not own.numel():
        return
    flat = own.detach().to(network.device).reshape(-1)
    if own.is_floating_point():  # rank 0's, and the others' zeros
        wide = flat.to(torch.float64 if own.dtype == torch.float64 else torch.float32, copy=True)
        found = network.start(Reduce(wide if network.world.rank == 0 else torch.zeros_like(wide)), name)()
        assert isinstance(found, Tensor)
    else:
        found = gather(network, flat.contiguous(), name)()[0]
    found = found.view(own.shape).to(own.device, own.dtype)
    if not torch.equal(own.detach(), found):
        own.copy_(found)
