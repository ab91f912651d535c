"""ByHost: dense inside a host, compressed between hosts. The ranks of a host act as one sender and share its work.

A bucket has as many parts as a host has ranks, and each rank owns one part. An exchange has three stages. Every rank sends its
accumulated parts to their owners on its host, which add them up. The compressor exchanges the host's sum with the owners of the
same part on the other hosts. The ranks of a host send one another the updates of their parts. All stages consist of sends, so
that no process sets are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Layout, Steps, Traits
from gradcomp.core.host_part import PartState, Position, position_of
from gradcomp.core.requests import Gather, Payload, Reduce, Reply, Request, Requests, Send, World, send
from gradcomp.core.wrapper import Wrapper
from gradcomp.messages import payload as payloads
from gradcomp.native import kernels
from gradcomp.native.extension import LARGEST
from gradcomp.native.memory import Memory, Update


@dataclass(frozen=True)
class ByHost(Wrapper):
    """A wrapper that uses its compressor between hosts only. The ranks of a host exchange dense parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        traits = self.inner.traits
        reasons = {
            "it needs the layers' learning rates, but a rank's part cuts through layers": traits.rates == "needed",
            "it treats the first and last layers differently, but a rank's part cuts through layers": traits.ends,
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"{self.inner} cannot use by_host: {reason}; leave by_host out")

    def added_knobs(self) -> list[str]:
        return ["by_host=true"]

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, rates="unused", shares_residual=True)

    def init(self, layout: Layout, seed: int) -> PartState:
        return PartState(layout, seed)

    def save(self, state: PartState) -> dict[str, Any]:
        if state.saved is not None:
            return dict(state.saved)
        inner = {} if state.inner is None else super().save(state)
        return {"exchanges": state.exchanges, "place": state.place, "inner": inner}

    def load(self, state: PartState, saved: Mapping[str, Any]) -> None:
        state.load(self.inner, saved)

    def save_shared(self, state: PartState) -> dict[str, Any]:
        """Copy the number of exchanges. The rest differs between the ranks of a host."""
        return {"exchanges": state.exchanges}

    def load_shared(self, state: PartState, saved: Mapping[str, Any]) -> None:
        """Make the inner compressor's state anew: no rank has the states of all parts."""
        state.forget()

    def stats(self, state: PartState) -> dict[str, Any]:
        return {} if state.inner is None else super().stats(state)

    def exchange(self, acc: Acc, state: PartState, world: World) -> Steps:
        position = position_of(world)
        state.move_to(self.inner, position)
        state.exchanges += 1
        empty = None if acc.mask is None else acc.residual == 0  # what waits of other entries may lie on a neighbour
        host_acc = yield from _sum_in_host(acc, state, position)
        part_update = yield from _exchange_among_peers(
            self.inner.exchange(host_acc, state.inner, position.peer_world), position
        )
        part = state.slice(acc.residual, position.part)
        torch.mul(host_acc.residual[: len(part)], 1 / position.host_world.share, out=part).clamp_(-LARGEST, LARGEST)
        update = yield from _gather_parts(part_update, state, position, acc.memory)
        if acc.mask is not None and empty is not None:
            acc.mask.note_all(empty | ((update != 0) & update.isfinite()))
        return Update(update)


def _sum_in_host(acc: Acc, state: PartState, position: Position) -> Requests[Acc]:
    """Send shares of every part to its owner on this host. Return the acc of the own part: the sum of the host's shares."""
    owners = {rank: part for part, rank in enumerate(position.neighbours) if part != position.part}
    share = position.host_world.share
    outgoing = {rank: state.payload(state.padded(acc.residual, part), acc.flag, share) for rank, part in owners.items()}
    received = yield from send(outgoing, outgoing.keys(), state.form, acc.residual.device)
    for part in owners.values():
        state.slice(acc.residual, part).zero_()
    total = state.padded(acc.residual, position.part) * share
    residual = torch.zeros_like(total)
    for rank in sorted(received):
        total += received[rank]["values"]
    flag = torch.zeros(1, dtype=torch.int32, device=residual.device)
    kernels.accumulate(
        total.split(state.part_layout.sizes), residual, None, flag, moments=state.moments, peaks=state.peaks, memory=acc.memory
    )
    flags = [flag, *(payload["flag"] for payload in received.values()), *([] if acc.flag is None else [acc.flag])]
    return Acc(residual, acc.memory, None, torch.stack(flags).amax(0), state.moments, peaks=state.peaks)


def _gather_parts(update: Update, state: PartState, position: Position, memory: Memory) -> Requests[Tensor]:
    """Gather the updates of all parts inside the host. Turn the mean over hosts into the mean over ranks."""
    payload = state.payload(update.flat, None)
    memory.give_back(update)
    parts = yield from _gather_from(position.neighbours, payload, position)
    return torch.cat([part["values"] for part in parts])[: state.layout.total].mul_(position.host_world.mean_of_shares)


def _exchange_among_peers(steps: Steps, position: Position) -> Steps:
    """Run an exchange among the peers. Each of its requests becomes one send among all ranks."""
    reply: Reply | None = None
    while True:
        try:
            request: Request = steps.send(reply)
        except StopIteration as end:
            update: Update = end.value
            return update
        match request:
            case Gather(payload):
                reply = yield from _gather_from(position.peers, payload, position)
            case Reduce(tensor, scale):
                received = yield from _gather_from(position.peers, payloads.wrap(tensor), position)
                total = received[0]["bytes"].clone()
                for other in received[1:]:
                    total += other["bytes"]
                reply = total.mul_(scale)
            case Send(outgoing, senders, form, device):
                to_ranks = {position.peers[peer]: payload for peer, payload in outgoing.items()}
                sent = yield from send(to_ranks, [position.peers[peer] for peer in senders], form, device)
                reply = {peer: sent[rank] for peer, rank in enumerate(position.peers) if rank in sent}


def _gather_from(ranks: tuple[int, ...], payload: Payload, position: Position) -> Requests[list[Payload]]:
    """Gather the payloads of these ranks, which include this one, by a send."""
    others = [rank for rank in ranks if rank != position.neighbours[position.part]]
    received = yield from send(dict.fromkeys(others, payload), others, payload.form, payload.bytes.device)
    return [received.get(rank, payload) for rank in ranks]
